"""Baselines: yesterday's values and ridge regression, with Gaussian residuals."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import moment_jax as mj
from experiments.seq2seq.data import DAY, Parts, Windows

ALPHAS = tuple(10.0**power for power in range(-8, 5))
LEVELS = (0.5, 0.9)


class Forecast(NamedTuple):
    """Gaussian forecasts of N windows, in degrees: means and standard deviations, both (N, 24)."""

    mean: np.ndarray
    sd: np.ndarray

    def part(self, chosen: slice | np.ndarray) -> Forecast:
        """Those of some of the windows."""
        return Forecast(self.mean[chosen], self.sd[chosen])


def seasonal_naive(part: Windows) -> np.ndarray:
    """Yesterday again, (N, 24)."""
    return part.past[:, -DAY:]


def with_residual_spread(validation: np.ndarray, part: np.ndarray, truth: Windows) -> Forecast:
    """Means with, at each horizon, the root mean square of the validation part's residuals."""
    spread = np.sqrt(np.mean((truth.future - validation) ** 2, axis=0))
    return Forecast(part, np.broadcast_to(spread, part.shape))


def calendar_regressors(part: Windows) -> np.ndarray:
    """The 72 temperatures and two harmonics of the first hour's time of day, (N, 76).

    Without the day of the year, as the network: in days that no earlier part has, it does harm (with its
    harmonic the root mean square error on the validation part rises from 0.119 to 0.127 degrees).
    """
    turn = 2 * np.pi * part.origin[:, None] / DAY
    angles = np.concatenate([turn, 2 * turn], axis=1)
    return np.concatenate([part.past, np.sin(angles), np.cos(angles)], axis=1)


def change_regressors(part: Windows) -> np.ndarray:
    """The two differences of the three days, (N, 48)."""
    return np.diff(part.days, axis=1).reshape(len(part.past), -1)


class Regression(NamedTuple):
    """A ridge regression, and the root mean square of its validation residuals."""

    model: Any
    alpha: float
    on_changes: bool
    validation_error: float = np.inf

    def predict(self, part: Windows) -> np.ndarray:
        """Means, (N, 24)."""
        inputs, offset = _regressors(part, self.on_changes)
        return offset + self.model.predict(inputs)


def ridge(parts: Parts, *, on_changes: bool = False) -> Regression:
    """Ridge regression of all 24 hours; its alpha is the one with the least validation error.

    Args:
      parts: fitted on the training part, chosen on the validation part.
      on_changes: instead of the standardised temperatures and calendar with an intercept, the change
        since yesterday on the two differences of the days, in units of their spread, without intercept:
        the linear model of which the network's is the nonlinear one, and which, like it, takes warming
        and cooling for mirror images.
    """
    inputs, offset = _regressors(parts.train, on_changes)
    fits = []
    for alpha in ALPHAS:
        model: Any = Ridge(alpha=alpha * inputs.var(), fit_intercept=False, solver="svd")
        if not on_changes:
            model = make_pipeline(StandardScaler(), Ridge(alpha=alpha, solver="svd"))
        fit = Regression(model.fit(inputs, parts.train.future - offset), alpha, on_changes)
        residual = parts.validation.future - fit.predict(parts.validation)
        fits.append(fit._replace(validation_error=float(np.sqrt(np.mean(residual**2)))))
    return min(fits, key=lambda fit: fit.validation_error)


def _regressors(part: Windows, on_changes: bool) -> tuple[np.ndarray, np.ndarray]:
    if on_changes:
        return change_regressors(part), seasonal_naive(part)
    return calendar_regressors(part), np.zeros(part.future.shape)


def scores(forecast: Forecast, part: Windows) -> dict[str, float]:
    """Negative log-likelihood (nats an hour), CRPS and error in degrees, and coverage."""
    mean, variance, truth = map(jnp.asarray, (forecast.mean, forecast.sd**2, part.future))
    moments = {"mean": mean, "variance": variance}
    objectives = mj.objectives
    return {
        "nll": float(objectives.gaussian_negative_log_likelihood(truth, **moments)),
        "crps": float(objectives.gaussian_crps(truth, **moments)),
        "rmse": float(jnp.sqrt(jnp.mean((truth - mean) ** 2))),
        **{
            f"coverage_{level:.0%}".rstrip("%"): float(
                objectives.interval_coverage(truth, **moments, level=level)
            )
            for level in LEVELS
        },
    }
