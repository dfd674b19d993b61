"""The analytic moments of forecasts beside those of networks sampled from the posterior."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moment_jax as mj
from experiments.forecast_baselines import Forecast, scores, seasonal_naive
from experiments.forecast_data import Tokens, Windows, tokens
from experiments.forecast_training import forecast
from experiments.forecaster import Forecaster

Array = jax.Array


def against_samples(
    network: Forecaster, part: Windows, scale: float, key: Array, num_samples: int
) -> dict[str, Any]:
    """Scores of both Gaussian forecasts, and the agreement of their standard deviations.

    The sampled forecast has the mean of the drawn networks' means, and as variance that of these means
    and the mean of their noise variances. `total_sd` compares these, `parameter_sd` without the noise.
    """
    given = tokens(part, scale)
    truth = _sampled_moments(network, given, key, num_samples)
    mean, spread = np.asarray(truth.mean), np.asarray(truth.standard_deviation)
    total = np.sqrt(spread[..., 0] ** 2 + mean[..., 1])
    drawn = Forecast(seasonal_naive(part) + scale * mean[..., 0], scale * total)
    own = forecast(network, part, scale)
    own_mean, own_sd = _moments(network, given)
    agreement = mj.reference.Agreement.of
    return {
        "windows": len(part.origin),
        "analytic": scores(own, part),
        "sampled": scores(drawn, part),
        "total_sd": agreement(*own, *drawn)._asdict(),
        "parameter_sd": agreement(own_mean, own_sd, mean[..., 0], spread[..., 0])._asdict(),
    }


def _moments(network: Forecaster, given: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """Analytic mean and standard deviation of the change alone, (N, 24)."""
    graph, params = nnx.split(network)
    compiled = jax.jit(lambda params, given: nnx.merge(graph, params)(*given[:3]))
    mean, cov = (np.asarray(each) for each in compiled(params, given))
    return mean[..., 0], np.sqrt(cov[..., 0, 0])


def _sampled_moments(
    network: Forecaster, given: Tokens, key: Array, num_samples: int
) -> mj.reference.MonteCarloMoments:
    """Moments of the change and of its noise variance, (N, 24, 2)."""
    graph, params = nnx.split(network)

    def moments(params: Any, given: Tokens, key: Array) -> mj.reference.MonteCarloMoments:
        model = nnx.merge(graph, params)

        def outputs(draw: Any) -> Array:
            change, log_noise = jnp.moveaxis(model.network(draw)(*given[:3]), -1, 0)
            return jnp.stack([change, jnp.exp(log_noise)], axis=-1)

        return mj.monte_carlo(outputs, model.params, key, num_samples, batch_size=1)

    return jax.jit(moments)(params, given, key)
