"""The forecaster's objective, and its forecasts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import moment_jax as mj
from experiments.seq2seq.baselines import Forecast, seasonal_naive
from experiments.seq2seq.data import DAY, Tokens, Windows, mini_batch, mirrored, tokens
from experiments.training import Task, clipped_adam

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
    judged = Tokens(*(jnp.asarray(array[::VALIDATED]) for array in validation))

    def loss(network: Any, key: Array, step: Array) -> Array:
        order_key, sign_key = jax.random.split(key)
        batch = mini_batch(order_key, step, train, batch_size)
        batch = mirrored(jax.random.fold_in(sign_key, step), batch)
        weight = mj.objectives.kl_warmup(step, round(KL_WARM_UP * num_steps), kl_weight)
        options = {"dataset_size": size, "kl_weight": weight}
        return -network.elbo(tuple(batch[:3]), batch.correction, **options) / DAY

    def validate(network: Any, _: Any) -> Array:
        found = network.likelihood(network(*judged[:3]))
        mean, variance, truth = found.mean[..., 0], found.variance[..., 0], judged.correction
        # As the forecasts will be: with the one factor that fits this part, see `calibration`.
        variance = variance * jnp.mean((truth - mean) ** 2 / variance)
        return -jnp.mean(jax.scipy.stats.norm.logpdf(truth, mean, jnp.sqrt(variance)))

    optimizer = clipped_adam(LEARNING_RATE, num_steps)
    return Task("Bayesian Transformer", loss, optimizer, num_steps, validate)


def forecast(network: mj.Bayesian, part: Windows, scale: float) -> Forecast:
    """Analytic forecasts, in degrees: one pass of moments, nothing sampled."""
    found = network.predict(*tokens(part, scale)[:3], batch_size=CHUNK)
    mean, sd = (scale * np.asarray(x[..., 0]) for x in (found.mean, found.sd))
    return Forecast(seasonal_naive(part) + mean, sd)


def calibration(forecast: Forecast, part: Windows) -> float:
    """The factor of all standard deviations that makes the part likeliest, the root mean square of z."""
    return float(np.sqrt(np.mean(((part.future - forecast.mean) / forecast.sd) ** 2)))
