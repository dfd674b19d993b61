"""The optimisers that are compared, and the values of their settings that are tried."""

from __future__ import annotations

from functools import partial
from typing import Any

import optax
from flax import nnx

import moment_jax as mj
from experiments.optimizer_runs import Method

# The same kind of grid for all: three learning rates, or three bounds of the step, by two more values.
FIRST_ORDER = {"learning_rate": (1e-3, 3e-3, 1e-2)}
SECOND_ORDER = {"kl_bound": (1e-3, 3e-3, 1e-2), "damping": (1e-4, 1e-3, 1e-2)}
CG_ITERATIONS = 3
REFRESH_EVERY = 5


def _adam(model: nnx.Module, **settings: Any) -> optax.GradientTransformation:
    del model
    return optax.adam(**settings)


def _muon(model: nnx.Module, **settings: Any) -> optax.GradientTransformation:
    """Muon for matrices, Adam for the rest."""
    del model
    return optax.contrib.muon(**settings)


def _second_order(method: Any, model: nnx.Module, **settings: Any) -> optax.GradientTransformation:
    return mj.optim.for_model(
        model,
        partial(method, 0.1, momentum=0.8, **settings),
        scale_learning_rate=0.1,
        dataset_size=1147,
        others=optax.adam(3e-3),
    )


def methods() -> dict[str, Method]:
    """Every method by name."""
    curvature: dict[str, Any] = {"fisher": mj.optim.SampledFisher()}
    kfac = partial(mj.optim.kfac, refresh_every=REFRESH_EVERY)
    cg_fac = partial(
        mj.optim.cg_fac,
        max_iterations=CG_ITERATIONS,
        precondition=mj.optim.StaleInverse(refresh_every=REFRESH_EVERY),
    )
    return {
        "adam": Method(_adam, FIRST_ORDER),
        "muon": Method(_muon, FIRST_ORDER),
        "cg_fac": Method(partial(_second_order, cg_fac), SECOND_ORDER, curvature),
        "kfac": Method(partial(_second_order, kfac), SECOND_ORDER, curvature),
    }
