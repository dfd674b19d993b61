"""The core of `scale_by_cg_fac` and `scale_by_kfac`: averages, damping and the bound of the step."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from moment_jax.optim.damping import (
    AdaptiveDamping,
    Bound,
    Damping,
    LevenbergMarquardt,
    TrustRegion,
    check_range,
    current,
    initial_value,
)
from moment_jax.optim.factors import Factors, RowFactor, averaged, empty_average
from moment_jax.optim.groups import Groups, groups_of, stack, stack_factors, unstack
from moment_jax.optim.last_step import Directions, Moved
from moment_jax.optim.layer_blocks import Blocks
from moment_jax.optim.trees import unflatten


class SecondOrderState(NamedTuple):
    """State of `scale_by_cg_fac` and `scale_by_kfac`."""

    step: Array  # steps taken
    skipped: Array  # steps skipped for a gradient that was not finite, or for want of curvature
    due: Array  # whether the next step wants new curvature
    damping: Array  # of the last step if a number or a schedule, of the next step if adaptive
    bound: Array  # on 1/2 x^T (F + damping) x of the last direction
    least: Array  # slopes do not take the bound below this
    clip: Array  # factor by which the bound scaled the last direction
    quadratic: Array  # x^T (F + damping) x of the last direction, before scaling
    ratio: Array  # s^T F s / <s, s> of the last step s whose product with F was computed
    predicted: Array  # change of the loss that the quadratic model predicted for the last step
    previous: Any  # parameters before the last step; None if nothing adapts
    curvature: Factors  # running averages by group of layers; empty if decay is None
    solver: Any


@dataclasses.dataclass(frozen=True)
class ScaleBySecondOrder:
    """The transformation that CG-FAC and K-FAC share; for the settings see `cg_fac`.

    The solver's `solve(curvature, grads, damping, state, fresh, ready)` returns `Directions`. Curvature
    is new where `fresh`. Where not `ready`, the step is skipped and the solver's state must not change.
    """

    name: str
    solver: Any
    damping: Damping
    decay: float | Array | None
    kl_bound: Bound
    curvature_every: int | Array
    blocks: Blocks | None

    def __post_init__(self) -> None:
        check_range(self.name, "damping", self.damping, least=0)
        check_range(self.name, "decay", self.decay, least=0, below=1)
        check_range(self.name, "kl_bound", self.kl_bound, least=0)
        check_range(self.name, "curvature_every", self.curvature_every, least=1)

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The Optax transformation."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    @property
    def _adapts(self) -> bool:
        rules = (self.damping, self.kl_bound)
        return any(isinstance(x, LevenbergMarquardt | AdaptiveDamping | TrustRegion) for x in rules)

    def init(self, params: optax.Params) -> SecondOrderState:
        """The state before the first step."""
        groups = groups_of(params, self.blocks)
        dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(params))
        averages = {key: empty_average(members, dtype) for key, members in groups.items()}
        return SecondOrderState(
            step=jnp.int32(0),
            skipped=jnp.int32(0),
            due=jnp.ones((), bool),
            damping=initial_value(self.damping),
            bound=initial_value(self.kl_bound),
            least=jnp.zeros((), jnp.float32),
            clip=jnp.ones((), jnp.float32),
            quadratic=jnp.zeros((), jnp.float32),
            ratio=jnp.zeros((), jnp.float32),
            predicted=jnp.zeros((), jnp.float32),
            # A copy, because an array can be donated only once.
            previous=jax.tree.map(jnp.copy, params) if self._adapts else None,
            curvature={} if self.decay is None else averages,
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
        taken_back: Array | bool = False,
        **extra: Any,
    ) -> tuple[optax.Updates, SecondOrderState]:
        """The direction; see `cg_fac` for the arguments."""
        del extra
        if self._adapts and params is None:
            raise ValueError(
                f"`{self.name}` adapts to the last step, so it needs update(grads, state, params, "
                "factors=factors). Got no params."
            )
        groups = groups_of(updates, self.blocks)
        stacked = stack(groups, updates)
        grads = {
            k: grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
            for k, grad in stacked.items()
        }
        averages, curvature, fresh = self._curvature(groups, factors, state)
        known = jnp.all(jnp.stack([f.weight > 0 for f in curvature.values()]))
        ready = known & _all_finite(updates)
        grads = {key: jnp.where(ready, grad, 0) for key, grad in grads.items()}
        damping = state.damping
        if not isinstance(self.damping, LevenbergMarquardt | AdaptiveDamping):
            damping = current(self.damping, state.step)
        moved = None
        if self._adapts:
            last = jax.tree.map(lambda new, old: new - old, params, state.previous)
            exact = fresh | isinstance(self.damping, LevenbergMarquardt)
            moved = Moved.by(
                stack(groups, last), grads, curvature, damping, state.quadratic, state.ratio, exact
            )
            if isinstance(self.damping, LevenbergMarquardt) and change is not None:
                damping = self.damping.adapted(damping, jnp.asarray(change), moved.predicted)
        solved = self.solver.solve(curvature, grads, damping, state.solver, fresh, ready)
        bound, least = self._bound(state, moved, solved, ready, jnp.asarray(taken_back))
        size = solved.quadratic / 2
        clip = jnp.where(size > bound, jnp.sqrt(bound / jnp.where(size > 0, size, 1)), 1)

        def scaled(x: Array) -> Array:
            direction = clip.astype(x.dtype) * x
            return jnp.where(ready & jnp.all(jnp.isfinite(direction)), direction, 0)

        result = unstack(groups, {key: scaled(x) for key, x in solved.x.items()})
        if isinstance(self.damping, AdaptiveDamping) and moved is not None:
            # At its least bound, slopes are noise, and more damping would only shorten the steps.
            informative = ready & (bound > least)
            slope = jnp.where(informative, moved.slope_in_damping(solved, damping), 0)
            damping = self.damping.adapted(damping, slope, jnp.asarray(taken_back))
        step = state.step + ready
        every = jnp.asarray(self.curvature_every, jnp.int32)
        new = SecondOrderState(
            step=step,
            skipped=state.skipped + ~ready,
            due=(step < every) | (step % every == 0) | ~known,
            damping=damping,
            bound=bound,
            least=least,
            clip=clip,
            quadratic=solved.quadratic,
            ratio=state.ratio if moved is None else moved.ratio,
            predicted=state.predicted if moved is None else moved.predicted,
            previous=params if self._adapts else None,
            curvature=averages,
            solver=solved.state,
        )
        return unflatten(updates, result), new

    def _bound(
        self,
        state: SecondOrderState,
        moved: Moved | None,
        solved: Directions,
        ready: Array,
        taken_back: Array,
    ) -> tuple[Array, Array]:
        """The bound and its least value."""
        if not isinstance(self.kl_bound, TrustRegion):
            fixed = state.bound if self.kl_bound is None else current(self.kl_bound, state.step)
            return fixed, state.least
        assert moved is not None
        slope = jnp.where(ready, moved.slope_along(solved), self.kl_bound.aim)
        # A bound that was not active cannot have been too small.
        slope = jnp.where(state.clip < 1, slope, jnp.maximum(slope, self.kl_bound.aim))
        return self.kl_bound.adapted(state.bound, state.least, slope, taken_back, state.step)

    def _curvature(
        self, groups: Groups, factors: Factors | None, state: SecondOrderState
    ) -> tuple[Factors, Factors, Array]:
        """New averages, the curvature to use, and whether it is new."""
        if factors is None:
            if self.decay is None:
                raise ValueError(
                    f"`{self.name}` with decay=None needs factors at every step: "
                    "update(grads, state, params, factors=factors)."
                )
            averages, fresh = state.curvature, jnp.zeros((), bool)
            return averages, averages, fresh
        new = stack_factors(groups, factors)
        names = [block.name for blocks in groups.values() for block in blocks]
        good = _all_finite([factors[name] for name in names])
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
        return averages, averages, fresh


def _all_finite(tree: Any) -> Array:
    """Whether every number is finite; asked before stacking, which avoids storing the stacked array."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))
