"""Exact moments of continuous piecewise linear functions of a Gaussian: maximum, clip, leaky ReLU."""

from collections.abc import Sequence
from itertools import pairwise

import jax.numpy as jnp
from jax import Array

from moment_jax.expectations.moments import ElementwiseMoments
from moment_jax.expectations.rectified import rectified


def piecewise_linear(
    mean: Array,
    variance: Array,
    kinks: Sequence[float],
    slopes: Sequence[float],
    value: float,
) -> ElementwiseMoments:
    """Exact moments of a continuous, piecewise linear function of x ~ N(mean, variance), elementwise.

    The function is written as a line plus a sum of c_k relu(x - t_k), or of c_k relu(t_k - x), starting
    from the flatter end to limit cancellation. For s < t, E[relu(x - s) relu(x - t)] = E[relu(x - t)^2]
    + (t - s) E[relu(x - t)].

    Args:
      mean: means m, any shape.
      variance: variances v >= 0, same shape.
      kinks: points where the slope changes, ascending.
      slopes: left of the first kink, between kinks, and right of the last.
      value: the function's value at the first kink.

    >>> moments = piecewise_linear(jnp.zeros(1), jnp.ones(1), [0.0], [-1.0, 1.0], 0.0)  # |x|
    >>> print(f"{moments.mean[0]:.3f} {moments.variance[0]:.3f}")
    0.798 0.363
    """
    if abs(slopes[0]) > abs(slopes[-1]):  # mirror: f(x) = g(-x), g starts with the flatter line
        last = value + sum(
            s * (b - a) for s, (a, b) in zip(slopes[1:], pairwise(kinks), strict=False)
        )
        turned = piecewise_linear(
            -mean, variance, [-t for t in kinks[::-1]], [-s for s in slopes[::-1]], last
        )
        return turned._replace(gain=-turned.gain)
    parts = [rectified(mean - t, variance) for t in kinks]
    steps = [b - a for a, b in pairwise(slopes)]
    gain = jnp.asarray(sum(c * p.gain for c, p in zip(steps, parts, strict=True)))
    total = slopes[0] ** 2 * variance + 2 * slopes[0] * variance * gain
    for k, (c, p) in enumerate(zip(steps, parts, strict=True)):
        total = total + c**2 * p.variance
        for j in range(k):
            apart = kinks[k] - kinks[j]
            common = p.variance + p.mean * (p.mean + apart - parts[j].mean)
            total = total + 2 * c * steps[j] * common
    gain = slopes[0] + gain
    second = jnp.asarray(sum(c * p.second for c, p in zip(steps, parts, strict=True)))
    out = value + slopes[0] * (mean - kinks[0])
    out = out + sum(c * p.mean for c, p in zip(steps, parts, strict=True))
    least = gain**2 * variance + second**2
    return ElementwiseMoments(out, jnp.maximum(total, least), gain, second)
