"""The Jacobian of the softmax, at a point and in expectation over Gaussian scores."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.expectations.moments import checked_row
from moment_jax.xla import diagonal_matrix, materialized

_MAX_STEPS = 24


def softmax_jacobian(probabilities: Array) -> Array:
    """diag(w) - w w^T, the Jacobian of the softmax where its value is w, (C, C).

    Source: Transformer derivation, Prop. 3.
    """
    w = probabilities
    return diagonal_matrix(w) - w[:, None] * w[None, :]


def expected_softmax_jacobian(probabilities: Array, cov: Array) -> Array:
    """E[diag(w) - w w^T] for a softmax w of mean q, taking Cov[w] = X cov X with X this expectation.

    E[w w^T] = q q^T + Cov[w], so X solves the Riccati equation X + X cov X = J, J = diag(q) - q q^T. In
    the commuting case X = 2 J / (1 + sqrt(1 + 4 J cov)): it equals J without noise and shrinks as the
    scores saturate the softmax. The positive semidefinite solution is approached from below by
    heavy-ball steps tuned to a bound on the largest eigenvalue of J cov, two (C, C) products each. They
    stop at an error of 2e-5 (float32) or 4e-11 (float64), or after 24 steps, which leave a residual
    below 1e-3 for 16 or 64 scores of sd up to 5. The derivative is that of the exact solution.

    Args:
      probabilities: q = E[w], (C,), as from `softmax_mean`.
      cov: covariance of the scores, (C, C), or (C,) for independent scores.

    Returns:
      X, (C, C): symmetric, rows sum to 0, and 0 wherever q is 0.

    Raises:
      ValueError: if shapes do not fit.
    """
    q, cov, _ = checked_row("expected_softmax_jacobian", probabilities, cov, None)
    return _expected(q, cov)


@jax.custom_jvp
def _expected(q: Array, cov: Array) -> Array:
    at_mean = softmax_jacobian(q)
    stiffness = _stiffness(q, cov)
    start = 2.0 / (1.0 + stiffness) * at_mean
    x = _heavy_ball(lambda x: at_mean - x - sandwich(x, cov), start, stiffness, at_mean)
    return 0.5 * (x + x.T)


@_expected.defjvp
def _expected_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Solve dX + dX R X + X R dX = dJ - X dR X."""
    (q, cov), (dq, dcov) = primals, tangents
    x = _expected(q, cov)
    slope = x * cov[None, :] if cov.ndim == 1 else x @ cov
    dcov = materialized(dcov)  # a constant's zeros would be a broadcast right operand
    outer = dq[:, None] * q[None, :]
    right = diagonal_matrix(dq) - outer - outer.T - sandwich(x, dcov)
    stiffness = jax.lax.stop_gradient(_stiffness(q, cov))

    def solve(matvec: Callable[[Array], Array], b: Array) -> Array:
        return _heavy_ball(lambda d: b - matvec(d), jnp.zeros_like(b), stiffness, b)

    dx = jax.lax.custom_linear_solve(
        lambda d: d + d @ slope.T + slope @ d, right, solve, transpose_solve=solve
    )
    return x, dx


def sandwich(x: Array, cov: Array) -> Array:
    """The product x cov x for a symmetric x and a cov of shape (C, C) or (C,)."""
    return (x * cov[None, :]) @ x if cov.ndim == 1 else (x @ cov) @ x


def _heavy_ball(
    residual: Callable[[Array], Array], start: Array, stiffness: Array, size: Array
) -> Array:
    """Solve residual(x) = 0, for slopes in -1 .. -stiffness, to a fraction of `size`."""
    root = jnp.sqrt(stiffness)
    length, momentum = (2.0 / (1.0 + root)) ** 2, ((root - 1.0) / (root + 1.0)) ** 2
    tolerance = float(jnp.finfo(start.dtype).eps) ** (4 / 3) * jnp.sum(size * size)

    def unfinished(state: tuple[Array, ...]) -> Array:
        step, _, _, error = state
        return (step < _MAX_STEPS) & (jnp.sum(error**2) > tolerance)

    def advance(state: tuple[Array, ...]) -> tuple[Array, ...]:
        step, x, before, error = state
        new = x + length * error + momentum * (x - before)
        return step + 1, new, x, residual(new)

    first: tuple[Array, ...] = (jnp.asarray(0), start, start, residual(start))
    return jax.lax.while_loop(unfinished, advance, first)[1]


def _stiffness(q: Array, cov: Array) -> Array:
    """sqrt(1 + 4 tr(J cov J cov)^(1/2)), a bound on 1 + 2 x cov at the solution, J = diag(q) - q q^T."""
    contrasts = between_contrasts(cov, q)
    return jnp.sqrt(1.0 + 4.0 * jnp.sqrt(q @ contrasts**2 @ q))


def between_contrasts(cov: Array, q: Array) -> Array:
    """(e_i - q)^T cov (e_k - q), for a symmetric cov of shape (C, C) or (C,)."""
    if cov.ndim == 1:
        cov = diagonal_matrix(cov)
    pulled = cov @ q
    return cov - pulled[:, None] - pulled[None, :] + jnp.vdot(q, pulled)
