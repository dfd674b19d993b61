"""What CG-FAC and K-FAC share: averages, damping, the KL bound, momentum and the step."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from moment_jax.optim.damping import (
    Damping,
    LevenbergMarquardt,
    Number,
    Schedule,
    check_range,
    current,
    initial_damping,
)
from moment_jax.optim.factors import Factors, RowFactor
from moment_jax.optim.groups import (
    Groups,
    Matrices,
    empty_average,
    groups_of,
    stack,
    stack_factors,
    unstack,
)
from moment_jax.optim.layer_blocks import Blocks
from moment_jax.optim.operators import apply_curvature, averaged, unbiased
from moment_jax.optim.trees import unflatten

Array = jax.Array


class Directions(NamedTuple):
    """What a solver returns: x = (F + damping)^-1 grad of all groups, and its size."""

    x: Matrices
    quadratic: Array  # x^T (F + damping) x of all groups together
    state: Any


class Solver(Protocol):
    """A way to solve (F + damping I) x = grad."""

    def init(self, groups: Groups, dtype: jnp.dtype) -> Any:
        """The solver's own state."""

    def solve(
        self, curvature: Factors, grads: Matrices, damping: Array, state: Any, fresh: Array
    ) -> Directions:
        """Solve for all groups; `fresh` is true where the curvature is new."""


class SecondOrderState(NamedTuple):
    """State of `cg_fac` and `kfac`; all of it arrays, in dictionaries by groups of layers."""

    step: Array  # steps taken
    skipped: Array  # steps left out because a gradient was not finite, or no curvature was there
    damping: Array  # of the last step
    clip: Array  # what the KL bound has scaled the last step by, 1 for nothing
    quadratic: Array  # x^T (F + damping) x of the last direction
    predicted: Array  # change of the loss that the quadratic model predicts for the last step
    curvature: Factors  # running averages; empty where each batch stands for itself
    momentum: Matrices
    solver: Any


