"""K-FAC: the natural gradient by inverses of both Kronecker factors of each layer.

The inverses are of running averages, which change most while they hold few batches. The intervals
between refreshes therefore grow as 1, 2, 4, ... steps up to their full length.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
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
from moment_jax.optim.factors import (
    DiagonalFactor,
    EmbeddingFactor,
    Factor,
    Factors,
    KroneckerFactor,
    RowFactor,
)
from moment_jax.optim.groups import Groups, Matrices, empty_averages
from moment_jax.optim.inverses import (
    Cholesky,
    EigenPair,
    Eigh,
    Inversion,
    divided,
    eigenbases,
    no_eigenbases,
)
from moment_jax.optim.last_step import inner
from moment_jax.optim.layer_blocks import Blocks
from moment_jax.optim.safeguard import per_rate, safeguarded
from moment_jax.optim.second_order import ScaleBySecondOrder

NARROW = 512  # rows up to which old and new inverses of all layers may be in memory together


class KFACState(NamedTuple):
    """Inverses by group of layers (for a table the eigenbasis of G), and when they were computed."""

    inverses: dict[str, Any]
    age: Array  # steps since the last refresh; negative before the first
    interval: Array  # steps from the last refresh to the next


@dataclasses.dataclass(frozen=True)
class StaleInverse:
    """Precondition by inverses of the Kronecker factors, refreshed every few steps.

    The system that is solved is always the current one: an old inverse costs iterations, not accuracy.

    Args:
      inversion: `Cholesky()`, `Eigh()` or `NewtonSchulz()`.
      refresh_every: steps between inversions; the first intervals are 1, 2, 4, ... steps.
    """

    inversion: Inversion = dataclasses.field(default_factory=Cholesky)
    refresh_every: int | Array = 10

    def __post_init__(self) -> None:
        check_range("StaleInverse", "refresh_every", self.refresh_every, least=1)

    def init(self, groups: Groups, dtype: jnp.dtype) -> KFACState:
        """No inverses yet."""
        inverses: dict[str, Any] = {}
        for key, factor in empty_averages(groups, dtype).items():
            if isinstance(factor, KroneckerFactor):
                inverses[key] = self.inversion.empty(factor.inputs, factor.outputs)
            elif isinstance(factor, EmbeddingFactor):
                inverses[key] = no_eigenbases(factor.outputs)
        return KFACState(inverses, jnp.int32(-1), jnp.int32(0))

    def solve(
        self,
        curvature: Factors,
        grads: Matrices,
        damping: Array,
        state: KFACState,
        fresh: Array,
        ready: Array,
    ) -> tuple[Matrices, Array, KFACState]:
        """K-FAC: refresh the inverses where due, then apply them."""
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
        return x, inner(x, grads), state

    def apply(self, inverse: Any, factor: Factor, grad: Array, damping: Array) -> Array:
        """(F + damping I)^-1 applied to a gradient (L, rows, columns), with a group's stored inverse.

        A table's frequencies, and diagonals, are the current ones.
        """
        if isinstance(factor, KroneckerFactor):
            return self.inversion.apply(inverse, grad, damping)
        if isinstance(factor, EmbeddingFactor):
            return Eigh().apply(EigenPair(factor.frequencies, None, *inverse), grad, damping)
        assert isinstance(factor, DiagonalFactor)  # rows have no inverse
        return divided(grad, factor.squares + damping)

    def refreshed(
        self, curvature: Factors, damping: Array, state: KFACState, fresh: Array, ready: Array
    ) -> KFACState:
        """New inverses of the current averages where they are due, else the old ones.

        Where not `ready`, the state stays as it is. (Choosing between two states afterwards would keep
        both in memory.)
        """
        wanted = jnp.asarray(self.refresh_every, jnp.int32)
        due = (state.age < 0) | ((state.age + 1 >= jnp.minimum(state.interval, wanted)) & fresh)
        due = due & ready

        def invert() -> dict[str, Any]:
            inverses = dict(state.inverses)  # rows have none, and keep what there is
            for key, old in inverses.items():
                factor = curvature[key]
                if isinstance(factor, KroneckerFactor):
                    inverses[key] = _inverted(self.inversion, factor, damping, old)
                elif isinstance(factor, EmbeddingFactor):
                    inverses[key] = _where_finite(eigenbases(factor.outputs), old)
            return inverses

        inverses = jax.lax.cond(due, invert, lambda: state.inverses)
        age = jnp.where(due, 0, state.age + ready)
        grown = jnp.where(due, jnp.clip(2 * state.interval, 1, wanted), state.interval)
        return KFACState(inverses, age, grown)


def _inverted(inversion: Inversion, factor: KroneckerFactor, damping: Array, old: Any) -> Any:
    """New inverses; the old one for a layer whose inversion failed."""

    def together(inputs: Array, outputs: Array, old: Any) -> Any:
        return _where_finite(inversion.refreshed(inputs, outputs, damping), old)

    def in_turn(inputs: Array, outputs: Array, old: Any) -> Any:
        """One layer after another, in place, so that old and new are never all in memory."""

        def refresh(layer: Array, inverses: Any) -> Any:
            own = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, layer, 1), (inputs, outputs, inverses)
            )
            return jax.tree.map(
                lambda all_, one: jax.lax.dynamic_update_slice_in_dim(all_, one, layer, 0),
                inverses,
                together(*own),
            )

        return jax.lax.fori_loop(0, inputs.shape[0], refresh, old)

    if max(factor.inputs.shape[1], factor.outputs.shape[1]) <= NARROW:
        return together(factor.inputs, factor.outputs, old)
    return jax.lax.platform_dependent(
        factor.inputs, factor.outputs, old, cpu=in_turn, default=together
    )


def _where_finite(new: Any, old: Any) -> Any:
    """The new arrays of every layer if all of them are finite, else the old ones."""
    finite = [jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim))) for x in new]
    good = jnp.all(jnp.stack(finite), axis=0)

    def choose(fresh: Array, stale: Array) -> Array:
        return jnp.where(jnp.expand_dims(good, range(1, fresh.ndim)), fresh, stale).astype(
            stale.dtype
        )

    return jax.tree.map(choose, new, old)


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
