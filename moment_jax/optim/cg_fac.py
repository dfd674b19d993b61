"""CG-FAC: the natural gradient by conjugate gradients, layer by layer (Algorithm 1)."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from moment_jax.optim.conjugate_gradient import Linear, Solution, conjugate_gradient
from moment_jax.optim.damping import (
    DEFAULT_BOUND,
    DEFAULT_DAMPING,
    Bound,
    Damping,
    Number,
    Schedule,
    check_range,
)
from moment_jax.optim.factors import (
    DiagonalFactor,
    EmbeddingFactor,
    Factor,
    Factors,
    RowFactor,
    apply_curvature,
)
from moment_jax.optim.groups import Groups, Matrices, count_layers
from moment_jax.optim.inverses import divided
from moment_jax.optim.kfac import StaleInverse
from moment_jax.optim.last_step import inner
from moment_jax.optim.layer_blocks import Blocks
from moment_jax.optim.row_systems import solve_rows
from moment_jax.optim.safeguard import per_rate, safeguarded
from moment_jax.optim.second_order import ScaleBySecondOrder
from moment_jax.xla import diagonal_of


class ConjugateGradientState(NamedTuple):
    """State of the solver by group of layers; `iterations` and `residual` are for logs."""

    preconditioner: Any  # inverses of `StaleInverse`; else None
    iterations: Matrices  # (L,), of the last step
    residual: Matrices  # (L,), relative, of the last step


@dataclasses.dataclass(frozen=True)
class Jacobi:
    """Precondition by the diagonal of F + damping I."""


Preconditioner = Jacobi | StaleInverse
DEFAULT_PRECONDITIONER = StaleInverse()


@dataclasses.dataclass(frozen=True)
class ConjugateGradientSolver:
    """(F + damping I) x = grad by conjugate gradients."""

    max_iterations: int | Array
    tolerance: Number
    precondition: Preconditioner | None

    def init(self, groups: Groups, dtype: jnp.dtype) -> ConjugateGradientState:
        """The state before the first step."""
        stale, counts = self.precondition, count_layers(groups)
        return ConjugateGradientState(
            stale.init(groups, dtype) if isinstance(stale, StaleInverse) else None,
            {key: jnp.zeros(count, jnp.int32) for key, count in counts.items()},
            {key: jnp.zeros(count, dtype) for key, count in counts.items()},
        )

    def solve(
        self,
        curvature: Factors,
        grads: Matrices,
        damping: Array,
        state: ConjugateGradientState,
        fresh: Array,
        ready: Array,
    ) -> tuple[Matrices, Array, ConjugateGradientState]:
        """Solve one group after another."""
        stale, inverses = self.precondition, state.preconditioner
        if isinstance(stale, StaleInverse):
            inverses = stale.refreshed(curvature, damping, inverses, fresh, ready)
        by_key = {} if inverses is None else inverses.inverses
        solved = {
            key: self._solve(curvature[key], grad, damping, by_key.get(key))
            for key, grad in grads.items()
        }
        x, iterations, residual = (
            {key: getattr(one, name) for key, one in solved.items()}
            for name in ("x", "iterations", "relative_residual")
        )
        # x^T (F + damping) x; the damping bounds directions in which F is zero.
        quadratic = inner(x, {key: grads[key] - one.residual for key, one in solved.items()})
        return x, quadratic, ConjugateGradientState(inverses, iterations, residual)

    def _solve(self, factor: Factor, grad: Array, damping: Array, inverse: Any) -> Solution:
        if isinstance(factor, DiagonalFactor):
            diagonal, count = factor.squares + damping, grad.shape[:1]
            x = divided(grad, diagonal)  # exact; 0 where F and damping are both 0
            none = jnp.zeros(count, grad.dtype)
            return Solution(x, grad - diagonal * x, jnp.zeros(count, jnp.int32), none)
        limits: Any = {"max_iterations": self.max_iterations, "tolerance": self.tolerance}
        if isinstance(factor, RowFactor):
            return solve_rows(factor, grad, damping, **limits)
        precondition: Linear | None = None
        stale = self.precondition
        if isinstance(stale, StaleInverse):
            precondition = lambda r: stale.apply(inverse, factor, r, damping)  # noqa: E731
        elif stale is not None:
            inputs = factor[0] if isinstance(factor, EmbeddingFactor) else diagonal_of(factor[0])
            diagonal = inputs[:, :, None] * diagonal_of(factor.outputs)[:, None, :] + damping
            scale = 1 / jnp.where(diagonal > 0, diagonal, 1)
            precondition = lambda r: scale * r  # noqa: E731
        return conjugate_gradient(
            lambda v: apply_curvature(factor, v) + damping * v,
            grad,
            None,
            precondition=precondition,
            **limits,
        )


def scale_by_cg_fac(
    *,
    damping: Damping = DEFAULT_DAMPING,
    max_iterations: int | Array = 5,
    tolerance: Number = 0.1,
    precondition: Preconditioner | None = DEFAULT_PRECONDITIONER,
    decay: float | Array | None = 0.95,
    curvature_every: int | Array = 5,
    kl_bound: Bound = DEFAULT_BOUND,
    blocks: Blocks | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction of `cg_fac`, x of (F + damping I) x = grad within a bound; arguments as there.

    Sign, momentum and undoing of bad steps are left to the rest of an `optax.chain`.
    """
    check_range("cg_fac", "max_iterations", max_iterations, least=1)
    check_range("cg_fac", "tolerance", tolerance, least=0)
    solver = ConjugateGradientSolver(max_iterations, tolerance, precondition)
    return ScaleBySecondOrder(
        "cg_fac", solver, damping, decay, kl_bound, curvature_every, blocks
    ).transformation()


