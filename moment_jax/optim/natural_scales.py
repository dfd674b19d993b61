"""The natural gradient of a Gaussian belief's spread, in closed form for every family of `mj.nn`.

A belief N(m, s^2) has the Fisher matrix diag(1/s^2, 2) in (m, log s): mean and spread separate, and the
spread's part does not depend on the data. For a covariance L L^T moved as L (I + K), K lower triangular,
the Fisher matrix in the entries of K is 1 below the diagonal and 2 on it. No factor has to be captured.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from moment_jax import posterior as families
from moment_jax.nn import Belief
from moment_jax.nn.belief import lower_factor
from moment_jax.optim.damping import Number, Schedule, check_range, current
from moment_jax.optim.trees import flatten, unflatten
from moment_jax.xla import diagonal_matrix, diagonal_of


@dataclasses.dataclass(frozen=True)
class ScaleParameter:
    """A stored array that a belief's spread is computed from."""

    path: str  # of the array in the model
    copies: int  # independent variables that share each entry (diagonal), or the whole factor
    triangular: bool = False  # a Cholesky factor
    paired: bool = False  # of a Kronecker product, which may trade a constant with the other factor

    def step(self, raw: Array, grad: Array, rate: Array, limit: float) -> Array:
        """The change of the stored array: -rate F^-1 grad in log s, or in K, within +-`limit`."""

        def limited(natural: Array) -> Array:
            return jnp.clip(-rate * natural, -limit, limit)

        if not self.triangular:
            slope = _log_slope(raw)
            return limited(grad / slope / (2 * self.copies)) / slope
        factor, slope = lower_factor(raw), jax.nn.sigmoid(diagonal_of(raw))
        in_factor = jnp.tril(grad, -1) + diagonal_matrix(diagonal_of(grad) / slope)
        inner = jnp.tril(factor.T @ in_factor) / self.copies
        diagonal = diagonal_of(inner) / 2
        if self.paired:  # each factor takes half of a change of their common scale
            diagonal = diagonal - jnp.mean(diagonal) / 2
        moved = factor @ limited(jnp.tril(inner, -1) + diagonal_matrix(diagonal))
        return jnp.tril(moved, -1) + diagonal_matrix(diagonal_of(moved) / slope)


def find_scales(model: nnx.Module, wrt: Any = nnx.Param) -> tuple[ScaleParameter, ...]:
    """The arrays that the spreads of a model's beliefs are computed from."""
    available = set(flatten(nnx.state(model, wrt)))
    found: list[ScaleParameter] = []
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Belief):
            prefix = "/".join(map(str, (*path, "raw")))
            found += [each for each in _of_belief(prefix, node) if each.path in available]
    return tuple(found)


def natural_scales(
    learning_rate: Number | Schedule,
    scales: tuple[ScaleParameter, ...],
    *,
    dataset_size: float = 1,
    max_change: float = 0.5,
) -> optax.GradientTransformation:
    """The natural gradient step of log standard deviations, or of Cholesky factors from the right.

    d log s = -learning_rate dataset_size F^-1 grad, F = 2 for each variable. With the loss -ELBO / |D|
    and dataset_size |D| this is the natural gradient of the ELBO; rates from 0.01 to 1 work. Gradients
    that are not finite count as zero.

    If the loss weights its KL term by w < 1, give dataset_size |D| / w. A step of rate 1 is then
    Newton's on the KL term for any weight.

    Args:
      learning_rate: a number or a schedule.
      scales: `find_scales(model)`.
      dataset_size: what the loss was divided by, over the weight of its KL term.
      max_change: upper limit of the change of a log standard deviation (an entry of K) per step.

    Raises:
      ValueError: if a number is out of range, or (from update) an array is not among `scales`, or
        parameters are not given.

    Source: Amari, Natural gradient works efficiently in learning, 1998, for the Gaussian family.
    """
    check_range("natural_scales", "a learning rate", learning_rate, least=0)
    check_range("natural_scales", "dataset_size", dataset_size, least=1)
    check_range("natural_scales", "max_change", max_change, least=0)
    by_path = {scale.path: scale for scale in scales}

    def init(params: optax.Params) -> optax.ScaleByScheduleState:
        _check(flatten(params), by_path)
        return optax.ScaleByScheduleState(count=jnp.int32(0))

    def update(
        updates: optax.Updates, state: optax.ScaleByScheduleState, params: Any = None
    ) -> tuple[optax.Updates, optax.ScaleByScheduleState]:
        if params is None:
            raise ValueError("`natural_scales` needs update(grads, state, params).")
        grads, values = flatten(updates), flatten(params)
        _check(grads, by_path)
        rate = current(learning_rate, state.count) * dataset_size
        changes = {}
        for path, grad in grads.items():
            scale, raw = by_path[path], values[path]
            finite = jnp.where(jnp.isfinite(grad), grad, 0)
            changes[path] = scale.step(raw, finite, rate.astype(raw.dtype), max_change)
        new = optax.ScaleByScheduleState(count=state.count + 1)
        return unflatten(updates, changes), new

    return optax.GradientTransformation(init, update)


def _check(leaves: dict[str, Array], by_path: dict[str, ScaleParameter]) -> None:
    for path in leaves:
        if path not in by_path:
            raise ValueError(
                f"Parameter {path!r} is not among the scales given to `natural_scales`. Give "
                "scales=mj.optim.find_scales(model) of the trained model, and mask all others; "
                "mj.optim.for_model(model, ...) does both."
            )


def _of_belief(prefix: str, belief: Belief) -> list[ScaleParameter]:
    rows, columns, *_ = (*belief.mean.shape, 1)
    product = {"triangular": True, "paired": True}
    found: dict[type, list[ScaleParameter]] = {
        families.Factorized: [ScaleParameter(f"{prefix}/scale", 1)],
        families.OutputShared: [ScaleParameter(f"{prefix}/scale", rows)],
        families.MatrixNormal: [
            ScaleParameter(f"{prefix}/rows", columns, **product),
            ScaleParameter(f"{prefix}/columns", rows, **product),
        ],
        families.FullNormal: [ScaleParameter(f"{prefix}/entries", 1, triangular=True)],
    }
    return found.get(belief.family, [])


def _log_slope(raw: Array) -> Array:
    """D log softplus(raw) / d raw; 1 where softplus is the exponential."""
    far = raw < -15
    safe = jnp.where(far, 0, raw)
    return jnp.where(far, 1, jax.nn.sigmoid(safe) / jax.nn.softplus(safe))
