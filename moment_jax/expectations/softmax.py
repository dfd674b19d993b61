"""Mean, covariance and expected Jacobian of the softmax of Gaussian scores, one row at a time."""

from typing import Any

import jax
import jax.numpy as jnp

from moment_jax.expectations.tilted import masked_softmax, tilted_softmax

_JACOBIAN_STEPS = 12


def softmax_mean(
    mean: jax.Array, cov: jax.Array, *, order: int = 2, mask: jax.Array | None = None
) -> jax.Array:
    """E[softmax(s)] for one row of scores s ~ N(mean, cov).

    order=1 is softmax(mean). order=2 is the tilted fixed point
    a = softmax(mean + diag(cov) / 2 - cov a): to first order in cov it is the second-order Taylor
    mean (Ito's correction), and it stays a distribution at any noise. Relative error against
    200,000 samples for 16 scores, means of sd 1.5: 0.0004, 0.016, 0.08 and 0.2 for score sd 0.3, 1, 2
    and 3.

    Args:
        mean: E[s], shape (C,). Entries of -inf count as masked.
        cov: Cov[s], shape (C, C), or (C,) when the scores are independent. Symmetric, positive
            semi-definite.
        order: 1 or 2.
        mask: boolean (C,), False where an entry takes no part; its probability is exactly 0.

    Returns:
        Probabilities, shape (C,), that sum to 1 (all 0 if no entry takes part).

    Raises:
        ValueError: shapes do not fit, or order is neither 1 nor 2.

    Source: Transformer derivation, Prop. 3 (order 1); Brownian motion in the Transformer, Eq. 7
    (the term that order 1 drops); Knowles and Minka (2011) (order 2).
    """
    mean, cov, keep = _checked("softmax_mean", mean, cov, mask)
    return _mean(mean, cov, keep, order)


def softmax_jacobian(probabilities: jax.Array) -> jax.Array:
    """Return diag(w) - w w^T, the Jacobian of the softmax where its value is w, shape (C, C).

    Source: Transformer derivation, Prop. 3.
    """
    w = probabilities
    return jnp.diag(w) - w[:, None] * w[None, :]


