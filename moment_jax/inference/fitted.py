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
class Network:
    """A model and its likelihood: what they say given a belief, computed in batches."""

    spec: Spec
    frame: Any

    def moments(self, belief: Belief, inputs: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance of all outputs, (N, D) and (N, D, D)."""
        return in_batches(partial(variational.predict, self.spec, belief, self.frame), inputs)

    def scores(self, belief: Belief, targets: np.ndarray, moments: Any) -> np.ndarray:
        """Log predictive densities, (N,), given the outputs' moments."""
        score = partial(variational.score, self.spec, belief)
        return in_batches(lambda batch: score(*batch), (targets, *moments))


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
    _network: Network
    _belief: Belief
    _inputs: Scaling | None
    _targets: Scaling

    def predict(self, inputs: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the targets, noise included, (N, D) each."""
        self._needs(Gaussian, "predict", "predict_proba")
        mean, cov = self._moments(inputs)
        noise = np.exp(np.asarray(self._belief.log_noise))
        sd = np.sqrt(np.diagonal(cov, axis1=1, axis2=2) + noise)
        return mean * self._targets.scale + self._targets.shift, sd * self._targets.scale

    def predict_proba(self, inputs: Any) -> np.ndarray:
        """Predictive probabilities of the classes, (N, C)."""
        self._needs(Categorical, "predict_proba", "predict")
        return in_batches(lambda moments: _probabilities(*moments), self._moments(inputs))

    def log_prob(self, inputs: Any, targets: Any) -> np.ndarray:
        """Log predictive density of each example, (N,), in nats and in the units of the targets."""
        values = self._targets(checked_targets(targets, self._network.spec.likelihood))
        logs = self._network.scores(self._belief, values, self._moments(inputs))
        return logs - np.sum(np.log(self._targets.scale))

    def _needs(self, likelihood: type, method: str, other: str) -> None:
        known = self._network.spec.likelihood
        if known is not likelihood:
            raise TypeError(
                f"`{method}` needs the likelihood {likelihood.__name__}. Got {known.__name__}. Use "
                f"`{other}`."
            )

    def _moments(self, inputs: Any) -> tuple[np.ndarray, np.ndarray]:
        return self._network.moments(self._belief, as_inputs(inputs, self._inputs))
