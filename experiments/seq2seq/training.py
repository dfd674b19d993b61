"""The forecaster's objective, and its forecasts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.networks import negative_elbo
from experiments.seq2seq.baselines import Forecast, seasonal_naive
from experiments.seq2seq.data import DAY, Tokens, Windows, mini_batch, mirrored, tokens
from experiments.seq2seq.forecaster import Forecaster
from experiments.training import Report, Task, clipped_adam

LIKELIHOOD = mj.objectives.HeteroscedasticGaussian()
LEARNING_RATE = 3e-3
KL_WARM_UP = 0.25  # share of the updates in which the weight of the KL rises
VALIDATED = 3  # every third validation window selects the best parameters
CHUNK = 128


def task(
    train: Tokens, validation: Tokens, *, num_steps: int, batch_size: int, kl_weight: float
) -> Task:
    """The negative analytic ELBO for each hour, by one pass of moments a step; best on validation kept.

    The windows overlap, so each hour of the data is counted up to 24 times against the one KL. Bayes'
    rule for the hours would be a KL weight of about 24; with less the posterior is colder.
    """
    size = len(train.correction)
    judged = Tokens(*(array[::VALIDATED] for array in validation))
    fit_of = jax.vmap(jax.vmap(partial(mj.objectives.expected_log_likelihood, LIKELIHOOD)))

    def loss(network: Any, key: Array, step: Array) -> tuple[Array, Report]:
        order_key, sign_key = jax.random.split(key)
        batch = mini_batch(order_key, step, train, batch_size)
        batch = mirrored(jax.random.fold_in(sign_key, step), batch)
        fits = fit_of(batch.correction[..., None], *network(*batch[:3])).sum(axis=1)
        weight = mj.objectives.kl_warmup(step, round(KL_WARM_UP * num_steps), kl_weight)
        value, parts = negative_elbo(fits, network.kl(), size, weight)
        return value / DAY, {**parts, "fit": parts["fit"] / DAY}

    def validate(network: Any) -> Array:
        mean, variance = predictive(network, judged)
        truth = jnp.asarray(judged.correction)
        # As the forecasts will be: with the one factor that fits this part, see `calibration`.
        variance = variance * jnp.mean((truth - mean) ** 2 / variance)
        return mj.objectives.gaussian_negative_log_likelihood(truth, mean=mean, variance=variance)

    optimizer = clipped_adam(LEARNING_RATE, num_steps)
    return Task("Bayesian Transformer", loss, optimizer, num_steps, validate)


def predictive(network: Forecaster, part: Tokens) -> tuple[Array, Array]:
    """Mean of the correction and its variance, of parameters and noise, (N, 24) each."""
    output, cov = network(*(jnp.asarray(array) for array in part[:3]))
    one = partial(mj.objectives.predictive_gaussian, likelihood=LIKELIHOOD)
    mean, variance = jax.vmap(jax.vmap(one))(output, cov)
    return mean[..., 0], variance[..., 0]


def forecast(network: Forecaster, part: Windows, scale: float) -> Forecast:
    """Analytic forecasts, in degrees: one pass of moments, nothing sampled."""
    graph, params = nnx.split(network)
    compiled = jax.jit(lambda params, chunk: predictive(nnx.merge(graph, params), chunk))
    given, total = tokens(part, scale), len(part.origin)
    rows = np.arange(-(-total // CHUNK) * CHUNK) % total  # all chunks of one size: one compilation
    results = [
        compiled(params, Tokens(*(array[chunk] for array in given)))
        for chunk in rows.reshape(-1, CHUNK)
    ]
    mean, variance = (np.concatenate(each)[:total] for each in zip(*results, strict=True))
    return Forecast(seasonal_naive(part) + scale * mean, scale * np.sqrt(variance))


def calibration(forecast: Forecast, part: Windows) -> float:
    """The factor of all standard deviations that makes the part likeliest, the root mean square of z."""
    return float(np.sqrt(np.mean(((part.future - forecast.mean) / forecast.sd) ** 2)))
