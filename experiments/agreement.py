"""How moments agree with sampled ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike


class Agreement(NamedTuple):
    """How well means and standard deviations agree with the truth, over all elements that vary."""

    mean_error: float  # root mean square of (mean - true mean) / true sd
    sd_ratio: float  # mean of sd / true sd
    sd_error: float  # mean of |sd / true sd - 1|
    sd_correlation: float  # between sd and true sd; 0 where either is constant

    @classmethod
    def of(
        cls, mean: ArrayLike, sd: ArrayLike, true_mean: ArrayLike, true_sd: ArrayLike
    ) -> Agreement:
        """Compare arrays of one shape, leaving out elements whose true sd is zero (a dead ReLU)."""
        varies, given = np.asarray(true_sd) > 0, (mean, sd, true_mean, true_sd)
        means, sds, true_means, true_sds = (np.asarray(x, np.float64)[varies] for x in given)
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
