"""K-FAC and CG-FAC: the natural gradient by inverse Kronecker factors, or by conjugate gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from moment_jax.optim.conjugate_gradient import Solution, conjugate_gradient
from moment_jax.optim.damping import (
    DEFAULT_BOUND,
    DEFAULT_DAMPING,
    Bound,
    Damping,
    Number,
    Schedule,
    check_range,
    inner,
)
from moment_jax.optim.factors import DiagonalFactor, Factor, Factors, RowFactor, apply_curvature
from moment_jax.optim.inverses import KFACState, apply_inverse, divided, no_inverses
from moment_jax.optim.layer_blocks import Blocks, Matrices
from moment_jax.optim.safeguard import per_rate, safeguarded
from moment_jax.optim.second_order import scale_by_second_order

Refresh = Callable[[KFACState], KFACState]


class ConjugateGradientState(NamedTuple):
    """State of the solver by group of layers; `iterations` and `residual` are for logs."""

    preconditioner: KFACState | None
    iterations: Matrices  # (L,), of the last step
    residual: Matrices  # (L,), relative, of the last step


def scale_by_kfac(
    *,
    damping: Damping = DEFAULT_DAMPING,
    decay: float | Array = 0.95,
    curvature_every: int | Array = 5,
    refresh_every: int | Array = 10,
    kl_bound: Bound = DEFAULT_BOUND,
    blocks: Blocks | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction of `kfac`, (A + ..)^-1 grad (G + ..)^-1 within a bound; arguments as there.

    Sign, momentum and undoing of bad steps are left to the rest of an `optax.chain`.
    """

    def solve(
        curvature: Factors, grads: Matrices, damping: Array, state: KFACState, refresh: Refresh
    ) -> tuple[Matrices, Array, KFACState]:
        for key, factor in curvature.items():
            if isinstance(factor, RowFactor):
                raise TypeError(
                    f"`kfac` needs Kronecker factors. Got {type(factor).__name__} for {key}; take "
                    "KroneckerExpand(), or cg_fac."
                )
        state = refresh(state)
        get = state.inverses.get
        x = {k: apply_inverse(get(k), curvature[k], grad, damping) for k, grad in grads.items()}
        # x^T (F + damping) x = x . grad, exactly if the inverses are of the current curvature.
        return x, inner(x, grads), state

    return scale_by_second_order(
        "kfac", no_inverses, solve, damping=damping, decay=decay, kl_bound=kl_bound,
        curvature_every=curvature_every, refresh_every=refresh_every, blocks=blocks,
    )  # fmt: skip


