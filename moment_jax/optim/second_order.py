"""The core of `scale_by_cg_fac` and `scale_by_kfac`: averages, damping and the bound of the step."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from moment_jax.optim import layer_blocks as layers
from moment_jax.optim.damping import (
    Adaptive,
    AdaptiveDamping,
    Bound,
    Damping,
    LastStep,
    TrustRegion,
    check_range,
    current,
)
from moment_jax.optim.factors import Factors, RowFactor, averaged
from moment_jax.optim.inverses import refreshed
from moment_jax.optim.layer_blocks import Blocks, Groups, Matrices


class SecondOrderState(NamedTuple):
    """State of `scale_by_cg_fac` and `scale_by_kfac`."""

    step: Array  # steps taken
    due: Array  # whether the next step wants new curvature
    damping: Array  # of the last step if a number or a schedule, of the next step if adaptive
    bound: Array  # on 1/2 x^T (F + damping) x of the last direction
    least: Array  # slopes do not take the bound below this
    clip: Array  # factor by which the bound scaled the last direction
    ratio: Array  # s^T F s / <s, s> of the last step s whose product with F was computed
    previous: Any  # parameters before the last step; None if nothing adapts
    curvature: Factors  # running averages by group of layers; empty if decay is None
    solver: Any


Solve = Callable[..., tuple[Matrices, Array, Any]]
"""(curvature, grads, damping, state, refresh) -> all groups' x = (F + damping)^-1 grad,
x^T (F + damping) x, and the solver's state; `refresh` renews a `KFACState` if that is due."""


def scale_by_second_order(
    name: str,
    start: Callable[[Factors], Any],
    solve: Solve,
    *,
    damping: Damping,
    decay: float | Array | None,
    kl_bound: Bound,
    curvature_every: int | Array,
    refresh_every: int | Array,
    blocks: Blocks | None,
) -> optax.GradientTransformationExtraArgs:
    """What CG-FAC and K-FAC share; `start` makes the solver's state from empty averages."""
    check_range(name, "damping", damping, least=0)
    check_range(name, "decay", decay, least=0, below=1)
    check_range(name, "kl_bound", kl_bound, least=0)
    check_range(name, "curvature_every", curvature_every, least=1, whole=True)
    check_range(name, "refresh_every", refresh_every, least=1, whole=True)
    adapts = isinstance(damping, Adaptive) or isinstance(kl_bound, Adaptive)

    def init(params: optax.Params) -> SecondOrderState:
        dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(params))
        empty = layers.empty_averages(layers.groups_of(params, blocks), dtype)
        # Every array is a new one, because an array can be donated only once.
        return SecondOrderState(
            step=jnp.int32(0),
            due=jnp.ones((), bool),
            damping=current(damping, jnp.int32(0)),
            bound=current(kl_bound, jnp.int32(0)),
            least=jnp.zeros((), jnp.float32),
            clip=jnp.ones((), jnp.float32),
            ratio=jnp.zeros((), jnp.float32),
            previous=jax.tree.map(jnp.copy, params) if adapts else None,
            curvature={} if decay is None else empty,
            solver=start(empty),
        )

    def update(
        updates: optax.Updates,
        state: SecondOrderState,
        params: optax.Params | None = None,
        *,
        factors: Factors | None = None,
        taken_back: Array | bool = False,
        **extra: Any,
    ) -> tuple[optax.Updates, SecondOrderState]:
        del extra
        if adapts and params is None:
            raise ValueError(
                f"`{name}` adapts to the last step, so it needs update(grads, state, params, "
                "factors=factors). Got no params."
            )
        groups, back = layers.groups_of(updates, blocks), jnp.asarray(taken_back)
        curvature, fresh = _curvature(name, groups, factors, state.curvature, decay)
        known = jnp.all(jnp.stack([f.weight > 0 for f in curvature.values()]))
        ready = known & _all_finite(updates)
        grads = {
            key: jnp.where(ready, grad, 0).astype(jnp.promote_types(grad.dtype, jnp.float32))
            for key, grad in layers.stack(groups, updates).items()
        }
        gamma, last = current(damping, state.step, state.damping), None
        if adapts:
            moved = jax.tree.map(lambda new, old: new - old, params, state.previous)
            last = LastStep.judged(
                layers.stack(groups, moved), grads, curvature, gamma, state.ratio, fresh
            )
        refresh = partial(refreshed, curvature, gamma, fresh, ready, refresh_every)
        x, quadratic, solver = solve(curvature, grads, gamma, state.solver, refresh)
        quadratic = jnp.maximum(quadratic, 0)
        bound, least = current(kl_bound, state.step, state.bound), state.least
        if isinstance(kl_bound, TrustRegion) and last is not None:
            slope = jnp.where(ready, last.scaled(last.slope, quadratic), kl_bound.aim)
            # A bound that was not active cannot have been too small.
            slope = jnp.where(state.clip < 1, slope, jnp.maximum(slope, kl_bound.aim))
            bound, least = kl_bound.adapted(bound, least, slope, back, state.step)
        size = quadratic / 2
        clip = jnp.where(size > bound, jnp.sqrt(bound / jnp.where(size > 0, size, 1)), 1)
        if isinstance(damping, AdaptiveDamping) and last is not None:
            # At its least bound, slopes are noise, and more damping would only shorten the steps.
            informative = ready & (bound > least)
            slope = jnp.where(informative, last.slope_in_damping(x, quadratic, gamma), 0)
            gamma = damping.adapted(gamma, slope, back)

        def scaled(x: Array) -> Array:
            direction = clip.astype(x.dtype) * x
            return jnp.where(ready & jnp.all(jnp.isfinite(direction)), direction, 0)

        result = layers.unstack(groups, {key: scaled(each) for key, each in x.items()})
        step, every = state.step + ready, jnp.asarray(curvature_every, jnp.int32)
        return layers.unflatten(updates, result), SecondOrderState(
            step=step,
            due=(step < every) | (step % every == 0) | ~known,
            damping=gamma,
            bound=bound,
            least=least,
            clip=clip,
            ratio=state.ratio if last is None else last.ratio,
            previous=params if adapts else None,
            curvature={} if decay is None else curvature,
            solver=solver,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _curvature(
    name: str, groups: Groups, factors: Factors | None, averages: Factors, decay: Any
) -> tuple[Factors, Array]:
    """The curvature to use, and whether it is new."""
    if factors is None:
        raise ValueError(
            f"`{name}` needs update(grads, state, params, factors=factors) at every step, with those of "
            "mj.optim.value_grad_and_factors. Got none, and the step would be zero. For steps without "
            "new curvature give it when=mj.optim.curvature_due(state); the factors then have weight 0."
        )
    new = layers.stack_factors(groups, factors)
    # Asked before stacking, which avoids storing the stacked array.
    good = _all_finite([factors[block.name] for blocks in groups.values() for block in blocks])
    if decay is None:
        return jax.tree.map(lambda x: jnp.where(good, x, 0), new), jnp.ones((), bool)
    for key, factor in new.items():
        if isinstance(factor, RowFactor):
            raise TypeError(
                f"`{name}` cannot average the rows of different batches (layers "
                f"{', '.join(b.name for b in groups[key])}). Take decay=None, or Kronecker factors."
            )
    decay = jnp.asarray(decay, jnp.float32)
    mixed = {key: averaged(averages[key], factor, decay, good) for key, factor in new.items()}
    return mixed, good & jnp.any(jnp.stack([factor.weight > 0 for factor in new.values()]))


def _all_finite(tree: Any) -> Array:
    """Whether every number is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))
