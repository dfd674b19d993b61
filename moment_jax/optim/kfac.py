"""K-FAC: the natural gradient by inverses of both Kronecker factors of each layer."""

from typing import Any

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
from moment_jax.optim.inverses import Cholesky, Inversion
from moment_jax.optim.layer_blocks import Blocks
from moment_jax.optim.refresh import StaleInverse
from moment_jax.optim.safeguard import safeguarded, with_settings_of
from moment_jax.optim.second_order import ScaleBySecondOrder


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
    solver = StaleInverse(inversion, refresh_every)
    return ScaleBySecondOrder(
        "kfac", solver, damping, decay, kl_bound, curvature_every, blocks
    ).transformation()


@with_settings_of(scale_by_kfac)
def kfac(
    learning_rate: Number | Schedule = 1.0,
    *,
    kl_bound: Bound = DEFAULT_BOUND,
    momentum: Number = 0.8,
    weight_decay: Number = 0.0,
    **settings: Any,
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
      **settings: all that are not in the signature; `scale_by_kfac` has their defaults.

    Raises:
      ValueError: as `cg_fac`. TypeError: if `inversion` or the factors are of another type.

    Source: Brownian document, Eq. 16 to 18; Martens and Grosse, Optimizing neural networks with
    Kronecker-factored approximate curvature, 2015 (factored Tikhonov damping: section 6.3).
    """
    return safeguarded(
        "kfac", scale_by_kfac, learning_rate, kl_bound, momentum, weight_decay, settings
    )
