"""The figure of the forecasts."""

from __future__ import annotations

import datetime
from statistics import NormalDist

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures import BAYES, STYLE
from experiments.seq2seq.baselines import LEVELS, Forecast, seasonal_naive
from experiments.seq2seq.data import DAY, PAST, START, Windows

HORIZON = np.arange(1, DAY + 1)


def forecasts(part: Windows, forecast: Forecast, shown: np.ndarray) -> Figure:
    """Some windows: the temperatures above, and below what differs from yesterday, with both bands."""
    yesterday = seasonal_naive(part)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            2, len(shown), figsize=(2.7 * len(shown), 4.6), height_ratios=(1, 1.4), squeeze=False
        )
        for column, i in zip(axes.T, shown, strict=True):
            start = START + datetime.timedelta(hours=int(part.origin[i]))
            column[0].set_title(f"{start:%d %b, from %H:%M}")
            column[0].plot(np.arange(-PAST, 0) + 1, part.past[i], color="0.6", lw=1)
            column[0].plot(HORIZON, part.future[i], "k.", ms=3)
            column[0].plot(HORIZON, forecast.mean[i], color=BAYES, lw=1)
            _bands(column[1], forecast.mean[i] - yesterday[i], forecast.sd[i])
            column[1].plot(HORIZON, part.future[i] - yesterday[i], "k.", ms=4, label="truth")
            column[1].axhline(0, color="0.6", lw=0.7)
            column[1].set_xlabel("hours ahead")
        axes[0, 0].set_ylabel("temperature (°F)")
        axes[1, 0].set_ylabel("minus yesterday's (°F)")
        axes[1, 0].legend(fontsize=7)
    return figure


def _bands(axes: Axes, mean: np.ndarray, sd: np.ndarray) -> None:
    for level, shade in zip(LEVELS, (0.45, 0.2), strict=True):
        width = NormalDist().inv_cdf((1 + level) / 2) * sd
        label = f"{100 * level:.0f} % band"
        axes.fill_between(
            HORIZON, mean - width, mean + width, color=BAYES, alpha=shade, lw=0, label=label
        )
    axes.plot(HORIZON, mean, color=BAYES, lw=1, label="forecast")
