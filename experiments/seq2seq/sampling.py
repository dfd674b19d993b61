"""The analytic moments of forecasts beside those of networks sampled from the posterior."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moment_jax as mj
from experiments.seq2seq.baselines import Forecast, scores, seasonal_naive
from experiments.seq2seq.data import Tokens, Windows, tokens
from experiments.seq2seq.forecaster import Forecaster

Array = jax.Array


def against_samples(
    network: Forecaster,
    part: Windows,
    analytic: tuple[Forecast, np.ndarray],
    scale: float,
    key: Array,
    num_samples: int,
) -> dict[str, Any]:
    """Scores of the analytic and of the sampled Gaussian forecasts, and how their sds agree.

    The sampled forecast has the mean of the drawn networks' means, and as variance that of these means
    and the mean of their noise variances. `total_sd` compares these, `parameter_sd` without the noise.

    Args:
      network: the belief to draw from.
      part: what is forecast.
      analytic: the result of `training.forecast` for it.
      scale: the units of the network, in degrees.
      key: a random key.
      num_samples: networks to draw.
    """
    truth = _sampled_moments(network, tokens(part, scale), key, num_samples)
    mean, spread = np.asarray(truth.mean), np.asarray(truth.standard_deviation)
    center = seasonal_naive(part) + scale * mean[..., 0]
    parameter_sd = scale * spread[..., 0]
    drawn = Forecast(center, np.sqrt(parameter_sd**2 + scale**2 * mean[..., 1]))
    own, own_parameter_sd = analytic
    agreement = mj.reference.Agreement.of
    return {
        "windows": len(part.origin),
        "analytic": scores(own, part),
        "sampled": scores(drawn, part),
        "total_sd": agreement(*own, *drawn)._asdict(),
        "parameter_sd": agreement(own.mean, own_parameter_sd, center, parameter_sd)._asdict(),
    }


def _sampled_moments(
    network: Forecaster, given: Tokens, key: Array, num_samples: int
) -> mj.reference.MonteCarloMoments:
    """Moments of the correction and of its noise variance, (N, 24, 2)."""
    graph, params = nnx.split(network)

    def moments(params: Any, given: Tokens, key: Array) -> mj.reference.MonteCarloMoments:
        model = nnx.merge(graph, params)

        def outputs(draw: Any) -> Array:
            correction, log_noise = jnp.moveaxis(model.network(draw)(*given[:3]), -1, 0)
            return jnp.stack([correction, jnp.exp(log_noise)], axis=-1)

        return mj.monte_carlo(outputs, model.params, key, num_samples, batch_size=1)

    return jax.jit(moments)(params, given, key)
