"""Is the residual stream a Brownian motion? Statistics of its steps, and a verdict."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import stats

import moment_jax as mj

FEWEST = 20  # inputs, for the approximations of the normality test
GROUPS = 20  # of inputs, for the jackknife
LEVEL = 0.01  # of all tests of a report together; each has its share of it (Bonferroni)


class Dependence(NamedTuple):
    """A bias-corrected distance correlation and its permutation p value, scalars."""

    correlation: Array  # about 0 if independent, 1 if one is the other turned and rescaled
    p_value: Array  # at least 1 / (permutations + 1)


class VarianceGrowth(NamedTuple):
    """Growth over L blocks, per feature and averaged over tokens; errors by a jackknife over inputs."""

    variance: np.ndarray  # (L + 1,), Var[x_l - x_0] over the inputs
    brownian_variance: np.ndarray  # (L + 1,), what it would be if steps were independent
    log_ratio: float  # log of the largest variance of a block's steps over the smallest
    log_ratio_error: float
    displacement: np.ndarray  # (L,), mean squared displacement at the lags 1 ... L
    exponent: float | None  # of displacement: 1 Brownian, 2 straight, 0 confined; None if L = 1
    exponent_error: float | None


class BlockMotion(NamedTuple):
    """The steps of the tokens through one block, over N inputs and T positions.

    p values are Bonferroni's over all coordinates.
    """

    step_length: float  # mean of |step| / sqrt(D)
    drift_share: float  # of E|step|^2, by the positions' mean steps, less the chance in these
    drift_p: float  # of zero mean steps
    on_position: Dependence  # of the step on the position before it
    on_previous: Dependence | None  # on the step before; None for the first block
    not_normal: float  # share of the coordinates that are not normal at 1 %: 0.01 if all are
    normality_p: float  # of normal coordinates


class TokenMotion(NamedTuple):
    """What `motion_report` finds."""

    blocks: list[BlockMotion]
    growth: VarianceGrowth
    failures: list[str]  # what speaks against the Brownian claim, sentences

    @property
    def is_brownian(self) -> bool:
        """Whether no test rejects it; weak evidence with few inputs."""
        return not self.failures

    @property
    def sentence(self) -> str:
        """The verdict in plain words."""
        if self.failures:
            return f"The updates of the tokens are not Brownian: {'; '.join(self.failures)}."
        return "Nothing in these inputs speaks against the claim that tokens' updates are Brownian."


def motion_report(stream: Array, *, key: Array, permutations: int = 999) -> TokenMotion:
    """Test the claim that tokens do a Brownian motion through the blocks of a Transformer.

    The inputs are the independent draws: at each position of the sequence, a token's path over the
    blocks is one path for each of N inputs. A Brownian motion has normal steps of zero mean, which do
    not depend on where the token is nor on its earlier steps, and a variance that grows as the number of
    blocks. Source: The Brownian motion in the Transformer, section 3.2, whose claim it tests.

    Args:
      stream: a recorded residual stream (L + 1, N, T, D) of N >= 20 independent inputs; some hundreds
        make for sharp tests, whose cost grows as N^2.
      key: of the permutations.
      permutations: of each independence test. It can refute only if 1 / (permutations + 1) is below its
        share of the level of all tests together, which is checked.
    """
    if stream.ndim != 4 or stream.shape[0] < 2 or stream.shape[1] < FEWEST:
        raise ValueError(
            f"`motion_report` needs a stream (L + 1, N, T, D) with L >= 1 and N >= {FEWEST}. Got "
            f"{tuple(stream.shape)}."
        )
    depth = stream.shape[0] - 1
    share = LEVEL / (4 * depth)
    if 1 / (permutations + 1) > share:
        raise ValueError(
            f"`motion_report` needs permutations >= {round(1 / share)} to refute independence at its "
            f"share of the level {LEVEL} over {depth} blocks. Got {permutations}."
        )
    steps = jnp.diff(stream, axis=0)
    parts = zip(stream[:-1], steps, [None, *steps[:-1]], strict=True)
    blocks = [
        _block_motion(*part, jax.random.fold_in(key, i), permutations)
        for i, part in enumerate(parts)
    ]
    growth = variance_growth(stream)
    return TokenMotion(blocks, growth, _failures(blocks, growth, share))


def _block_motion(
    position: Array, step: Array, previous: Array | None, key: Array, permutations: int
) -> BlockMotion:
    normality_p = _normality(np.asarray(step, np.float64))
    keys = jax.random.split(key)
    test = partial(independence_test, step, permutations=permutations)
    return BlockMotion(
        **{name: float(value) for name, value in _moments(step).items()},
        on_position=test(position, keys[0]),
        on_previous=None if previous is None else test(previous, keys[1]),
        not_normal=float(np.mean(normality_p < 0.01)),
        normality_p=float(min(np.min(normality_p) * normality_p.size, 1)),
    )


def _normality(step: np.ndarray) -> np.ndarray:
    """The p value of each coordinate; 1 where nothing varies."""
    size = 10 * np.finfo(np.float32).eps * np.abs(step).max(axis=0)
    varies = step.std(axis=0) > size
    found = np.ones(varies.shape)
    if varies.any():
        found[varies] = stats.normaltest(step[:, varies]).pvalue
    return found


@jax.jit
def _moments(step: Array) -> dict[str, Array]:
    count, features = step.shape[0], step.shape[2]
    length = jnp.linalg.norm(step, axis=-1)
    mean = jnp.mean(step, axis=0)
    centred = step - mean[None]
    variance = jnp.sum(centred**2, axis=0) / (count - 1)
    drift = jnp.sum(mean**2 - variance / count)
    safe = jnp.where(variance > 0, variance, 1)
    score = jnp.where(variance > 0, jnp.abs(mean) * jnp.sqrt(count / safe), 0)
    smallest = jnp.min(jax.scipy.special.erfc(score / 2**0.5))
    squares = jnp.mean(length**2) * step.shape[1]
    return {
        "step_length": jnp.mean(length) / features**0.5,
        "drift_share": drift / jnp.where(squares > 0, squares, 1),
        "drift_p": jnp.minimum(smallest * mean.size, 1),
    }


def _failures(blocks: list[BlockMotion], growth: VarianceGrowth, share: float) -> list[str]:
    """Reasons to reject the claim, each with its worst block."""
    failures = []
    drifting = [b.drift_share for b in blocks if b.drift_p < share]
    if drifting:
        failures.append(f"steps have a drift (up to {max(drifting):.0%} of their square)")
    for name, what in (("on_position", "where the token is"), ("on_previous", "the step before")):
        tests = [getattr(block, name) for block in blocks]
        found = [float(t.correlation) for t in tests if t is not None and t.p_value < share]
        if found:
            failures.append(f"steps depend on {what} (distance correlation up to {max(found):.2f})")
    odd = [b.not_normal for b in blocks if b.normality_p < share]
    if odd:
        share_of_odd = f"up to {max(odd):.0%} of coordinates rejected at 1 %"
        failures.append(f"steps are not normal ({share_of_odd})")
    # The largest of several variances is above the smallest by chance too: a wide margin.
    if growth.log_ratio > 5 * growth.log_ratio_error:
        fold = f"the variance of a step differs {np.exp(growth.log_ratio):.1f}-fold between blocks"
        failures.append(f"{fold}, so depth is not its time")
    exponent, error = growth.exponent, growth.exponent_error
    if exponent is not None and error is not None and abs(exponent - 1) > 3 * error:
        law = f"depth^{exponent:.2f} (± {error:.3f})"
        failures.append(f"the mean squared displacement grows as {law}, not as depth")
    return failures


@partial(jax.jit, static_argnames=("permutations",))
def independence_test(x: Array, y: Array, key: Array, *, permutations: int = 199) -> Dependence:
    """Test whether the rows of x (N, T, D) and y (N, T, E) are independent; detects any dependence.

    Vector t of x is compared with vector t of y, and all T together permuted, so that what ties the
    vectors of a row to each other does no harm.

    Source: Szekely and Rizzo, Partial distance correlation with methods for dissimilarities (2014).
    """
    of_x, of_y = (jax.lax.map(_centred, jnp.swapaxes(part, 0, 1)) for part in (x, y))
    scale = jnp.sqrt(jnp.sum(of_x**2) * jnp.sum(of_y**2))

    def product(order: Array) -> Array:
        return jnp.sum(of_x * of_y[:, order][:, :, order])

    observed = product(jnp.arange(x.shape[0]))
    keys = jax.random.split(key, permutations)
    shuffled = jax.lax.map(lambda k: product(jax.random.permutation(k, x.shape[0])), keys)
    rank = 1 + jnp.sum(shuffled >= observed)
    return Dependence(observed / jnp.where(scale > 0, scale, 1), rank / (permutations + 1))


def _centred(points: Array) -> Array:
    """U-centred distances of points (N, D): rows and columns sum to zero, so does the diagonal."""
    n = points.shape[0]
    outside = ~jnp.eye(n, dtype=bool)
    distances = jnp.where(outside, jnp.sqrt(mj.brownian.squared_distances(points, points)), 0)
    row = jnp.sum(distances, axis=1) / (n - 2)
    total = jnp.sum(distances) / ((n - 1) * (n - 2))
    return jnp.where(outside, distances - row[:, None] - row[None, :] + total, 0)


def variance_growth(stream: Array) -> VarianceGrowth:
    """Growth of a residual stream (L + 1, N, T, D) with N >= FEWEST inputs."""
    paths = np.asarray(stream, np.float64)
    depth, count = len(paths) - 1, paths.shape[1]
    steps, every = np.diff(paths, axis=0), np.arange(count)
    variances = _variances(steps)
    both = [variances.argmax(), variances.argmin()]
    squares = [np.square(paths[lag:] - paths[:-lag]) for lag in range(1, depth + 1)]
    displacement = np.stack([square.mean(axis=(0, 2, 3)) for square in squares])  # (L, N)

    def log_ratio(chosen: np.ndarray) -> float:
        larger, smaller = _variances(steps[both][:, chosen])
        if larger <= 0:  # nothing moves
            return 0.0
        return float(np.log(larger / smaller)) if smaller > 0 else np.inf

    def exponent(chosen: np.ndarray) -> float:
        return _exponent(displacement[:, chosen].mean(axis=1))

    return VarianceGrowth(
        _variances(paths - paths[:1]),
        np.concatenate([[0.0], np.cumsum(variances)]),
        log_ratio(every),
        _jackknife(log_ratio, count),
        displacement.mean(axis=1),
        exponent(every) if depth > 1 else None,
        _jackknife(exponent, count) if depth > 1 else None,
    )


def _variances(values: np.ndarray) -> np.ndarray:
    """Variance over the inputs, per feature, of each (N, T, D)."""
    return values.var(axis=1, ddof=1).mean(axis=(1, 2))


def _jackknife(statistic: Callable[[np.ndarray], float], count: int) -> float:
    """The standard error of a statistic of chosen inputs."""
    every = np.arange(count)
    groups = np.array_split(every, GROUPS)
    without = [statistic(np.delete(every, group)) for group in groups]
    return float(np.sqrt((GROUPS - 1) ** 2 / GROUPS * np.var(without, ddof=1)))


def _exponent(displacement: np.ndarray) -> float:
    """Slope of the straight line through the logarithms; nan where nothing moves."""
    if np.any(displacement <= 0):
        return np.nan
    lags = np.log(np.arange(1, len(displacement) + 1))
    return float(np.polyfit(lags, np.log(displacement), 1)[0])
