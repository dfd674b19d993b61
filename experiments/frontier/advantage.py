"""How many sampled networks give the same sd error as a pass of moments, and what they cost."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import moment_jax as mj
from experiments.frontier.truth import Sampled


class Accuracy(NamedTuple):
    """Agreement of one output's moments with its truth."""

    agreement: mj.reference.Agreement  # the library's four figures
    rms_sd_error: float  # of sd / true sd - 1, less the truth's own noise; never below that
    resolution: float  # that noise (rms of the truth's relative standard errors)
    at_resolution: bool  # whether the error is within the truth's noise

    @classmethod
    def of(cls, mean: np.ndarray, sd: np.ndarray, truth: Sampled) -> Accuracy:
        """Compare arrays of one shape."""
        if not (np.isfinite(mean).all() and np.isfinite(sd).all()):
            raise ValueError("a moment is not finite")
        agreement = mj.reference.Agreement.of(mean, sd, truth.mean, truth.sd)
        true_sd = truth.sd.astype(np.float64)
        noise = float(np.mean((truth.sd_error / true_sd) ** 2))
        square = float(np.mean((sd / true_sd - 1) ** 2)) - noise
        error = max(square, noise) ** 0.5
        return cls(agreement, error, noise**0.5, square <= noise)


class Advantage(NamedTuple):
    """What Monte Carlo needs for the same root mean square relative sd error e."""

    formula: float  # 1 + 1/(2 e^2), the number of Gaussian draws
    samples: float  # by subsamples of the truth's draws, extrapolated as 1 / sqrt(N - 1)
    ratio: float  # samples over the cost of a moment pass in plain forwards


def advantage(error: float, sizes: np.ndarray, curve: np.ndarray, cost: float) -> Advantage:
    """The advantage at a relative sd error, from the errors (`curve`) of subsamples of `sizes`."""
    # In these terms the curve of Gaussian draws is the straight line n - 1 = 1 / (2 e^2).
    precision = np.maximum.accumulate(1 / (2 * curve**2))
    wanted = 1 / (2 * error**2)
    if wanted <= precision[0]:
        samples = 1 + (sizes[0] - 1) * wanted / precision[0]
    elif wanted >= precision[-1]:
        samples = 1 + (sizes[-1] - 1) * wanted / precision[-1]
    else:
        samples = 1 + float(np.interp(wanted, precision, sizes - 1))
    samples = max(2.0, float(samples))
    return Advantage(1 + wanted, samples, samples / cost)
