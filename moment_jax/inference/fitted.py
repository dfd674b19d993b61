"""The result of `fit`: predictions in the units of the data."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from moment_jax.inference import variational
from moment_jax.inference.data import Scaling, as_inputs, checked_targets, in_batches
from moment_jax.inference.variational import Belief, Spec
from moment_jax.objectives import Categorical, Gaussian, class_probabilities

_probabilities = jax.jit(jax.vmap(class_probabilities))


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A fitted model: predictions in the units of the data.

    Args:
      model: the network.
      posterior: beliefs about its weights, for `mj.bayesian(model, posterior)`; a table's network takes
        standardised inputs and targets.
      noise_variance: (D,), of a Gaussian likelihood, in squared units of the targets; else None.
      history: for each evaluation, the number of steps, -ELBO / N and the held-out NLL (NaN without
        held-out data), both in nats for standardised targets.
    """

    model: nnx.Module
    posterior: Any
    noise_variance: np.ndarray | None
    history: list[tuple[int, float, float]]
    _spec: Spec
    _belief: Belief
    _frame: Any
    _inputs: Scaling | None
    _targets: Scaling | None

    def predict(self, inputs: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the targets, noise included, (N, D) each."""
        self._needs(Gaussian, "predict", "predict_proba")
        mean, cov = self._moments(inputs)
        noise = np.exp(np.asarray(self._belief.log_noise))
        sd = np.sqrt(np.diagonal(cov, axis1=1, axis2=2) + noise)
        scaling = self._targets
        if scaling is None:
            return mean, sd
        return mean * scaling.scale + scaling.shift, sd * scaling.scale

    def predict_proba(self, inputs: Any) -> np.ndarray:
        """Predictive probabilities of the classes, (N, C)."""
        self._needs(Categorical, "predict_proba", "predict")
        return in_batches(lambda moments: _probabilities(*moments), self._moments(inputs))

    def log_prob(self, inputs: Any, targets: Any) -> np.ndarray:
        """Log predictive density of each example, (N,), in nats and in the units of the targets."""
        values = checked_targets(targets, self._spec.likelihood)
        logs = held_out_scores(
            self._spec, self._belief, self._frame, self._seen(inputs),
            values if self._targets is None else self._targets(values),
        )  # fmt: skip
        return logs if self._targets is None else logs - np.sum(np.log(self._targets.scale))

    def _needs(self, likelihood: type, method: str, other: str) -> None:
        if self._spec.likelihood is not likelihood:
            raise TypeError(
                f"`{method}` needs the likelihood {likelihood.__name__}. Got "
                f"{self._spec.likelihood.__name__}. Use `{other}`."
            )

    def _seen(self, inputs: Any) -> tuple[np.ndarray, ...]:
        return as_inputs(inputs) if self._inputs is None else (self._inputs(np.asarray(inputs)),)

    def _moments(self, inputs: Any) -> tuple[np.ndarray, np.ndarray]:
        return output_moments(self._spec, self._belief, self._frame, self._seen(inputs))


def output_moments(
    spec: Spec, belief: Belief, frame: Any, inputs: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of all outputs, (N, D) and (N, D, D), computed in batches."""
    return in_batches(partial(variational.predict, spec, belief, frame), inputs)


def scores(
    spec: Spec, belief: Belief, targets: np.ndarray, mean: np.ndarray, cov: np.ndarray
) -> np.ndarray:
    """Log predictive densities, (N,), given the outputs' moments."""
    return in_batches(lambda batch: variational.score(spec, belief, *batch), (targets, mean, cov))


def held_out_scores(
    spec: Spec, belief: Belief, frame: Any, inputs: Any, targets: Any
) -> np.ndarray:
    """Log predictive densities, (N,), of targets given inputs."""
    return scores(spec, belief, targets, *output_moments(spec, belief, frame, inputs))