def expected_softmax_jacobian(probabilities: jax.Array, cov: jax.Array) -> jax.Array:
    """E[diag(w) - w w^T] for a softmax w of mean q, when Cov[w] = X cov X with X this expectation.

    E[w w^T] = q q^T + Cov[w], so X solves X + X cov X = diag(q) - q q^T. Its positive semi-definite
    solution is found by 12 steps with momentum, tuned to a bound on the largest eigenvalue, from
    below. Residual (Frobenius, relative to X) for 16 or 64 scores: below 1e-3 up to score
    sd 2 and 2e-2 at 5. As cov -> 0, X -> diag(q) - q q^T.

    Args:
        probabilities: q = E[w], shape (C,), as from `softmax_mean`.
        cov: covariance of the scores, shape (C, C) or (C,).

    Returns:
        X, shape (C, C): symmetric, rows sum to 0, and 0 wherever q is 0.

    Raises:
        ValueError: shapes do not fit.
    """
    _, cov, _ = _checked("expected_softmax_jacobian", probabilities, cov, None)
    at_mean = softmax_jacobian(probabilities)
    largest = jax.lax.stop_gradient(_largest_eigenvalue_bound(probabilities, cov))
    # Near the solution the map has the slopes 1 .. stiffness; heavy-ball steps are optimal there.
    stiffness = jnp.sqrt(1.0 + 4.0 * largest)
    root = jnp.sqrt(stiffness)
    length, momentum = (2.0 / (1.0 + root)) ** 2, ((root - 1.0) / (root + 1.0)) ** 2

    def advance(_: int, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, before = pair
        residual = at_mean - x - _sandwich(x, cov)
        return x + length * residual + momentum * (x - before), x

    start = 2.0 / (1.0 + stiffness) * at_mean
    x, _ = jax.lax.fori_loop(0, _JACOBIAN_STEPS, advance, (start, start))
    return 0.5 * (x + x.T)


def softmax_moments(
    mean: jax.Array, cov: jax.Array, *, order: int = 2, mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Mean and covariance of softmax(s) for one row of scores s ~ N(mean, cov).

    order=1 gives w = softmax(mean) and J cov J with J = diag(w) - w w^T. order=2 gives the mean q of
    `softmax_mean` and X cov X with X = diag(q) - q q^T - X cov X, the expected Jacobian
    (`expected_softmax_jacobian`). Relative error of the covariance against 200,000 samples, 16 scores:
    0.02, 0.15, 0.3 and 0.4 for score sd 0.3, 1, 2 and 3 (order=1: 0.05, 0.5, 2 and 4).

    Args:
        mean: E[s], shape (C,). Entries of -inf count as masked.
        cov: Cov[s], shape (C, C), or (C,) when the scores are independent.
        order: 1 or 2.
        mask: boolean (C,), False where an entry takes no part: mean and covariance 0 there.

    Returns:
        mean (C,) and covariance (C, C), positive semi-definite, rows summing to 0.

    Raises:
        ValueError: shapes do not fit, or order is neither 1 nor 2.

    Source: Transformer derivation, Prop. 3.
    """
    mean, cov, keep = _checked("softmax_moments", mean, cov, mask)
    q = _mean(mean, cov, keep, order)
    jacobian = softmax_jacobian(q) if order == 1 else expected_softmax_jacobian(q, cov)
    out = _sandwich(jacobian, cov)
    return q, 0.5 * (out + out.T)


def logsumexp_mean(
    mean: jax.Array, cov: jax.Array, *, mask: jax.Array | None = None
) -> jax.Array:
    """The tilted upper bound on E[logsumexp(s)] for one row of scores s ~ N(mean, cov).

    E[logsumexp(s)] <= logsumexp(mean + diag(cov) / 2 - cov a) + a^T cov a / 2 for every a; the a of
    `softmax_mean` is the best. (A lower bound is logsumexp(mean), by Jensen.) The gradient in the
    mean is a, in the covariance diag(a) / 2 - a a^T / 2, as of the exact expectation with a = E[softmax]
    and E[w w^T] = a a^T.

    Args:
        mean: E[s], shape (C,). Entries of -inf count as masked.
        cov: Cov[s], shape (C, C), or (C,) when the scores are independent.
        mask: boolean (C,), False where an entry takes no part.

    Returns:
        The bound, a scalar (-inf if no entry takes part).

    Raises:
        ValueError: shapes do not fit.

    Source: Knowles and Minka (2011).
    """
    mean, cov, keep = _checked("logsumexp_mean", mean, cov, mask)
    a = _mean(mean, cov, keep, 2)
    product = _apply(cov, a)
    tilted = jnp.where(keep, mean, 0.0) + 0.5 * _diagonal(cov) - product
    return jax.nn.logsumexp(tilted, where=keep) + 0.5 * jnp.vdot(a, product)


def _mean(mean: jax.Array, cov: jax.Array, keep: jax.Array, order: int) -> jax.Array:
    if order not in (1, 2):
        raise ValueError(f"A softmax mean has order 1 or 2. Got {order!r}.")
    if order == 1:
        return masked_softmax(mean, keep)
    return tilted_softmax(_apply, cov, mean, _diagonal(cov))


def _checked(
    name: str, mean: jax.Array, cov: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return mean (-inf where masked), cov (0 where masked) and the mask of what is kept."""
    mean, cov = jnp.asarray(mean), jnp.asarray(cov)
    if mean.ndim != 1 or cov.shape not in (mean.shape, mean.shape * 2):
        raise ValueError(
            f"`{name}` takes one row: shape (C,) and cov (C, C) or (C,). "
            f"Got {mean.shape} and {cov.shape}. For a batch, use jax.vmap({name})."
        )
    keep = mean > -jnp.inf
    if mask is not None:
        if mask.shape != mean.shape or mask.dtype != bool:
            raise ValueError(
                f"`{name}` needs a boolean mask of shape {mean.shape}. "
                f"Got {mask.dtype} {mask.shape}. Use scores_mask.astype(bool)."
            )
        keep = keep & mask
    both = keep if cov.ndim == 1 else keep[:, None] & keep[None, :]
    return jnp.where(keep, mean, -jnp.inf), jnp.where(both, cov, 0.0), keep


def _diagonal(cov: jax.Array) -> jax.Array:
    return cov if cov.ndim == 1 else jnp.diagonal(cov)


def _apply(cov: Any, vector: jax.Array) -> jax.Array:
    return cov * vector if cov.ndim == 1 else cov @ vector


def _sandwich(x: jax.Array, cov: jax.Array) -> jax.Array:
    """Return x cov x for a symmetric x."""
    return (x * cov[None, :]) @ x if cov.ndim == 1 else (x @ cov) @ x


def _largest_eigenvalue_bound(q: jax.Array, cov: jax.Array) -> jax.Array:
    """sqrt(tr(J cov J cov)) >= the largest eigenvalue of J cov, J = diag(q) - q q^T."""
    product = _apply(cov, q)
    square = jnp.vdot(q**2, cov**2) if cov.ndim == 1 else jnp.vdot(q, (cov**2) @ q)
    total = square - 2.0 * jnp.vdot(q, product**2) + jnp.vdot(q, product) ** 2
    return jnp.sqrt(jnp.maximum(total, 0.0))