def cg_fac(
    learning_rate: Number | Schedule = 1.0,
    *,
    damping: Damping = DEFAULT_DAMPING,
    max_iterations: int | Array = 5,
    tolerance: Number = 0.1,
    precondition: Preconditioner | None = DEFAULT_PRECONDITIONER,
    decay: float | Array | None = 0.95,
    curvature_every: int | Array = 5,
    kl_bound: Bound = DEFAULT_BOUND,
    momentum: Number = 0.8,
    weight_decay: Number = 0.0,
    blocks: Blocks | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The natural gradient by conjugate gradients: no Fisher matrix is formed or inverted.

    For every layer it solves (F + damping I) x = grad and steps by -learning_rate x. F comes from the
    `factors` of `value_grad_and_factors`: the operator A V G for Kronecker factors, the exact block of
    the batch for `PerSample` and `PerToken` (these need decay=None). Normalisations are divided by their
    diagonal. Layers of one shape are solved together.

    The defaults need no tuning: damping and the bound of the step adapt by what each new gradient shows
    about the last step (`AdaptiveDamping`, `TrustRegion`), for one product with the curvature. It is
    `scale_by_cg_fac`, `optax.ema`, `optax.add_decayed_weights` and `optax.scale_by_learning_rate` in a
    chain.

    Call `update(grads, state, params, factors=factors, value=value)`:

      factors: may be None (or of weight 0) if there is no new curvature; `curvature_due(state)` tells
        when to compute it.
      value: the loss at `params`. If it is not finite or far above its average, the last step is taken
        back, the bound quartered and the momentum dropped; `state.taken_back` counts these steps.
      change: for `LevenbergMarquardt` only.

    Updates are always finite. If a gradient is not finite, or there is no curvature yet, the step is
    zero and `state.skipped` counts it. Factors that are not finite are left out of the averages.
    Iterations stop at directions without positive curvature, so damping 0 and zero gradients are
    harmless. Iterations, residuals, damping and bound are in `state.chain[0]`.

    Args:
      learning_rate: a number or a schedule. `TrustRegion` compensates for much of a decreasing rate; for
        steps that fall to zero give a schedule of `kl_bound` too.
      damping: gamma: `AdaptiveDamping()`, `LevenbergMarquardt()`, a number or a schedule. Far above most
        eigenvalues of F, the step is that of gradient descent.
      max_iterations: m, the most iterations.
      tolerance: iterations stop when |residual| <= tolerance |grad|.
      precondition: `StaleInverse()` (default), K-FAC's inverses, a few steps old, with which one to
        three iterations do instead of dozens; `Jacobi()`, the diagonal; or None, Algorithm 1 as printed.
      decay: of the running averages of the factors; None to use each batch on its own.
      curvature_every: steps between new curvature, for `curvature_due`; the first of these steps all
        have it.
      kl_bound: x is scaled so that 1/2 step^T (F + damping I) step <= kl_bound, nats per example:
        `TrustRegion()`, which assumes a learning rate of 1, a number, a schedule, or None for no bound.
        Blocks that ignore correlations between tokens underestimate F, so a fixed bound may have to be
        far below the intended divergence.
      momentum: of the running average of the directions; 0 for none.
      weight_decay: decoupled, as in AdamW: also subtracts learning_rate weight_decay params.
      blocks: `find_blocks(model)`; None to infer the layers from Flax's parameter names.

    Raises:
      ValueError: if a number is out of range, or (from init and update) parameters or factors do not
        match; the leaf is named.

    Source: Brownian document, Algorithm 1, Eq. 16 to 18 (the step is subtracted).

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> import moment_jax as mj
    >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    >>> def loss(model, x, y):
    ...     return jnp.mean((model(x) - y) ** 2), mj.optim.NormalPrediction(model(x))
    >>> tx = mj.optim.cg_fac()
    >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    >>> @nnx.jit
    ... def step(model, optimizer, x, y):
    ...     value, grads, factors = mj.optim.value_grad_and_factors(loss)(model, x, y)
    ...     optimizer.update(model, grads, factors=factors, value=value)
    ...     return value
    >>> first, second = (step(model, optimizer, jnp.eye(3), jnp.ones((3, 2))) for _ in range(2))
    >>> bool(second < first)
    True
    """
    direction = scale_by_cg_fac(
        damping=damping,
        max_iterations=max_iterations,
        tolerance=tolerance,
        precondition=precondition,
        decay=decay,
        curvature_every=curvature_every,
        kl_bound=per_rate("cg_fac", kl_bound, learning_rate),
        blocks=blocks,
    )
    return safeguarded("cg_fac", direction, learning_rate, momentum, weight_decay)
