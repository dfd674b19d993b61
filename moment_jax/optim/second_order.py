"""The core of `scale_by_cg_fac` and `scale_by_kfac`: averages, damping and the bound of the step."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from moment_jax.optim.damping import (
    Adaptive,
    AdaptiveDamping,
    Bound,
    Damping,
    LevenbergMarquardt,
    TrustRegion,
    check_range,
    current,
)
from moment_jax.optim.factors import Factors, RowFactor, averaged
from moment_jax.optim.groups import Groups, empty_averages, groups_of, stack, stack_factors, unstack
from moment_jax.optim.last_step import Moved
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

    The solver's `solve(curvature, grads, damping, state, fresh, ready)` returns all groups' x =
    (F + damping)^-1 grad, x^T (F + damping) x, and its state. Curvature is new where `fresh`. Where not
    `ready`, the step is skipped and inverses must not change.
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
        return isinstance(self.damping, Adaptive) or isinstance(self.kl_bound, Adaptive)

    def init(self, params: optax.Params) -> SecondOrderState:
        """The state before the first step."""
        groups = groups_of(params, self.blocks)
        dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(params))
        start = jnp.int32(0)
        # Every array is a new one, because an array can be donated only once.
        return SecondOrderState(
            step=start,
            skipped=jnp.int32(0),
            due=jnp.ones((), bool),
            damping=current(self.damping, start),
            bound=current(self.kl_bound, start),
            least=jnp.zeros((), jnp.float32),
            clip=jnp.ones((), jnp.float32),
            quadratic=jnp.zeros((), jnp.float32),
            ratio=jnp.zeros((), jnp.float32),
            predicted=jnp.zeros((), jnp.float32),
            previous=jax.tree.map(jnp.copy, params) if self._adapts else None,
            curvature={} if self.decay is None else empty_averages(groups, dtype),
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
        groups, back = groups_of(updates, self.blocks), jnp.asarray(taken_back)
        curvature, fresh = self._curvature(groups, factors, state)
        known = jnp.all(jnp.stack([f.weight > 0 for f in curvature.values()]))
        ready = known & _all_finite(updates)
        grads = {
            key: jnp.where(ready, grad, 0).astype(jnp.promote_types(grad.dtype, jnp.float32))
            for key, grad in stack(groups, updates).items()
        }
        damping = current(self.damping, state.step, state.damping)
        moved = None
        if self._adapts:
            last = stack(groups, jax.tree.map(lambda new, old: new - old, params, state.previous))
            exact = fresh | isinstance(self.damping, LevenbergMarquardt)
            moved = Moved.by(last, grads, curvature, damping, state.quadratic, state.ratio, exact)
            if isinstance(self.damping, LevenbergMarquardt) and change is not None:
                damping = self.damping.adapted(damping, jnp.asarray(change), moved.predicted)
        x, quadratic, solver = self.solver.solve(
            curvature, grads, damping, state.solver, fresh, ready
        )
        quadratic = jnp.maximum(quadratic, 0)
        bound, least = current(self.kl_bound, state.step, state.bound), state.least
        if isinstance(self.kl_bound, TrustRegion) and moved is not None:
            slope = jnp.where(ready, moved.slope_along(quadratic), self.kl_bound.aim)
            # A bound that was not active cannot have been too small.
            slope = jnp.where(state.clip < 1, slope, jnp.maximum(slope, self.kl_bound.aim))
            bound, least = self.kl_bound.adapted(bound, least, slope, back, state.step)
        size = quadratic / 2
        clip = jnp.where(size > bound, jnp.sqrt(bound / jnp.where(size > 0, size, 1)), 1)

        def scaled(x: Array) -> Array:
            direction = clip.astype(x.dtype) * x
            return jnp.where(ready & jnp.all(jnp.isfinite(direction)), direction, 0)

        result = unstack(groups, {key: scaled(each) for key, each in x.items()})
        if isinstance(self.damping, AdaptiveDamping) and moved is not None:
            # At its least bound, slopes are noise, and more damping would only shorten the steps.
            informative = ready & (bound > least)
            slope = jnp.where(informative, moved.slope_in_damping(x, quadratic, damping), 0)
            damping = self.damping.adapted(damping, slope, back)
        step = state.step + ready
        every = jnp.asarray(self.curvature_every, jnp.int32)
        return unflatten(updates, result), SecondOrderState(
            step=step,
            skipped=state.skipped + ~ready,
            due=(step < every) | (step % every == 0) | ~known,
            damping=damping,
            bound=bound,
            least=least,
            clip=clip,
            quadratic=quadratic,
            ratio=state.ratio if moved is None else moved.ratio,
            predicted=state.predicted if moved is None else moved.predicted,
            previous=params if self._adapts else None,
            curvature={} if self.decay is None else curvature,
            solver=solver,
        )

    def _curvature(
        self, groups: Groups, factors: Factors | None, state: SecondOrderState
    ) -> tuple[Factors, Array]:
        """The curvature to use, and whether it is new."""
        if factors is None:
            if self.decay is None:
                raise ValueError(
                    f"`{self.name}` with decay=None needs factors at every step: "
                    "update(grads, state, params, factors=factors)."
                )
            return state.curvature, jnp.zeros((), bool)
        new = stack_factors(groups, factors)
        good = _all_finite([factors[block.name] for blocks in groups.values() for block in blocks])
        if self.decay is None:
            return jax.tree.map(lambda x: jnp.where(good, x, 0), new), jnp.ones((), bool)
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
        return averages, good & jnp.any(jnp.stack([factor.weight > 0 for factor in new.values()]))


def _all_finite(tree: Any) -> Array:
    """Whether every number is finite; asked before stacking, which avoids storing the stacked array."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))
