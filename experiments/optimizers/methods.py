"""The optimisers that are compared, and the values of their settings that are tried."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.optimizers.runs import Method
from experiments.optimizers.tasks import OptimizerTask

# Nine values for all: of the learning rate alone, or of the step's bound by the damping.
FIRST_ORDER = {"learning_rate": (3e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 2e-2, 3e-2)}
SECOND_ORDER = {"kl_bound": (1e-5, 3e-4, 1e-3), "damping": (1e-6, 1e-5, 1e-4)}
OTHERS_RATE = 3e-2  # of Adam for the positions, which belong to no layer, beside every method
SPREADS_RATE = 1e-1  # of Adam for all that has no factors of a Bayesian model, in second order
MOMENTUM = 0.8
CG_ITERATIONS = 5
REFRESH_EVERY = 10
DECAY = 0.9


def _falling(task: OptimizerTask, num_steps: int, power: int = 1) -> Callable[[Array], Array]:
    """The schedule's factor: a cosine down to zero if the task asks for it, else 1."""

    def factor(step: Array) -> Array:
        if not task.falling:
            return jnp.ones(())
        return (0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(step / num_steps, 1)))) ** power

    return factor


def _others(factor: Callable[[Array], Array], rate: float) -> optax.GradientTransformation:
    return optax.adam(lambda step: rate * factor(step))


def _first_order(
    method: Any, model: nnx.Module, task: OptimizerTask, num_steps: int, *, learning_rate: Any
) -> optax.GradientTransformation:
    """Apply `method` to layers and the spreads of beliefs; positions have their own rate."""
    factor = _falling(task, num_steps)
    owned = {leaf for block in mj.optim.find_blocks(model) for leaf in block.leaves}

    def part(path: tuple[Any, ...], _: Any) -> str:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return "layers" if name in owned or "/raw/" in name else "others"

    def label(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(part, nnx.as_pure(params))

    layers = method(lambda step: learning_rate * factor(step))
    return optax.partition({"layers": layers, "others": _others(factor, OTHERS_RATE)}, label)


def _second_order(
    method: Any, model: nnx.Module, task: OptimizerTask, num_steps: int, *, kl_bound: Any,
    **settings: Any,
) -> optax.GradientTransformation:  # fmt: skip
    # The learning rate is 1 and the bound, as good as always in force, sets the step: its length is as
    # the bound's root.
    factor, squared = _falling(task, num_steps), _falling(task, num_steps, 2)

    def bound(step: Array) -> Array:
        return kl_bound * squared(step)

    held = {"momentum": MOMENTUM, "decay": DECAY, "curvature_every": task.curvature_every}
    return mj.optim.for_model(
        model,
        partial(method, 1.0, kl_bound=bound, **held, **settings),
        others=_others(factor, SPREADS_RATE if task.name == "bayesian" else OTHERS_RATE),
    )


def _untuned(
    method: Any, model: nnx.Module, task: OptimizerTask, num_steps: int
) -> optax.GradientTransformation:
    """With the library's defaults, but for the spreads of beliefs."""
    del num_steps
    others = optax.adam(SPREADS_RATE) if task.name == "bayesian" else None
    return mj.optim.for_model(model, method, others=others)


FIRST = {"adam": optax.adam, "adamw": optax.adamw, "muon": optax.contrib.muon}


def untuned() -> dict[str, Method]:
    """Second-order methods with defaults, and first-order ones with the best of nine rates."""
    first = {name: Method(partial(_first_order, each), FIRST_ORDER) for name, each in FIRST.items()}
    ours = {"kfac": mj.optim.kfac, "cg_fac": mj.optim.cg_fac}
    return first | {name: Method(partial(_untuned, each), {}, {}) for name, each in ours.items()}


def tuned() -> dict[str, Method]:
    """The methods whose settings are tuned on a grid, by name."""
    cg_fac = partial(mj.optim.cg_fac, max_iterations=CG_ITERATIONS)
    second = {
        name: partial(each, refresh_every=REFRESH_EVERY)
        for name, each in (("cg_fac", cg_fac), ("kfac", mj.optim.kfac))
    }
    curvature = {"fisher": mj.optim.SampledFisher()}
    first = {
        name: Method(partial(_first_order, FIRST[name]), FIRST_ORDER) for name in ("adam", "muon")
    }
    return first | {
        name: Method(partial(_second_order, each), SECOND_ORDER, curvature)
        for name, each in second.items()
    }