def scale_by_cg_fac(
    *,
    damping: Damping = DEFAULT_DAMPING,
    max_iterations: int | Array = 5,
    tolerance: Number = 0.1,
    precondition: bool = True,
    decay: float | Array | None = 0.95,
    curvature_every: int | Array = 5,
    refresh_every: int | Array = 10,
    kl_bound: Bound = DEFAULT_BOUND,
    blocks: Blocks | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction of `cg_fac`, x of (F + damping I) x = grad within a bound; arguments as there.

    Sign, momentum and undoing of bad steps are left to the rest of an `optax.chain`.
    """
    check_range("cg_fac", "max_iterations", max_iterations, least=1, whole=True)
    check_range("cg_fac", "tolerance", tolerance, least=0)
    if not isinstance(precondition, bool):
        raise TypeError(
            f"`cg_fac` needs precondition True or False (Algorithm 1 as printed). Got {precondition!r}."
        )

    def start(averages: Factors) -> ConjugateGradientState:
        return ConjugateGradientState(
            no_inverses(averages) if precondition else None,
            {key: jnp.zeros(len(f[0]), jnp.int32) for key, f in averages.items()},
            {key: jnp.zeros(len(f[0]), f.weight.dtype) for key, f in averages.items()},
        )

    def solution(factor: Factor, grad: Array, damping: Array, inverse: Any) -> Solution:
        if isinstance(factor, DiagonalFactor):
            diagonal, none = factor.squares + damping, jnp.zeros(len(grad), grad.dtype)
            x = divided(grad, diagonal)  # exact; 0 where F and damping are both 0
            return Solution(x, grad - diagonal * x, jnp.zeros(len(grad), jnp.int32), none)
        by_inverse = partial(apply_inverse, inverse, factor, damping=damping)
        return conjugate_gradient(
            lambda v: apply_curvature(factor, v) + damping * v,
            grad,
            max_iterations=max_iterations,
            tolerance=tolerance,
            precondition=None if inverse is None or isinstance(factor, RowFactor) else by_inverse,
        )

    def solve(
        curvature: Factors,
        grads: Matrices,
        damping: Array,
        state: ConjugateGradientState,
        refresh: Refresh,
    ) -> tuple[Matrices, Array, ConjugateGradientState]:
        kept = None if state.preconditioner is None else refresh(state.preconditioner)
        inverses = {} if kept is None else kept.inverses
        get = inverses.get
        solved = {k: solution(curvature[k], grad, damping, get(k)) for k, grad in grads.items()}
        x, residual, iterations, relative = ({k: s[i] for k, s in solved.items()} for i in range(4))
        # x^T (F + damping) x; the damping bounds directions in which F is zero.
        quadratic = inner(x, {key: grads[key] - residual[key] for key in x})
        return x, quadratic, ConjugateGradientState(kept, iterations, relative)

    return scale_by_second_order(
        "cg_fac", start, solve, damping=damping, decay=decay, kl_bound=kl_bound,
        curvature_every=curvature_every, refresh_every=refresh_every, blocks=blocks,
    )  # fmt: skip


def kfac(
    learning_rate: Number | Schedule = 1.0,
    *,
    damping: Damping = DEFAULT_DAMPING,
    decay: float | Array = 0.95,
    curvature_every: int | Array = 5,
    refresh_every: int | Array = 10,
    kl_bound: Bound = DEFAULT_BOUND,
    momentum: Number = 0.8,
    weight_decay: Number = 0.0,
    blocks: Blocks | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Kronecker-factored approximate curvature: the step -learning_rate (A + ..)^-1 grad (G + ..)^-1.

    A + pi sqrt(damping) I and G + sqrt(damping) / pi I are inverted by Cholesky factors, under
    `lax.cond`; a layer whose inversion fails keeps its old inverse. Embedding tables are solved in the
    eigenbasis of G, normalisations divided by their diagonal. The arguments, those of `update`,
    adaptation, bad steps and the chain (`scale_by_kfac` first) are as for `cg_fac`.

    Raises:
      ValueError: as `cg_fac`. TypeError: if the factors are of another type.

    Source: Brownian document, Eq. 16 to 18; Martens and Grosse, Optimizing neural networks with
    Kronecker-factored approximate curvature, 2015 (factored Tikhonov damping: section 6.3).
    """
    direction = scale_by_kfac(
        kl_bound=per_rate("kfac", kl_bound, learning_rate), damping=damping, decay=decay,
        curvature_every=curvature_every, refresh_every=refresh_every, blocks=blocks,
    )  # fmt: skip
    return safeguarded("kfac", direction, learning_rate, momentum, weight_decay)


def cg_fac(
    learning_rate: Number | Schedule = 1.0,
    *,
    damping: Damping = DEFAULT_DAMPING,
    max_iterations: int | Array = 5,
    tolerance: Number = 0.1,
    precondition: bool = True,
    decay: float | Array | None = 0.95,
    curvature_every: int | Array = 5,
    refresh_every: int | Array = 10,
    kl_bound: Bound = DEFAULT_BOUND,
    momentum: Number = 0.8,
    weight_decay: Number = 0.0,
    blocks: Blocks | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The natural gradient by conjugate gradients: no Fisher matrix is formed or inverted.

    For every layer it solves (F + damping I) x = grad and steps by -learning_rate x. F comes from the
    `factors` of `value_grad_and_factors`: the operator A V G for Kronecker factors, the exact block of
    the batch for `PerSample` (which needs decay=None). Normalisations are divided by their diagonal.
    Layers of one shape are solved together.

    The defaults need no tuning: damping and the bound of the step adapt by what each new gradient shows
    about the last step (`AdaptiveDamping`, `TrustRegion`), for one product with the curvature. It is
    `scale_by_cg_fac`, `optax.ema`, `optax.add_decayed_weights` and `optax.scale_by_learning_rate` in a
    chain. The README of this folder has a whole training.

    Call `update(grads, state, params, factors=factors, value=value)`:

      factors: of `value_grad_and_factors`; with `when=curvature_due(state)` they have weight 0 at steps
        without new curvature.
      value: the loss at `params`. If it is not finite or far above its average, the last step is taken
        back, the bound quartered and the momentum dropped; `state.taken_back` counts these steps.

    Updates are always finite. If a gradient is not finite, or there is no curvature yet, the step is
    zero and `state.skipped` counts it. Factors that are not finite are left out of the averages.
    Iterations stop at directions without positive curvature, so damping 0 and zero gradients are
    harmless. Iterations, residuals, damping and bound are in `state.chain[0]`.

    Args:
      learning_rate: a number or a schedule. `TrustRegion` compensates for much of a decreasing rate; for
        steps that fall to zero give a schedule of `kl_bound` too.
      damping: gamma: `AdaptiveDamping()`, a number or a schedule. Far above most eigenvalues of F, the
        step is that of gradient descent.
      max_iterations: m, the most iterations.
      tolerance: iterations stop when |residual| <= tolerance |grad|.
      precondition: by K-FAC's inverses, a few steps old, with which one to three iterations do instead
        of dozens: an old inverse costs iterations, not accuracy. False for Algorithm 1 as printed.
      decay: of the running averages of the factors; None to use each batch on its own.
      curvature_every: steps between new curvature, for `curvature_due`; the first of these steps all
        have it.
      refresh_every: steps between inversions; the first intervals are 1, 2, 4, ... steps.
      kl_bound: x is scaled so that 1/2 step^T (F + damping I) step <= kl_bound, nats per example:
        `TrustRegion()`, which assumes a learning rate of 1, a number, a schedule, or None for no bound.
        Blocks that ignore correlations between tokens underestimate F, so a fixed bound may have to be
        far below the intended divergence.
      momentum: of the running average of the directions; 0 for none.
      weight_decay: decoupled, as in AdamW: also subtracts learning_rate weight_decay params.
      blocks: `find_blocks(model)`; None to infer the layers from Flax's parameter names.

    Other parameters go to another optimiser, by `for_model` or `optax.partition`; `optax.masked` would
    add their raw gradients to them.

    Raises:
      ValueError: if a number is out of range, or (from init and update) there are no factors, or
        parameters or factors do not match; the leaf is named.

    Source: Brownian document, Algorithm 1, Eq. 16 to 18 (the step is subtracted).
    """
    direction = scale_by_cg_fac(
        kl_bound=per_rate("cg_fac", kl_bound, learning_rate), damping=damping, decay=decay,
        max_iterations=max_iterations, tolerance=tolerance, precondition=precondition,
        curvature_every=curvature_every, refresh_every=refresh_every, blocks=blocks,
    )  # fmt: skip
    return safeguarded("cg_fac", direction, learning_rate, momentum, weight_decay)
