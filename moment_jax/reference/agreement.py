"""How well moments agree with the sampled truth: four figures."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Agreement(NamedTuple):
    """Agreement of means and standard deviations with the truth's, over all elements that vary.

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
        cls, mean: ArrayLike, sd: ArrayLike, true_mean: ArrayLike, true_sd: ArrayLike
    ) -> Agreement:
        """The figures of arrays of one shape; what has a true sd of zero (a dead ReLU) is left out."""
        means, sds, true_means, true_sds = (
            np.asarray(part, np.float64) for part in (mean, sd, true_mean, true_sd)
        )
        if (varies := true_sds > 0).any():
            means, sds, true_means, true_sds = (
                part[varies] for part in (means, sds, true_means, true_sds)
            )
        ratio = sds / true_sds
        centred, true_centred = sds - sds.mean(), true_sds - true_sds.mean()
        spread = np.sqrt(np.sum(centred**2) * np.sum(true_centred**2))
        correlation = np.sum(centred * true_centred) / spread if spread > 0 else 0.0
        return cls(
            float(np.sqrt(np.mean(((means - true_means) / true_sds) ** 2))),
            float(ratio.mean()),
            float(np.abs(ratio - 1).mean()),
            float(correlation),
        )
