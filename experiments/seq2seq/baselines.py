"""Baselines: yesterday's values and ridge regression, with Gaussian residuals."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.stats import norm
from sklearn.linear_model import Ridge

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


def change_regressors(part: Windows) -> np.ndarray:
    """The two differences of the three days, (N, 48)."""
    return np.diff(part.days, axis=1).reshape(len(part.past), -1)


class Regression(NamedTuple):
    """A ridge regression, and the root mean square of its validation residuals."""

    model: Any
    alpha: float
    validation_error: float = np.inf

    def predict(self, part: Windows) -> np.ndarray:
        """Means, (N, 24)."""
        change: np.ndarray = self.model.predict(change_regressors(part))
        return seasonal_naive(part) + change


def ridge(parts: Parts) -> Regression:
    """Ridge regression of the 24 changes since yesterday on the two differences of the days.

    Without intercept: the linear model of which the network's is the nonlinear one, and which, like it,
    takes warming and cooling for mirror images. Fitted on the training part; its alpha, in units of the
    regressors' variance, has the least validation error.
    """
    inputs, fits = change_regressors(parts.train), []
    for alpha in ALPHAS:
        model = Ridge(alpha=alpha * inputs.var(), fit_intercept=False, solver="svd")
        changes = parts.train.future - seasonal_naive(parts.train)
        fit = Regression(model.fit(inputs, changes), alpha)
        residual = parts.validation.future - fit.predict(parts.validation)
        fits.append(fit._replace(validation_error=float(np.sqrt(np.mean(residual**2)))))
    return min(fits, key=lambda fit: fit.validation_error)


def scores(forecast: Forecast, part: Windows) -> dict[str, float]:
    """Negative log-likelihood (nats an hour), CRPS and error in degrees, and coverage.

    The CRPS of a Gaussian is Eq. 21 of Gneiting and Raftery (2007), with the sign turned.
    """
    error = part.future - forecast.mean
    z = error / forecast.sd
    crps = z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - np.pi**-0.5
    inside = {level: np.abs(z) <= norm.ppf((1 + level) / 2) for level in LEVELS}
    return {
        "nll": float(np.mean(np.log(forecast.sd) - norm.logpdf(z))),
        "crps": float(np.mean(forecast.sd * crps)),
        "rmse": float(np.sqrt(np.mean(error**2))),
        **{f"coverage_{level:.0%}".rstrip("%"): float(inside[level].mean()) for level in LEVELS},
    }
