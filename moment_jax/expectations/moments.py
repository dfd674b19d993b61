"""The moments of a nonlinear function of a Gaussian, and checks of the arguments."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from moment_jax.xla import materialized

Pair = tuple[Array, Array]


class ElementwiseMoments(NamedTuple):
    """Moments of f(x) for x ~ N(m, v), elementwise: four arrays of the shape of m.

    `gain` and `second` are the first two coefficients of f in the Hermite basis of x. For jointly
    Gaussian x and y, Cov[f(x), f(y)] = gain_x gain_y Cov[x, y] + second_x second_y corr[x, y]^2 + terms
    of third and higher order in the correlation. Hence (Parseval) gain^2 v + second^2 <= variance.

    Attributes:
      mean: E[f(x)].
      variance: Var[f(x)], never negative.
      gain: E[f'(x)], which is Cov[f(x), x] / v (Stein) and d mean / d m.
      second: v E[f''(x)] / sqrt(2), which is sqrt(2) v d mean / d v (Price).
    """

    mean: Array
    variance: Array
    gain: Array
    second: Array


Formula = Callable[[Array, Array], ElementwiseMoments]  # of mean and variance


def evaluated(name: str, function: Formula, mean: Array, variance: Array) -> ElementwiseMoments:
    """Call `function` with checked arguments in their common dtype; half precision goes through float32.

    `name` is the public function, for error messages.
    """
    mean, variance = jnp.asarray(mean), jnp.asarray(variance)
    if mean.shape != variance.shape:
        raise ValueError(
            f"`{name}(mean, variance)` needs variance.shape == mean.shape. "
            f"Got {variance.shape} and {mean.shape}. For one variance use jnp.full_like(mean, v)."
        )
    dtype = jnp.result_type(mean, variance)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"`{name}(mean, variance)` needs real floating-point arrays. Got {mean.dtype} and "
            f"{variance.dtype}. Use mean.astype(float)."
        )
    mean, variance = materialized(mean.astype(dtype)), materialized(variance.astype(dtype))
    if jnp.finfo(dtype).bits >= 32:
        return materialized(function(mean, variance))
    moments = function(mean.astype(jnp.float32), variance.astype(jnp.float32))
    return ElementwiseMoments(*(moment.astype(dtype) for moment in moments))


def checked_row(
    name: str, mean: Array, cov: Array, mask: Array | None
) -> tuple[Array, Array, Array]:
    """Check one row of scores for `name`; return mean, cov and the mask of unmasked entries.

    Where an entry is masked, by `mask` or by a mean of -inf, the mean is -inf and the covariance 0.
    """
    mean, cov = jnp.asarray(mean), jnp.asarray(cov)
    if mean.ndim != 1 or cov.shape not in (mean.shape, mean.shape * 2):
        raise ValueError(
            f"`{name}` takes one row: shape (C,) and cov (C, C) or (C,). "
            f"Got {mean.shape} and {cov.shape}. For a batch, use jax.vmap({name})."
        )
    keep = mean != -jnp.inf  # NaN passes through
    if mask is not None:
        if mask.shape != mean.shape or mask.dtype != bool:
            raise ValueError(
                f"`{name}` needs a boolean mask of shape {mean.shape}. "
                f"Got {mask.dtype} {mask.shape}. Use scores_mask.astype(bool)."
            )
        keep = keep & mask
    both = keep if cov.ndim == 1 else keep[:, None] & keep[None, :]
    return jnp.where(keep, mean, -jnp.inf), jnp.where(both, cov, 0.0), keep
