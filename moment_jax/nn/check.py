"""A pass beside sampled networks, and beside the network linearised in its weights."""

import dataclasses
import math
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.covariance import Diagonal
from moment_jax.nn.inputs import arguments, check_inputs, check_key, with_batch
from moment_jax.nn.law import EXAMPLES, as_function, hold
from moment_jax.nn.prediction import run_pass
from moment_jax.nn.static import Static
from moment_jax.posterior import sample_params
from moment_jax.progress import compiling, tracked
from moment_jax.propagation import linearised
from moment_jax.propagation.propagator import is_random_input

ENTRIES = 32  # of an example's output, whose derivatives are taken
AT_ONCE = 10  # networks drawn
LITTLE = 0.1  # noise at which a network is nearly linear
MOST = 2**28  # numbers of their gradients
WRONG = 0.1  # error there that is no rounding


@dataclasses.dataclass(frozen=True)
class Check:
    """One pass beside sampled networks, averaged over all entries of the output."""

    sd_ratio: float  # sd of the pass over the sampled one, mean
    sd_error: float  # the same, mean |ratio - 1|
    mean_error: float  # |mean of the pass - sampled mean|, in sampled sds
    noise: float  # of a sampled sd, relative: `sd_error` cannot be told from it below
    linear_error: float  # mean |ratio - 1| to the linearised network, at a tenth of the noise
    nonlinearity: float  # sampled sd over that of the linearised network - 1, mean
    seconds: float  # of the pass, compiled
    seconds_sampled: float  # of all sampled networks, compiled

    @property
    def verdict(self) -> str:
        """What the figures say, in a sentence."""
        if math.isnan(self.sd_ratio + self.mean_error):
            return "NaN: the pass or a sampled network is not finite; look at inputs and weights"
        right = f"right to {max(self.sd_error, self.noise):.0%}"
        if self.linear_error > WRONG:
            off = f"{self.linear_error:.0%} off at a tenth of the noise"
            return f"{right}; {off}, so by the structure's assumptions or a wrong rule"
        if abs(self.nonlinearity) > max(0.05, self.noise):
            return f"{right}; the posterior is wide: {abs(self.nonlinearity):.0%} is nonlinearity"
        return right

    def __repr__(self) -> str:
        """Five lines, the verdict first."""
        return (
            f"Check: {self.verdict}\n"
            f"  sd: {self.sd_ratio:.3f} of the sampled; |ratio - 1| {self.sd_error:.3f}, with sampling "
            f"noise of {self.noise:.3f}\n"
            f"  mean: off by {self.mean_error:.3f} sampled sds\n"
            f"  linearised: |ratio - 1| {self.linear_error:.3f} at a tenth of the noise; nonlinearity "
            f"{self.nonlinearity:+.3f}\n"
            f"  seconds: {self.seconds:.3g} for the pass, {self.seconds_sampled:.3g} for the sampled"
        )


def checked(
    model: Any,
    x: Any,
    key: Array | None,
    samples: int,
    progress: bool | None,
    options: dict[str, Any],
) -> Check:
    """See `Bayesian.check`."""
    inputs, known = arguments(x), Static(options)
    (moments, seconds), ((mean, sd), seconds_sampled) = beside_sampled(
        model, "check", inputs, key, samples, progress, known
    )
    varies = np.asarray(sd) != 0  # NaN too, which is told
    ratio = np.asarray(moments.sd / sd)[varies]
    shift = np.asarray(jnp.abs(moments.mean - mean) / sd)[varies]
    linear = _beside_linearised(model, inputs, known, sd)
    return Check(
        float(ratio.mean()), float(np.abs(ratio - 1).mean()), float(shift.mean()),
        (2 * (samples - 1)) ** -0.5, *linear, seconds, seconds_sampled,
    )  # fmt: skip


def spread_factors(
    model: Any,
    x: Any,
    key: Array | None,
    samples: int,
    progress: bool | None,
    options: dict[str, Any],
) -> Array:
    """Factors (C,) from the sds of a pass to sampled ones; their mean where none is known."""
    inputs, known = arguments(x), Static(options)
    (moments, _), ((_, sampled), _) = beside_sampled(
        model, "corrected", inputs, key, samples, progress, known
    )
    sd, sampled = (x[..., None] if x.ndim == model.batch_axes else x for x in (moments.sd, sampled))
    varies = (sd > 0) & (sampled > 0)
    if not jnp.any(varies):
        raise ValueError("`corrected` needs an output that varies. Got variances of zero.")
    ratio = jnp.where(varies, sampled / jnp.where(varies, sd, 1), jnp.nan)
    each = jnp.nanmean(ratio, axis=tuple(range(sd.ndim - 1)))
    return jnp.where(jnp.isnan(each), jnp.nanmean(each), each)