@dataclasses.dataclass(frozen=True)
class SecondOrder:
    """Settings that CG-FAC and K-FAC share; see `cg_fac`."""

    name: str
    solver: Solver
    learning_rate: Number | Schedule
    damping: Damping
    decay: float | Array | None
    kl_bound: Number | Schedule | None
    momentum: Number
    blocks: Blocks | None

    def __post_init__(self) -> None:
        check_range(self.name, "a learning rate", self.learning_rate, least=0)
        check_range(self.name, "damping", self.damping, least=0)
        check_range(self.name, "decay", self.decay, least=0, below=1)
        check_range(self.name, "momentum", self.momentum, least=0, below=1)
        check_range(self.name, "kl_bound", self.kl_bound, least=0)

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The Optax transformation."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def init(self, params: optax.Params) -> SecondOrderState:
        """The state before the first step."""
        groups = groups_of(params, self.blocks)
        stacked = stack(groups, params)
        dtype = jnp.result_type(jnp.float32, *(value.dtype for value in stacked.values()))
        zeros = {key: jnp.zeros(value.shape, dtype) for key, value in stacked.items()}
        averages = {key: empty_average(members, dtype) for key, members in groups.items()}
        zero = jnp.zeros((), jnp.float32)
        return SecondOrderState(
            step=jnp.int32(0),
            skipped=jnp.int32(0),
            damping=initial_damping(self.damping),
            clip=jnp.ones((), jnp.float32),
            quadratic=zero,
            predicted=zero,
            curvature={} if self.decay is None else averages,
            momentum=zeros,
            solver=self.solver.init(groups, dtype),
        )

    def update(
        self,
        updates: optax.Updates,
        state: SecondOrderState,
        params: optax.Params | None = None,
        *,
        factors: Factors | None = None,
        change: Array | float | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, SecondOrderState]:
        """One step: see `cg_fac` for what comes in and what goes out."""
        del params, extra
        groups = groups_of(updates, self.blocks)
        stacked = stack(groups, updates)
        grads = {key: grad.astype(state.momentum[key].dtype) for key, grad in stacked.items()}
        finite = _all_finite(grads)
        averages, curvature, fresh = self._curvature(groups, factors, state)
        ready = finite & jnp.all(jnp.stack([f.weight > 0 for f in curvature.values()]))
        grads = {key: jnp.where(ready, grad, 0) for key, grad in grads.items()}
        momentum, target = self._momentum(grads, state, ready)
        damping = self._damping(state, change)
        solved = self.solver.solve(curvature, target, damping, state.solver, fresh)
        step, clip = self._step(solved, state, ready)
        result = unstack(groups, step)
        new = SecondOrderState(
            step=state.step + ready,
            skipped=state.skipped + ~ready,
            damping=damping,
            clip=clip,
            quadratic=solved.quadratic,
            predicted=self._predicted(curvature, grads, step),
            curvature=averages,
            momentum=momentum,
            # Directions of a step that is left out are no guess for the next.
            solver=jax.tree.map(lambda a, b: jnp.where(ready, a, b), solved.state, state.solver),
        )
        return unflatten(updates, result), new

    def _curvature(
        self, groups: Groups, factors: Factors | None, state: SecondOrderState
    ) -> tuple[Factors, Factors, Array]:
        """New averages, the curvature to use, and whether anything in it is new."""
        if factors is None:
            if self.decay is None:
                raise ValueError(
                    f"`{self.name}` with decay=None needs factors at every step: "
                    "update(grads, state, params, factors=factors)."
                )
            averages, fresh = state.curvature, jnp.zeros((), bool)
            return averages, {k: unbiased(f) for k, f in averages.items()}, fresh
        new = stack_factors(groups, factors)
        good = _all_finite(new)
        if self.decay is None:
            usable = {
                key: jax.tree.map(lambda x: jnp.where(good, x, 0), factor)
                for key, factor in new.items()
            }
            return {}, usable, jnp.ones((), bool)
        for key, factor in new.items():
            if isinstance(factor, RowFactor):
                raise TypeError(
                    f"`{self.name}` cannot average the rows of different batches (layers "
                    f"{', '.join(b.name for b in groups[key])}). Take decay=None, or Kronecker factors."
                )
        decay = jnp.asarray(self.decay, jnp.float32)
        averages = {
            key: averaged(state.curvature[key], factor, decay, good) for key, factor in new.items()
        }
        fresh = good & jnp.any(jnp.stack([factor.weight > 0 for factor in new.values()]))
        return averages, {key: unbiased(f) for key, f in averages.items()}, fresh

    def _damping(self, state: SecondOrderState, change: Array | float | None) -> Array:
        if not isinstance(self.damping, LevenbergMarquardt):
            return current(self.damping, state.step)
        if change is None:
            return state.damping
        change = jnp.asarray(change, state.predicted.dtype)
        return self.damping.adapted(state.damping, change, state.predicted)

    def _momentum(
        self, grads: Matrices, state: SecondOrderState, ready: Array
    ) -> tuple[Matrices, Matrices]:
        """The running average of the gradients, and the average itself, to solve for.

        Averaged before the solution and not after it, what is solved for changes slowly, so that a warm
        start is worth something, and the bound holds for the very step.
        """
        keep = jnp.asarray(self.momentum, jnp.float32)
        weight = 1 - keep ** (state.step + 1)

        def mix(old: Array, grad: Array) -> Array:
            mixed = old + (1 - keep).astype(old.dtype) * (grad - old)
            return jnp.where(ready, mixed, old)

        sums = {key: mix(state.momentum[key], grad) for key, grad in grads.items()}
        return sums, {
            key: jnp.where(ready, total / weight.astype(total.dtype), 0)
            for key, total in sums.items()
        }

    def _step(
        self, solved: Directions, state: SecondOrderState, ready: Array
    ) -> tuple[Matrices, Array]:
        """Minus the direction, within 1/2 step^T (F + damping) step <= kl_bound (Eq. 16)."""
        rate = current(self.learning_rate, state.step)
        clip = jnp.ones((), jnp.float32)
        if self.kl_bound is not None:
            bound = current(self.kl_bound, state.step)
            size = rate**2 * solved.quadratic / 2
            clip = jnp.where(size > bound, jnp.sqrt(bound / jnp.where(size > 0, size, 1)), clip)

        def move(x: Array) -> Array:
            step = -(rate * clip).astype(x.dtype) * x
            return jnp.where(ready & jnp.all(jnp.isfinite(step)), step, 0)

        return {key: move(x) for key, x in solved.x.items()}, clip

    def _predicted(self, curvature: Factors, grads: Matrices, step: Matrices) -> Array:
        """Grad . step + 1/2 step^T F step, where the damping is adapted by it."""
        if not isinstance(self.damping, LevenbergMarquardt):
            return jnp.zeros((), jnp.float32)
        return sum_of(
            jnp.sum(step[key] * (grads[key] + apply_curvature(curvature[key], step[key]) / 2))
            for key in grads
        )


def sum_of(scalars: Any) -> Array:
    """The sum of scalars, in float32, as the state keeps them."""
    return jnp.sum(jnp.stack([jnp.asarray(scalar, jnp.float32) for scalar in scalars]))


def _all_finite(tree: Any) -> Array:
    """Whether every number is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))
