"""The accepted forms of an output's covariance, and argument checks."""

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.covariance.fields import check_array, check_floating, known_values
from moment_jax.covariance.numerics import vector_variance
from moment_jax.xla import diagonal_matrix

Cov = Array | Covariance


def check_output(name: str, target: Array, mean: Array, cov: Cov) -> None:
    """Raise unless target and mean agree, (D,) or (T, D), and `cov` is a covariance of the mean."""
    check_array(name, mean)
    shape = tuple(mean.shape)
    if len(shape) not in (1, 2) or tuple(target.shape) != shape:
        raise ValueError(
            f"`{name}` needs target.shape == mean.shape, (D,) or (T, D). Got {tuple(target.shape)} "
            f"and {shape}. For a batch, use jax.vmap({name}, in_axes=(None, 0, 0, 0))."
        )
    check_cov(name, shape, cov)


def check_cov(name: str, shape: tuple[int, ...], cov: Cov) -> None:
    """Raise unless `cov` is a covariance of an array of this shape."""
    if not hasattr(cov, "shape"):
        raise TypeError(
            f"`{name}` needs a covariance: an array or a structure. Got {type(cov).__name__}."
        )
    check_floating(name, cov)
    allowed = (shape,) if isinstance(cov, Covariance) else (shape, shape + shape)
    if tuple(cov.shape) not in allowed:
        wanted = " or ".join(str(form) for form in allowed)
        raise ValueError(
            f"`{name}` needs a covariance of shape {wanted} (variances, or every pair) for a mean "
            f"of shape {shape}. Got {tuple(cov.shape)}. For a batch, use jax.vmap."
        )


def check_logits(name: str, mean: Array, cov: Cov) -> Array:
    """Return `cov`; raise unless it is an array (C,) or (C, C) and `mean` holds (C,) logits."""
    check_array(name, mean)
    if mean.ndim != 1:
        raise ValueError(
            f"`{name}` needs the logits of one example, of shape (C,). Got {tuple(mean.shape)}. "
            f"For a batch, use jax.vmap."
        )
    if isinstance(cov, Covariance):
        raise TypeError(
            f"`{name}` needs the logits' covariance as an array, (C,) or (C, C). "
            f"Got {type(cov).__name__}. Take cov.variance()[t] or cov.to_dense()[t, :, t]."
        )
    check_cov(name, tuple(mean.shape), cov)
    return cov


def as_label(name: str, target: Array | int, num_classes: int) -> Array:
    """`target` as an array; raise unless it is an integer class index, in range if known."""
    known = known_values(target)
    target = jnp.asarray(target)
    if target.ndim != 0 or not jnp.issubdtype(target.dtype, jnp.integer):
        raise ValueError(
            f"`{name}` with Categorical needs an integer class index of shape (). Got "
            f"{tuple(target.shape)} of {target.dtype}. For a batch, use jax.vmap; for one-hot "
            "targets, pass jnp.argmax(target)."
        )
    if known is not None and not 0 <= known < num_classes:
        raise ValueError(
            f"`{name}` needs a class index from 0 to {num_classes - 1}. Got {known}. There is one logit "
            "per class."
        )
    return target


def of_label(values: Array, label: Array) -> Array:
    """values[label]; NaN if the label is out of range, which compiled code cannot raise."""
    at_label = jnp.asarray(values).at[label]
    return at_label.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def variances(mean: Array, cov: Cov) -> Array:
    """Var[f], in the shape of the mean."""
    if isinstance(cov, Covariance):
        return cov.variance()
    return vector_variance(flat_cov(mean, cov)).reshape(mean.shape)


def flat_cov(mean: Array, cov: Cov) -> Array:
    """The covariance of the flattened output, (M, M), or (M,) where only variances are given."""
    if isinstance(cov, Covariance):
        cov = cov.to_dense()
    return cov.reshape((mean.size,) * (cov.ndim // mean.ndim))


def token_blocks(mean: Array, cov: Cov) -> Array:
    """Each token's own covariance, (T, D, D); a vector counts as one token."""
    if isinstance(cov, Covariance):
        cov = cov.to_dense()
    if cov.ndim == mean.ndim:
        return diagonal_matrix(jnp.atleast_2d(cov))
    return cov[None] if mean.ndim == 1 else jnp.einsum("tdte->tde", cov)
