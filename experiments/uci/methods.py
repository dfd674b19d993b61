"""The network and the methods: relative weight noise, the ELBO, MC dropout; their predictions."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import draws

Setting = dict[str, Array]
"""Settings chosen on validation rows, by name; scalars within a split."""

GROUPS = 16  # networks that share a mini-batch
NUM_NODES = 32  # of the rule over a random noise variance
NUM_DRAWS = 200  # networks that predict
DECAY = 1e-4  # squared length scale of MC dropout's prior, as published
PRIORS = (0.0, 0.5, 1.0)  # standard deviations; 0 for one that is learned in each array
SPREADS = (0.01, 0.03, 0.06, 0.1, 0.2, 0.3)  # of a weight, over its magnitude
DECAYS = (1e-4, 1.0)  # of the means: hardly any, and a prior of standard deviation 1
LEAST = 1e-6  # magnitude that every weight counts as having, and biases have: next to no noise
RATES = (0.005, 0.01, 0.05, 0.1)  # of MC dropout, those of the published search


HIDDEN = 50
RELATIVE_SCALE = 0.03  # spreads begin small, or units are pruned before they have learned anything
START_LOG_NOISE = -1.0


def perceptron(num_features: int, num_outputs: int, key: Array) -> mj.Bayesian:
    """A new model of rows (N, D), of one hidden layer of 50 ReLU units.

    It has one output, the mean, or two, the mean and the logarithm of the noise variance. Hidden units
    are independent, for the input is certain: one output needs variances alone.
    """
    network = mj.nn.MLP([num_features, HIDDEN, num_outputs], rngs=nnx.Rngs(key))
    options: dict[str, Any] = {"structure": mj.Full, "relative_scale": RELATIVE_SCALE}
    if num_outputs == 2:
        return mj.Bayesian(network, mj.objectives.HeteroscedasticGaussian(), **options)
    model = mj.Bayesian(network, mj.Gaussian(), **options | {"structure": mj.Diagonal})
    model.noise.set_value(jnp.asarray(START_LOG_NOISE))
    return model


class Mixture(NamedTuple):
    """Components k with log weights (K, 1), means (K, N) and variances (K, N)."""

    log_weight: Array
    mean: Array
    variance: Array

    def log_density(self, y: Array) -> Array:
        """Log p(y) for each of the N targets, in nats."""
        squares = (y - self.mean) ** 2 / self.variance + jnp.log(2 * jnp.pi * self.variance)
        return jax.nn.logsumexp(self.log_weight - 0.5 * squares, axis=0)

    def centre(self) -> Array:
        """E[y], (N,)."""
        return jnp.sum(jnp.exp(self.log_weight) * self.mean, axis=0)


def of_moments(mean: Array, cov: Array, noise: Array) -> Mixture:
    """The prediction from the outputs' moments (N, O) and (N, O, O), O = 1 or 2.

    With a second output, the log noise variance g, there is no closed form: given g the target is
    Gaussian, and over g we take a Gauss-Hermite rule. `noise` is the noise variance (O = 1), or a factor
    on exp(g).
    """
    if mean.shape[1] == 1:
        return Mixture(jnp.zeros((1, 1)), mean.T, cov[:, 0].T + noise)
    points, weights = np.polynomial.hermite_e.hermegauss(NUM_NODES)
    spread = jnp.sqrt(jnp.maximum(cov[:, 1, 1], 1e-12))
    slope = cov[:, 0, 1] / spread
    z = jnp.asarray(points, mean.dtype)[:, None]
    log_noise = mean[:, 1] + spread * z
    rest = jnp.maximum(cov[:, 0, 0] - slope**2, 0.0)
    log_weight = jnp.log(jnp.asarray(weights / weights.sum(), mean.dtype))[:, None]
    return Mixture(log_weight, mean[:, 0] + slope * z, rest + noise * jnp.exp(log_noise))


def of_draws(outputs: Array, noise: Array) -> Mixture:
    """The prediction from outputs (K, N, O) of K networks; `noise` as in `of_moments`."""
    mean = outputs[..., 0]
    variance = noise * jnp.exp(outputs[..., 1]) if outputs.shape[-1] == 2 else noise
    log_weight = jnp.full((mean.shape[0], 1), -jnp.log(mean.shape[0]))
    return Mixture(log_weight, mean, jnp.broadcast_to(variance, mean.shape))


def log_likelihood(outputs: Array, y: Array, log_noise: Array) -> Array:
    """Log p(y | outputs), (N,), of outputs (N, O) of one network."""
    log_variance = outputs[:, 1] if outputs.shape[1] == 2 else log_noise
    squares = (y - outputs[:, 0]) ** 2 * jnp.exp(-log_variance)
    return -0.5 * (jnp.log(2 * jnp.pi) + log_variance + squares)


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train and to predict: by one pass of moments, or by drawn networks."""

    name: str
    candidates: Sequence[dict[str, float]]  # settings to choose from
    penalty: Callable[[Any, Setting, Array], Array]
    """(model, setting, share of the KL's weight) -> the penalty of all weights."""
    draw: Callable[[Any, Setting], draws.Draw] | None = None  # None: by moments
    beliefs: Callable[[Any, Setting], Any] = lambda module, setting: module
    """(model, setting) -> the model whose moments are taken."""

    def loss(
        self, model: mj.Bayesian, setting: Setting, key: Array,
        batch: tuple[Array, Array], share: Array, num_rows: Array,
    ) -> Array:  # fmt: skip
        """The loss for each row, on a mini-batch (x, y); each part of it uses its own drawn network."""
        x, y = batch
        if self.draw is not None:
            draw, network = self.draw(model, setting), draws.function_of(model.at_means())
            outputs = draws.outputs(network, draw, key, x, GROUPS)
            fits = log_likelihood(outputs, y, _log_noise(model))
        else:
            moments = self.beliefs(nnx.clone(model), setting)(x)
            of_row = jax.vmap(partial(mj.objectives.expected_log_likelihood, model.likelihood))
            fits = of_row(y[:, None], moments.mean, moments.features)
        return self.penalty(model, setting, share) / num_rows - fits.mean()

    def predict(
        self, model: mj.Bayesian, setting: Setting, key: Array, x: Array, factor: Array
    ) -> Mixture:
        """The prediction for rows x, with this factor on the noise variance."""
        noise = factor * jnp.exp(_log_noise(model))
        if self.draw is None:
            moments = self.beliefs(model, setting)(x)
            return of_moments(moments.mean, moments.features, noise)
        draw = self.draw(model, setting)
        outputs = draws.many(draws.function_of(model.at_means()), draw, key, x, NUM_DRAWS)
        return of_draws(outputs, noise)


