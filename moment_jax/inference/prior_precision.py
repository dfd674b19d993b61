"""The prior precision of a Laplace approximation: by the evidence, or by held-out data."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.inference.curvature import EXAMPLES_AT_ONCE
from moment_jax.inference.data import examples
from moment_jax.nn import bayesian
from moment_jax.objectives import Categorical, Gaussian, bernoulli_probabilities, log_marginal

LOG_RANGE = (-14.0, 18.0)  # of the prior precision: 1e-6 to 7e7
BISECTIONS = 60
PRECISIONS = np.logspace(-2, 6, 17)  # compared on held-out data


class Weights(NamedTuple):
    """Arrays of weights with one prior precision d."""

    eigenvalues: np.ndarray  # l, of the summed curvature at noise variance 1; one for each weight
    square: float  # |w - prior mean|^2

    def optimal_precision(self, noise: float) -> float:
        """The prior precision that maximises the evidence, limited to 1e-6 ... 7e7.

        It is the root of sum l / (l + d) = d |w - prior mean|^2, found by bisection. The root is unique:
        the left side falls in d and the right side rises.

        Source: MacKay, "Bayesian interpolation" (1992), Eq. 4.
        """
        low, high = LOG_RANGE
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            precision = np.exp(middle)
            rising = self.effective_number(precision, noise) > precision * self.square
            low, high = (middle, high) if rising else (low, middle)
        return float(np.exp((low + high) / 2))

    def effective_number(self, precision: float, noise: float) -> float:
        """Sum of l / (l + d): the number of weights that the data determine."""
        return float(np.sum(self.eigenvalues / (self.eigenvalues + noise * precision)))

    def log_evidence(self, precision: float, noise: float) -> float:
        """-1/2 (d |w - prior mean|^2 + sum log(1 + l / d)), their part in log p(y), nats."""
        logs = np.log1p(self.eigenvalues / (noise * precision))
        return float(-0.5 * (precision * self.square + np.sum(logs)))


def joined(parts: Iterable[Weights]) -> Weights:
    """All these weights, with one prior precision."""
    eigenvalues, squares = zip(*parts, strict=True)
    return Weights(np.concatenate(eigenvalues), sum(squares))


def kronecker_variances(
    rows: np.ndarray, columns: np.ndarray, precision: float
) -> list[np.ndarray]:
    """Variances a_i b_j closest to 1 / (rows_i columns_j + precision).

    Minimises KL(exact || product) between Gaussians with the same eigenvectors, one factor at a time.
    Exact for precision 0, and for equal rows or columns.
    """
    exact = 1 / (rows[:, None] * columns[None, :] + precision)
    a, b = np.ones_like(rows), np.ones_like(columns)
    for _ in range(100):
        before = a
        b = np.mean(exact / a[:, None], axis=0)
        a = np.mean(exact / b[None, :], axis=1)
        if np.max(np.abs(a / before - 1)) < 1e-6:
            break
    return [a, b]


def checked_data(model: nnx.Module, data: Any) -> tuple[tuple[Array, ...], np.ndarray]:
    """Inputs and targets as arrays; checks the model and the number of examples."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"`laplace` needs a Flax NNX module. Got {type(model).__name__}.")
    inputs, targets = examples("laplace", data)
    return tuple(map(jnp.asarray, inputs)), np.asarray(targets)


def check_targets(outputs: tuple[int, ...], targets: np.ndarray, name: type) -> None:
    """Raise unless the targets have the shape and classes of outputs (N, ..., C)."""
    wanted = outputs[:-1] if name is Categorical else outputs
    if len(outputs) < 2 or targets.shape != wanted:
        raise ValueError(
            f"`laplace` with {name.__name__} and outputs of shape {outputs} needs targets of "
            f"shape {wanted}. Got {targets.shape}."
        )
    if name is Categorical:
        classes = outputs[-1]
        whole = np.issubdtype(targets.dtype, np.integer)
        if not whole or targets.min() < 0 or targets.max() >= classes:
            raise ValueError(
                f"`laplace` with Categorical needs integer targets from 0 to {classes - 1}. Got "
                f"{targets.dtype} from {targets.min()} to {targets.max()}."
            )


def best_precision(
    model: nnx.Module, likelihood: type, held_out: Any, at: Callable[[float], Any]
) -> float:
    """The precision in `PRECISIONS` whose belief has the highest predictive density on held-out data.

    `at` maps a precision to the belief and its receipt.
    """
    inputs, targets = checked_data(model, held_out)
    outputs = jax.eval_shape(lambda: model(*inputs))
    shape = outputs.shape
    check_targets(shape, targets, likelihood)
    wanted = jnp.asarray(targets, None if likelihood is Categorical else outputs.dtype)

    @jax.jit
    def score(belief: Any, noise: Array) -> Array:
        def of_example(example: Any) -> Array:
            given, target = example
            mean, cov = bayesian(model, belief, linearised=True)(*(x[None] for x in given))
            blocks = jax.vmap(lambda c: c.token_blocks())(cov)[0]
            mean = mean.reshape(blocks.shape[:2])
            target = target.reshape(len(mean), *target.shape[len(shape) - 2 :])
            return jnp.sum(jax.vmap(_log_density(likelihood, noise))(target, mean, blocks))

        return jnp.sum(jax.lax.map(of_example, (inputs, wanted), batch_size=EXAMPLES_AT_ONCE))

    def density(precision: float) -> float:
        belief, receipt = at(precision)
        noise = 1.0 if receipt.noise_variance is None else receipt.noise_variance
        return float(score(belief, jnp.asarray(noise)))

    densities = np.nan_to_num([density(p) for p in PRECISIONS], nan=-np.inf)
    return float(PRECISIONS[np.argmax(densities)])


def _log_density(likelihood: type, noise: Array) -> Callable[[Array, Array, Array], Array]:
    if likelihood is Categorical:
        return partial(log_marginal, Categorical())
    if likelihood is Gaussian:
        return partial(log_marginal, Gaussian(noise))

    def of_bits(target: Array, mean: Array, cov: Array) -> Array:
        p = bernoulli_probabilities(mean, jnp.diagonal(cov))
        return jnp.sum(jnp.log(jnp.where(target > 0.5, p, 1 - p)))

    return of_bits
