"""K-FAC: the natural gradient by inverses of both Kronecker factors of each layer."""

import jax.numpy as jnp
import optax
from jax import Array

from moment_jax.optim.damping import (
    DEFAULT_BOUND,
    DEFAULT_DAMPING,
    Bound,
    Damping,
    Number,
    Schedule,
    check_range,
)
from moment_jax.optim.factors import Factors, RowFactor
from moment_jax.optim.groups import Matrices
from moment_jax.optim.inverses import Cholesky, Inversion
from moment_jax.optim.last_step import Directions, sum_of
from moment_jax.optim.layer_blocks import Blocks
from moment_jax.optim.refresh import KFACState, StaleInverse
from moment_jax.optim.safeguard import per_rate, safeguarded
from moment_jax.optim.second_order import ScaleBySecondOrder


class KroneckerSolver(StaleInverse):
    """(F + damping I)^-1 by inverses that are refreshed every few steps."""

    def solve(
        self,
        curvature: Factors,
        grads: Matrices,
        damping: Array,
        state: KFACState,
        fresh: Array,
        ready: Array,
    ) -> Directions:
        """Refresh the inverses where due, then apply them."""
        for key, factor in curvature.items():
            if isinstance(factor, RowFactor):
                raise TypeError(
                    f"`kfac` needs Kronecker factors. Got {type(factor).__name__} for {key}; take "
                    "KroneckerExpand() or KroneckerReduce(), or cg_fac."
                )
        state = self.refreshed(curvature, damping, state, fresh, ready)
        x = {
            key: self.apply(state.inverses.get(key), curvature[key], grad, damping)
            for key, grad in grads.items()
        }
        # x^T (F + damping) x = x . grad, exactly if the inverses are of the current curvature.
        quadratic = sum_of(jnp.sum(x[key] * grad) for key, grad in grads.items())
        return Directions(x, jnp.maximum(quadratic, 0), state)


def scale_by_kfac(
    *,
    damping: Damping = DEFAULT_DAMPING,
    decay: float | Array = 0.95,
    curvature_every: int | Array = 5,
    refresh_every: int | Array = 10,
    inversion: Inversion | None = None,
    kl_bound: Bound = DEFAULT_BOUND,
    blocks: Blocks | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction of `kfac`, (A + ..)^-1 grad (G + ..)^-1 within a bound; arguments as there.

    Sign, momentum and undoing of bad steps are left to the rest of an `optax.chain`.
    """
    inversion = Cholesky() if inversion is None else inversion
    if not isinstance(inversion, Inversion):
        raise TypeError(
            f"`kfac` needs an inversion such as mj.optim.Cholesky(). Got {inversion!r}."
        )
    check_range("kfac", "refresh_every", refresh_every, least=1)
    solver = KroneckerSolver(inversion, refresh_every)
    return ScaleBySecondOrder(
        "kfac", solver, damping, decay, kl_bound, curvature_every, blocks
    ).transformation()


def kfac(
    learning_rate: Number | Schedule = 1.0,
    *,
    damping: Damping = DEFAULT_DAMPING,
    decay: float | Array = 0.95,
    curvature_every: int | Array = 5,
    refresh_every: int | Array = 10,
    inversion: Inversion | None = None,
    kl_bound: Bound = DEFAULT_BOUND,
    momentum: Number = 0.8,
    weight_decay: Number = 0.0,
    blocks: Blocks | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Kronecker-factored approximate curvature: the step -learning_rate (A + ..)^-1 grad (G + ..)^-1.

    Embedding tables are solved in the eigenbasis of G, normalisations divided by their diagonal.
    Inverses are refreshed every `refresh_every` steps, under `lax.cond`; a layer whose inversion fails
    keeps its old inverse. Arguments of `update`, adaptation and bad steps are as for `cg_fac`. It is
    `scale_by_kfac`, `optax.ema`, `optax.add_decayed_weights` and `optax.scale_by_learning_rate` in a
    chain.

    Args:
      learning_rate: as for `cg_fac`.
      damping: as for `cg_fac`.
      decay: of the running averages of the factors.
      curvature_every: as for `cg_fac`.
      refresh_every: steps between inversions; the first intervals are 1, 2, 4, ... steps.
      inversion: `Cholesky()` (default), `Eigh()` or `NewtonSchulz()`. Factored damping also adds
        sqrt(gamma) times each factor, which is much unless gamma is small; `Eigh()` adds gamma only, but
        eigendecompositions are slow on GPUs and TPUs.
      kl_bound: as for `cg_fac`.
      momentum: as for `cg_fac`.
      weight_decay: as for `cg_fac`.
      blocks: as for `cg_fac`.

    Raises:
      ValueError: as `cg_fac`. TypeError: if `inversion` or the factors are of another type.

    Source: Brownian document, Eq. 16 to 18; Martens and Grosse, Optimizing neural networks with
    Kronecker-factored approximate curvature, 2015 (factored Tikhonov damping: section 6.3).
    """
    direction = scale_by_kfac(
        damping=damping,
        decay=decay,
        curvature_every=curvature_every,
        refresh_every=refresh_every,
        inversion=inversion,
        kl_bound=per_rate("kfac", kl_bound, learning_rate),
        blocks=blocks,
    )
    return safeguarded("kfac", direction, learning_rate, momentum, weight_decay)
