"""The analytic ELBO, sampled variational inference and MC dropout, for the same network."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import moment_jax as mj
from experiments import draws
from experiments.uci import predictive
from experiments.uci.networks import Network, Params
from experiments.uci.predictive import Mixture

Array = jax.Array
Setting = dict[str, Array]
"""What is chosen on validation rows, by name; scalars within a split."""

GROUPS = 16  # networks that share a mini-batch
NUM_DRAWS = 200  # networks that predict
DECAY = 1e-4  # squared length scale of MC dropout's prior, as published
PRIORS = (0.0, 0.5, 1.0)  # standard deviations; 0 for one that is learned in each array
RATES = (0.005, 0.01, 0.05, 0.1)  # of MC dropout, those of the published search


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
    """A way to train and to predict."""

    network: Network
    name: ClassVar[str]
    candidates: ClassVar[list[dict[str, float]]]

    @abc.abstractmethod
    def loss(
        self, params: Params, setting: Setting, key: Array, batch: tuple[Array, Array],
        share: Array, num_rows: Array,
    ) -> Array:  # fmt: skip
        """The loss for each row, on a mini-batch (x, y), at this share of the KL's weight."""

    @abc.abstractmethod
    def predict(
        self, params: Params, setting: Setting, key: Array, x: Array, factor: Array
    ) -> Mixture:
        """The prediction for rows x, with this factor on the noise variance."""

    def noise(self, params: Params, factor: Array) -> Array:
        """The noise variance; the factor on it where the network gives it."""
        return factor if self.network.num_outputs == 2 else factor * jnp.exp(params["log_noise"])

    def fit_of_draws(
        self, params: Params, draw: draws.Draw, key: Array, batch: tuple[Array, Array]
    ) -> Array:
        """The mean log-likelihood of a mini-batch, each part of it by a network of its own."""
        outputs_of = self.network.outputs(self.network.module(params))
        given = draws.outputs(outputs_of, draw, key, batch[0], GROUPS)
        return predictive.log_likelihood(given, batch[1], params["log_noise"]).mean()

    def predict_by_draws(
        self, params: Params, draw: draws.Draw, key: Array, x: Array, factor: Array
    ) -> Mixture:
        """The mixture of many networks."""
        outputs_of = self.network.outputs(self.network.module(params))
        given = draws.many(outputs_of, draw, key, x, NUM_DRAWS)
        return predictive.of_draws(given, self.noise(params, factor))


class Variational(Method):
    """What maximises an ELBO of factorised Gaussian beliefs."""

    candidates: ClassVar = [{"prior_sd": sd} for sd in PRIORS]

    def kl(self, module: Any, setting: Setting) -> Array:
        """To priors of the setting's standard deviation, or to learned ones."""
        sd = setting["prior_sd"]
        prior = mj.posterior.GaussianPrior(variance=jnp.where(sd == 0, 1.0, sd) ** 2)
        fixed = sum((b.kl(prior) for b in draws.beliefs(module.params)), jnp.zeros(()))
        return jnp.where(sd == 0, draws.learned_prior_kl(module.params), fixed)


class Analytic(Variational):
    """The ELBO and the prediction from moments."""

    name = "Bayesian, analytic"

    def loss(
        self, params: Params, setting: Setting, key: Array, batch: tuple[Array, Array],
        share: Array, num_rows: Array,
    ) -> Array:  # fmt: skip
        """The negative ELBO."""
        module = self.network.module(params)
        mean, cov = self.network.moments(module, batch[0])
        likelihood: mj.objectives.Likelihood = mj.objectives.HeteroscedasticGaussian()
        if self.network.num_outputs == 1:
            likelihood = mj.objectives.Gaussian(jnp.exp(params["log_noise"]))
        fit = jax.vmap(partial(mj.objectives.expected_log_likelihood, likelihood))
        return (
            share * self.kl(module, setting) / num_rows - fit(batch[1][:, None], mean, cov).mean()
        )

    def predict(
        self, params: Params, setting: Setting, key: Array, x: Array, factor: Array
    ) -> Mixture:
        """From one pass of moments."""
        mean, cov = self.network.moments(self.network.module(params), x)
        return predictive.of_moments(mean, cov, self.noise(params, factor))


class Sampled(Variational):
    """The same ELBO, and the prediction, by sampled networks."""

    name = "sampled VI"

    def loss(
        self, params: Params, setting: Setting, key: Array, batch: tuple[Array, Array],
        share: Array, num_rows: Array,
    ) -> Array:  # fmt: skip
        """The negative ELBO."""
        module = self.network.module(params)
        fit = self.fit_of_draws(params, draws.weights(module.params), key, batch)
        return share * self.kl(module, setting) / num_rows - fit

    def predict(
        self, params: Params, setting: Setting, key: Array, x: Array, factor: Array
    ) -> Mixture:
        """From sampled networks."""
        draw = draws.weights(self.network.module(params).params)
        return self.predict_by_draws(params, draw, key, x, factor)


class Dropout(Method):
    """MC dropout (Gal and Ghahramani, 2016)."""

    name = "MC dropout"
    candidates: ClassVar = [{"rate": rate} for rate in RATES]

    def loss(
        self, params: Params, setting: Setting, key: Array, batch: tuple[Array, Array],
        share: Array, num_rows: Array,
    ) -> Array:  # fmt: skip
        """The negative log-likelihood of networks with dropout, and weight decay."""
        beliefs = self.network.module(params).params
        fit = self.fit_of_draws(params, draws.dropout(beliefs, setting["rate"]), key, batch)
        squares = sum(jnp.sum(belief.mean**2) for belief in draws.beliefs(beliefs))
        return DECAY * (1 - setting["rate"]) * squares / (2 * num_rows) - fit

    def predict(
        self, params: Params, setting: Setting, key: Array, x: Array, factor: Array
    ) -> Mixture:
        """From networks with dropout."""
        draw = draws.dropout(self.network.module(params).params, setting["rate"])
        return self.predict_by_draws(params, draw, key, x, factor)


METHODS: dict[str, Callable[[Network], Method]] = {
    "analytic": Analytic,
    "sampled": Sampled,
    "dropout": Dropout,
}
"""By the names that the command line takes."""
