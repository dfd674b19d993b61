"""Hourly temperatures of Seattle in 2010, as forecasts to make: 72 hours in, 24 hours out.

The series is of NOAA's hourly climate normals: averages over years, without weather. It is smooth,
rounded to a tenth of a degree, and one year long, so that every later part is a season that no earlier
part has seen.
"""

import datetime
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.data import batch_indices

DAY = 24
PAST_DAYS = 3
PAST = PAST_DAYS * DAY
FUTURE = DAY
SHARES = (0.6, 0.2)
"""The shares of the year to train and to validate; the rest is to test."""
START = datetime.datetime(2010, 1, 1)


class Series(NamedTuple):
    """Temperatures (N,) in degrees Fahrenheit, and their hours (N,) since the year began."""

    hour: np.ndarray
    temperature: np.ndarray


class Windows(NamedTuple):
    """N forecasts to make: temperatures (N, 72) known and (N, 24) wanted, and the first wanted hour."""

    past: np.ndarray
    future: np.ndarray
    origin: np.ndarray  # (N,) hours since the year began

    @property
    def days(self) -> np.ndarray:
        """What is known, day by day: (N, 3, 24), the same hour of the day below each other."""
        return self.past.reshape(-1, PAST_DAYS, DAY)


class Parts(NamedTuple):
    """Three spans of the year, in this order; no window reaches from one into the next."""

    train: Windows
    validation: Windows
    test: Windows


class Tokens(NamedTuple):
    """Windows as the network takes them, changes of temperature in units of a scale.

    One token of the source for each of the last 24 hours, one of the target for each hour to come, both
    at the same hours of the day. Arrays of NumPy, or of JAX in a mini-batch.
    """

    changes: Any  # (N, 24, 2): of the last 24 hours from the 24 before, and of those from theirs
    source_calendar: Any  # (N, 24, C)
    target_calendar: Any  # (N, 24, C)
    correction: Any  # (N, 24): the target, the change since the last 24 hours


def load() -> Series:
    """Read the file inside the package; nothing is downloaded."""
    import pandas as pd
    from vega_datasets import data

    frame = pd.read_csv(data.seattle_temps.filepath, parse_dates=["date"])
    hours = (frame["date"] - START) // pd.Timedelta(hours=1)
    return Series(hours.to_numpy(int), frame["temp"].to_numpy(float))


def windows(series: Series, first: int, last: int) -> Windows:
    """All windows within the hours [first, last), one for each starting hour.

    One that an hour is missing in (the clock skipped one in March) is left out.
    """
    inside, span = (series.hour >= first) & (series.hour < last), PAST + FUTURE
    hours, rows = (
        np.lib.stride_tricks.sliding_window_view(values[inside], span) for values in series
    )
    whole = hours[:, -1] - hours[:, 0] == span - 1
    return Windows(rows[whole, :PAST], rows[whole, PAST:], hours[whole, PAST])


def split(series: Series) -> Parts:
    """Train, validation and test in the order of time, borders at midnight."""
    start, end = int(series.hour[0]), int(series.hour[-1]) + 1
    days = [round(share * (end - start) / DAY) for share in SHARES]
    borders = [start, *(start + DAY * np.cumsum(days)), end]
    return Parts(*(windows(series, *both) for both in itertools.pairwise(borders)))


def tokens(part: Windows, scale: float) -> Tokens:
    """Differences of days, the hour of the day and the place in the sequence, as features.

    The temperature itself and the day of the year are left out: in one year's data both have values in
    the later parts that the earlier ones never show. All three days are used, by their two differences.
    """
    before, middle, yesterday = np.moveaxis(part.days, 1, 0)
    changes = np.stack([yesterday - middle, middle - before], axis=-1) / scale
    place = np.arange(DAY)
    return Tokens(
        changes.astype(np.float32),
        _calendar(part.origin, place, DAY - 1 - place),
        _calendar(part.origin, place, place),
        ((part.future - yesterday) / scale).astype(np.float32),
    )


def _calendar(origin: np.ndarray, place: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """(N, 24, 7): two harmonics of the hour of the day, and how far the hour is from the border."""
    turn = 2 * np.pi * (origin[:, None] + place) / DAY
    waves = [wave(k * turn) for k in (1, 2) for wave in (np.sin, np.cos)]
    near = [2 * distance / (DAY - 1) - 1, np.exp(-distance / 2), np.exp(-distance / 6)]
    every = [*waves, *(np.broadcast_to(n, turn.shape) for n in near)]
    return np.stack(every, axis=-1).astype(np.float32)


def mini_batch(key: Array, step: Array, part: Tokens, size: int) -> Tokens:
    """The windows of update `step`: each epoch is a new order of all of them."""
    chosen = batch_indices(key, step, len(part.correction), size)
    return Tokens(*(jnp.asarray(array)[chosen] for array in part))


def mirrored(key: Array, batch: Tokens) -> Tokens:
    """Flip the sign of all changes of each window with probability one half.

    So a day that follows two colder ones also teaches what follows two warmer ones. Without it a network
    trained from winter to summer forecasts that autumn gets warmer.
    """
    sign = jax.random.rademacher(key, (len(batch.correction),), batch.correction.dtype)
    return batch._replace(
        changes=batch.changes * sign[:, None, None], correction=batch.correction * sign[:, None]
    )
