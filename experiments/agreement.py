"""How well moments agree with the sampled truth: the four figures that experiments report."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Agreement(NamedTuple):
    """Agreement of means and standard deviations with the truth's, over all elements.

    mean_error is the root mean square of (mean - true mean) / true sd; sd_ratio the mean of sd / true
    sd; sd_error the mean of |sd / true sd - 1|; sd_correlation that of the two sds, 0 where either is
    the same everywhere.
    """

    mean_error: float
    sd_ratio: float
    sd_error: float
    sd_correlation: float

    @classmethod
    def of(
        cls, mean: np.ndarray, sd: np.ndarray, true_mean: np.ndarray, true_sd: np.ndarray
    ) -> Agreement:
        """The figures of arrays of one shape; true_sd is positive."""
        mean, sd, true_mean, true_sd = (
            np.asarray(part, np.float64) for part in (mean, sd, true_mean, true_sd)
        )
        ratio = sd / true_sd
        centred, true_centred = sd - sd.mean(), true_sd - true_sd.mean()
        spread = np.sqrt(np.sum(centred**2) * np.sum(true_centred**2))
        correlation = np.sum(centred * true_centred) / spread if spread > 0 else 0.0
        return cls(
            float(np.sqrt(np.mean(((mean - true_mean) / true_sd) ** 2))),
            float(ratio.mean()),
            float(np.abs(ratio - 1).mean()),
            float(correlation),
        )
