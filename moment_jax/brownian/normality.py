"""The D'Agostino-Pearson test of normality, by skewness and kurtosis."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

FEWEST = 20
"""Below so many observations the test's approximations do not hold."""


class Normality(NamedTuple):
    """Skewness, excess kurtosis and p value of each column, (...,)."""

    skewness: Array
    excess_kurtosis: Array
    p_value: Array


def normality_test(sample: Array) -> Normality:
    """Test of every column of (N, ...) for a normal distribution, the N rows independent.

    K^2 is the sum of the squares of two transformed moments, each about N(0, 1) for normal rows, so the
    p value is exp(-K^2 / 2). A column that is the same in all rows is not tested: 0, 0 and 1.

    Raises:
      ValueError: if there are fewer than 20 rows.

    Source: D'Agostino (1970) for the skewness, Anscombe and Glynn (1983) for the kurtosis.
    """
    if sample.ndim < 1 or sample.shape[0] < FEWEST:
        raise ValueError(
            f"`normality_test` needs at least {FEWEST} rows. Got an array of {tuple(sample.shape)}."
        )
    n = float(sample.shape[0])
    centred = sample - jnp.mean(sample, axis=0, keepdims=True)
    variance = jnp.mean(centred**2, axis=0)
    size = jnp.max(jnp.abs(sample), axis=0)
    varies = variance > (10 * jnp.finfo(sample.dtype).eps * size) ** 2
    safe = jnp.where(varies, variance, 1)
    skewness = jnp.where(varies, jnp.mean(centred**3, axis=0) / safe**1.5, 0)
    kurtosis = jnp.where(varies, jnp.mean(centred**4, axis=0) / safe**2, 3)
    squares = _skewness_score(skewness, n) ** 2 + _kurtosis_score(kurtosis, n) ** 2
    return Normality(skewness, kurtosis - 3, jnp.where(varies, jnp.exp(-squares / 2), 1))


def _skewness_score(skewness: Array, n: float) -> Array:
    """D'Agostino's Johnson S_U transform."""
    y = skewness * ((n + 1) * (n + 3) / (6 * (n - 2))) ** 0.5
    beta = 3 * (n**2 + 27 * n - 70) * (n + 1) * (n + 3) / ((n - 2) * (n + 5) * (n + 7) * (n + 9))
    square = (2 * (beta - 1)) ** 0.5 - 1
    delta = (0.5 * jnp.log(square)) ** -0.5
    alpha = (2 / (square - 1)) ** 0.5
    return delta * jnp.arcsinh(y / alpha)


def _kurtosis_score(kurtosis: Array, n: float) -> Array:
    """Anscombe and Glynn's cube root, of the quotient by the moments of a normal sample."""
    mean = 3 * (n - 1) / (n + 1)
    variance = 24 * n * (n - 2) * (n - 3) / ((n + 1) ** 2 * (n + 3) * (n + 5))
    x = (kurtosis - mean) / variance**0.5
    third = (6 * (n**2 - 5 * n + 2) / ((n + 7) * (n + 9))) * (
        6 * (n + 3) * (n + 5) / (n * (n - 2) * (n - 3))
    ) ** 0.5
    a = 6 + 8 / third * (2 / third + (1 + 4 / third**2) ** 0.5)
    below = 1 + x * (2 / (a - 4)) ** 0.5
    root = jnp.sign(below) * jnp.cbrt((1 - 2 / a) / jnp.where(below == 0, 1, jnp.abs(below)))
    return (1 - 2 / (9 * a) - jnp.where(below == 0, 0, root)) / (2 / (9 * a)) ** 0.5