def beside_sampled(
    model: Any, caller: str, inputs: Any, key: Array | None, samples: int, progress: bool | None,
    known: Static,
) -> Any:  # fmt: skip
    """One pass, and mean and sd of sampled networks, each with its seconds, compiled."""
    key = jax.random.key(0) if key is None else key
    if any(map(is_random_input, inputs)):
        came = "Got the moments of a random one. Give its mean"
        raise ValueError(f"`{caller}` draws networks, and needs certain inputs. {came}.")
    check_inputs(inputs, model.batch_axes, model.structure)
    check_key(caller, key)
    if samples < 2:
        raise ValueError(f"`{caller}` needs samples >= 2. Got {samples}.")
    graph, state = nnx.split(model)
    keys = jax.random.split(key, samples)[np.arange(-(-samples // AT_ONCE) * AT_ONCE) % samples]

    def timed(what: str, run: Any, *each: Any) -> tuple[list[Any], float]:
        with compiling(f"{what} of {model.name} ({model.structure.__name__})"):
            jax.block_until_ready(run(each[0]))
        start = time.perf_counter()
        found = [jax.block_until_ready(run(x)) for x in tracked(each, "draw", progress)]
        return found, time.perf_counter() - start

    def of_state(state: Any) -> Any:
        return run_pass(graph, state, inputs, known=known)

    def drawn(keys: Any) -> Any:
        return _drawn(graph, state, inputs, keys, known=known)

    ((moments, _),), seconds = timed("the pass", of_state, state)
    hold(model, graph, state, inputs, known, lambda x: of_state(x)[1], always=True)
    each, seconds_sampled = timed(
        "sampled networks", drawn, *keys.reshape(-1, AT_ONCE, *keys.shape[1:])
    )
    outputs = jnp.concatenate(each)[:samples]
    return (moments, seconds), (
        (outputs.mean(axis=0), outputs.std(axis=0, ddof=1)),
        seconds_sampled,
    )


def _beside_linearised(model: Any, inputs: Any, known: Static, sd: Array) -> tuple[float, float]:
    """`linear_error` and `nonlinearity`; NaN where the network has no derivative, or was corrected."""
    axes = model.batch_axes
    if model.linearised or model.spread.get_value() is not None:
        return 0.0 if model.linearised else math.nan, math.nan
    size, weights = math.prod(sd.shape[axes:]), sum(x.mean[...].size for x in model.owned.values())
    count = max(1, min(ENTRIES, size, MOST // weights))
    entries = tuple(np.linspace(0, size - 1, count).astype(int).tolist())
    given = jax.tree.map(lambda x: x[:EXAMPLES] if axes else x, inputs)
    try:
        linear = _linearised(*nnx.split(model), given, entries=entries, known=known)
    except ValueError:  # its derivatives are not those of its values, or there are none
        return math.nan, math.nan
    little = run_pass(*nnx.split(model.scaled(LITTLE)), inputs, known=known)[0].sd / LITTLE
    little, sampled = (
        np.asarray(x).reshape(-1, size)[: len(linear), list(entries)] for x in (little, sd)
    )
    varies = np.asarray(linear) > 0
    ratios = [(x[varies] / linear[varies]) for x in (little, sampled)]
    return float(np.abs(ratios[0] - 1).mean()), float(ratios[1].mean() - 1)


@partial(jax.jit, static_argnums=0, static_argnames=("known", "entries"))
def _linearised(
    graph: Any, state: Any, inputs: Any, *, entries: tuple[int, ...], known: Static
) -> Array:
    """Sds of these entries of each example's output, of the network linearised in its weights."""
    model: Any = nnx.merge(graph, state)
    fn, axes, places = as_function(model, known.value), model.batch_axes, jnp.asarray(entries)

    def of_example(inputs: Any) -> Array:
        given = tuple(with_batch(x, axes) for x in inputs)
        run = linearised(lambda values, *x: fn(values, *x).ravel()[places], structure=Diagonal)
        sd: Array = run(model.beliefs, *given)[1].sd()[0]
        return sd

    return jax.lax.map(of_example, jax.tree.map(lambda x: x.reshape(-1, *x.shape[axes:]), inputs))


@partial(jax.jit, static_argnums=0, static_argnames="known")
def _drawn(graph: Any, state: Any, inputs: Any, keys: Array, *, known: Static) -> Array:
    """The sampled networks' outputs."""
    model: Any = nnx.merge(graph, state)
    fn = as_function(model, known.value)

    def of_network(key: Array) -> Array:
        return jnp.asarray(fn(sample_params(model.beliefs, key), *inputs))

    return jax.vmap(of_network)(keys)
