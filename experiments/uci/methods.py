"""The methods: relative weight noise, the ELBO, and MC dropout."""

import abc
import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import draws
from experiments.uci import predictive
from experiments.uci.networks import Network, Params
from experiments.uci.predictive import Mixture

Setting = dict[str, Array]
"""Settings chosen on validation rows, by name; scalars within a split."""

GROUPS = 16  # networks that share a mini-batch
NUM_DRAWS = 200  # networks that predict
DECAY = 1e-4  # squared length scale of MC dropout's prior, as published
PRIORS = (0.0, 0.5, 1.0)  # standard deviations; 0 for one that is learned in each array
SPREADS = (0.01, 0.03, 0.06, 0.1, 0.2, 0.3)  # of a weight, over its magnitude
DECAYS = (1e-4, 1.0)  # of the means: hardly any, and a prior of standard deviation 1
LEAST = 1e-6  # magnitude that every weight counts as having, and biases have: next to no noise
RATES = (0.005, 0.01, 0.05, 0.1)  # of MC dropout, those of the published search


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
    """A way to train and to predict."""

    network: Network
    name: ClassVar[str]
    candidates: ClassVar[list[dict[str, float]]]

    def loss(
        self, params: Params, setting: Setting, key: Array, batch: tuple[Array, Array],
        share: Array, num_rows: Array,
    ) -> Array:  # fmt: skip
        """The loss for each row, on a mini-batch (x, y), at this share of the KL's weight."""
        penalty = self.penalty(self.network.module(params), setting, share)
        return penalty / num_rows - self.fit(params, setting, key, batch)

    @abc.abstractmethod
    def penalty(self, module: Any, setting: Setting, share: Array) -> Array:
        """The penalty of all weights."""

    def draw(self, module: Any, setting: Setting) -> draws.Draw:
        """How networks are drawn: from the beliefs by default."""
        return draws.weights(module.params)

    def fit(self, params: Params, setting: Setting, key: Array, batch: Any) -> Array:
        """The mean log-likelihood of a mini-batch; each part of it uses its own drawn network."""
        module = self.network.module(params)
        outputs_of, draw = self.network.outputs(module), self.draw(module, setting)
        given = draws.outputs(outputs_of, draw, key, batch[0], GROUPS)
        return predictive.log_likelihood(given, batch[1], params["log_noise"]).mean()

    def predict(
        self, params: Params, setting: Setting, key: Array, x: Array, factor: Array
    ) -> Mixture:
        """The prediction for rows x, with this factor on the noise variance: here of many networks."""
        module = self.network.module(params)
        outputs_of, draw = self.network.outputs(module), self.draw(module, setting)
        given = draws.many(outputs_of, draw, key, x, NUM_DRAWS)
        return predictive.of_draws(given, self.noise(params, factor))

    def noise(self, params: Params, factor: Array) -> Array:
        """The noise variance; the factor on it where the network gives it."""
        return factor if self.network.num_outputs == 2 else factor * jnp.exp(params["log_noise"])


class Sampled(Method):
    """An ELBO of factorised Gaussian beliefs, and the prediction, by sampled networks."""

    name = "ELBO, drawn"
    candidates: ClassVar = [{"prior_sd": sd} for sd in PRIORS]

    def penalty(self, module: Any, setting: Setting, share: Array) -> Array:
        """The KL to priors of the setting's standard deviation, or to learned ones."""
        sd = setting["prior_sd"]
        prior = mj.posterior.GaussianPrior(variance=jnp.where(sd == 0, 1.0, sd) ** 2)
        fixed = sum((b.kl(prior) for b in draws.beliefs(module.params)), jnp.zeros(()))
        return share * jnp.where(sd == 0, draws.learned_prior_kl(module.params), fixed)


class ByMoments(Method):
    """Training and prediction by one pass of moments."""

    def beliefs(self, params: Params, setting: Setting) -> Any:
        """The module whose moments are taken."""
        return self.network.module(params)

    def fit(self, params: Params, setting: Setting, key: Array, batch: Any) -> Array:
        """The mean expected log-likelihood, by one pass of moments."""
        mean, cov = self.network.moments(self.beliefs(params, setting), batch[0])
        likelihood: mj.objectives.Likelihood = mj.objectives.HeteroscedasticGaussian()
        if self.network.num_outputs == 1:
            likelihood = mj.objectives.Gaussian(jnp.exp(params["log_noise"]))
        of_row = jax.vmap(partial(mj.objectives.expected_log_likelihood, likelihood))
        return of_row(batch[1][:, None], mean, cov).mean()

    def predict(
        self, params: Params, setting: Setting, key: Array, x: Array, factor: Array
    ) -> Mixture:
        """From one pass of moments."""
        mean, cov = self.network.moments(self.beliefs(params, setting), x)
        return predictive.of_moments(mean, cov, self.noise(params, factor))


class Analytic(ByMoments, Sampled):
    """The same ELBO and the prediction from moments."""

    name = "ELBO, analytic"


class Bayesian(ByMoments):
    """Beliefs about kernels with a standard deviation that is a share of each weight's magnitude.

    Variational dropout (Kingma et al., 2015): under a log-uniform prior the KL depends on the share
    alone, which validation rows choose; and the decay of the means, a Gaussian prior of theirs.
    """

    name = "Bayesian, analytic"
    candidates: ClassVar = [
        {"spread": spread, "decay": decay} for spread, decay in itertools.product(SPREADS, DECAYS)
    ]

    def penalty(self, module: Any, setting: Setting, share: Array) -> Array:
        """Weight decay of the means, from the first update on."""
        return setting["decay"] * _squares(module) / 2

    def beliefs(self, params: Params, setting: Setting) -> Any:
        """With spreads by the means."""
        module = self.network.module(params)
        for _, node in nnx.iter_graph(module):
            if isinstance(node, mj.nn.Belief):
                mean = node.mean[...]
                size = jnp.maximum(jnp.abs(mean) if mean.ndim == 2 else 0 * mean, LEAST)
                node.raw["scale"].set_value(jnp.log(jnp.expm1(setting["spread"] * size)))
        return module


class Dropout(Method):
    """MC dropout (Gal and Ghahramani, 2016)."""

    name = "MC dropout"
    candidates: ClassVar = [{"rate": rate} for rate in RATES]

    def penalty(self, module: Any, setting: Setting, share: Array) -> Array:
        """Weight decay, from the first update on."""
        return DECAY * (1 - setting["rate"]) * _squares(module) / 2

    def draw(self, module: Any, setting: Setting) -> draws.Draw:
        """Without a share of the inputs."""
        return draws.dropout(module.params, setting["rate"])


def _squares(module: Any) -> Array:
    return sum((jnp.sum(b.mean**2) for b in draws.beliefs(module.params)), jnp.zeros(()))


METHODS: dict[str, Callable[[Network], Method]] = {
    "bayesian": Bayesian,
    "analytic": Analytic,
    "sampled": Sampled,
    "dropout": Dropout,
}
"""By the names that the command line takes."""