def _log_noise(model: mj.Bayesian) -> Array:
    """Of the noise variance; 0 where the network gives it."""
    return jnp.zeros(()) if model.noise is None else jnp.asarray(model.noise[...])


def kl(module: Any, setting: Setting, share: Array) -> Array:
    """The KL to priors of the setting's standard deviation, or to learned ones."""
    sd = setting["prior_sd"]
    prior = mj.posterior.GaussianPrior(variance=jnp.where(sd == 0, 1.0, sd) ** 2)
    fixed = sum((b.kl(prior) for b in draws.beliefs(module.beliefs)), jnp.zeros(()))
    return share * jnp.where(sd == 0, draws.learned_prior_kl(module.beliefs), fixed)


def decay(module: Any, factor: Array) -> Array:
    """Weight decay of the means, from the first update on."""
    squares = (jnp.sum(belief.mean**2) for belief in draws.beliefs(module.beliefs))
    return factor * sum(squares, jnp.zeros(())) / 2


def relative(module: Any, setting: Setting) -> Any:
    """Beliefs about kernels with a standard deviation that is a share of each weight's magnitude.

    Variational dropout (Kingma et al., 2015): under a log-uniform prior the KL depends on the share
    alone, which validation rows choose; and the decay of the means, a Gaussian prior of theirs.
    """

    def sd(mean: Array) -> Array:
        size = jnp.abs(mean) if mean.ndim == 2 else 0 * mean
        return setting["spread"] * jnp.maximum(size, LEAST)

    return draws.with_spreads(module, sd)


METHODS = {
    "bayesian": Method(
        "Bayesian, analytic",
        [{"spread": s, "decay": d} for s, d in itertools.product(SPREADS, DECAYS)],
        lambda module, setting, share: decay(module, setting["decay"]),
        beliefs=relative,
    ),
    "analytic": Method("ELBO, analytic", [{"prior_sd": sd} for sd in PRIORS], kl),
    "dropout": Method(  # Gal and Ghahramani, 2016
        "MC dropout",
        [{"rate": rate} for rate in RATES],
        lambda module, setting, share: decay(module, DECAY * (1 - setting["rate"])),
        draw=lambda module, setting: draws.dropout(module.beliefs, setting["rate"]),
    ),
}
"""By the names that the command line takes."""
