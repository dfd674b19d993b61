"""A pass beside sampled networks, and beside the network linearised in its weights."""

import dataclasses
import math
import time
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.covariance import Diagonal, Moments
from moment_jax.covariance.fields import need
from moment_jax.nn import likelihood as likelihoods
from moment_jax.nn.inputs import arguments, check_certain, check_inputs, check_key, with_batch
from moment_jax.nn.law import EXAMPLES, as_function, hold
from moment_jax.nn.prediction import run_pass
from moment_jax.nn.static import Static
from moment_jax.posterior import sample_params
from moment_jax.progress import bar, compiling
from moment_jax.propagation import linearised

ENTRIES = 32  # of an example's output, whose derivatives are taken
AT_ONCE = 10  # networks drawn, of which the bar tells
LITTLE = 0.1  # noise at which a network is nearly linear
MOST = 2**28  # numbers of their gradients
WRONG = 0.1  # error there that is no rounding
TOGETHER = 1024  # examples in several sampled networks at once, to bound memory
MATTERS, RELATIVE = 0.02, 0.1  # error of an expected log likelihood: in nats, and of its size


class Claim(NamedTuple):
    """Expected log likelihood of targets, in nats an example: by a pass, and by sampled networks."""

    claimed: float
    drawn: float
    error: float  # standard error of `drawn`

    @property
    def holds(self) -> bool:
        """Whether the two differ by no more than the noise of sampling, or than matters."""
        least = max(3 * self.error, MATTERS, RELATIVE * abs(self.drawn))
        return not abs(self.claimed - self.drawn) > least

    @classmethod
    def of(cls, model: Any, y: Any, moments: Moments, fits: Array) -> Self:
        """Of a pass's moments, and of the fits (S, B) of sampled networks."""
        claimed = likelihoods.expected("check", model.likelihood, y, moments)
        each = fits.mean(axis=1)
        return cls(*map(float, (claimed.mean(), each.mean(), each.std(ddof=1) / len(each) ** 0.5)))

    def __str__(self) -> str:
        return f"{self.claimed:.3g} claimed, {self.drawn:.3g} ± {self.error:.1g} drawn, nats an example"


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
    claim: Claim | None = None  # of targets, if they are given

    @property
    def verdict(self) -> str:
        """What the figures say, in a sentence."""
        if math.isnan(self.sd_ratio + self.mean_error):
            return "NaN: the pass or a sampled network is not finite; look at inputs and weights"
        right = f"right to {max(self.sd_error, self.noise):.0%}"
        if self.claim is not None and not self.claim.holds:
            return f"{right}, but its expected log likelihood is not that of sampled networks"
        if self.linear_error > WRONG:
            off = f"{self.linear_error:.0%} off at a tenth of the noise"
            return f"{right}; {off}, so by the structure's assumptions or a wrong rule"
        if abs(self.nonlinearity) > max(0.05, self.noise):
            return f"{right}; the posterior is wide: {abs(self.nonlinearity):.0%} is nonlinearity"
        return right

    def __repr__(self) -> str:
        claim = "" if self.claim is None else f"\n  expected log likelihood: {self.claim}"
        return (
            f"Check: {self.verdict}\n"
            f"  sd: {self.sd_ratio:.3f} of the sampled; |ratio - 1| {self.sd_error:.3f}, with sampling "
            f"noise of {self.noise:.3f}\n"
            f"  mean: off by {self.mean_error:.3f} sampled sds\n"
            f"  linearised: |ratio - 1| {self.linear_error:.3f} at a tenth of the noise; nonlinearity "
            f"{self.nonlinearity:+.3f}\n"
            f"  seconds: {self.seconds:.3g} for the pass, {self.seconds_sampled:.3g} for the sampled"
            f"{claim}"
        )


def checked(
    model: Any, x: Any, key: Array | None, samples: int, y: Any, progress: bool | None,
    options: dict[str, Any],
) -> Check:  # fmt: skip
    """See `Bayesian.check`."""
    inputs, known = arguments(x), Static(options)
    found = beside_sampled(model, "check", inputs, key, samples, progress, known, y)
    (moments, seconds), ((mean, sd, fits), seconds_sampled) = found
    claim = None if y is None else Claim.of(model, y, moments, fits)
    varies = np.asarray(sd) != 0  # NaN too, which is told
    ratio = np.asarray(moments.sd / sd)[varies]
    shift = np.asarray(jnp.abs(moments.mean - mean) / sd)[varies]
    linear = _beside_linearised(model, inputs, known, sd)
    return Check(
        float(ratio.mean()), float(np.abs(ratio - 1).mean()), float(shift.mean()),
        (2 * (samples - 1)) ** -0.5, *linear, seconds, seconds_sampled, claim,
    )  # fmt: skip


def beside_sampled(
    model: Any, caller: str, inputs: Any, key: Array | None, samples: int, progress: bool | None,
    known: Static, y: Any = None,
) -> Any:  # fmt: skip
    """One pass; mean, sd and fits (S, B) to targets of sampled networks; each with its seconds."""
    key = jax.random.key(0) if key is None else key
    check_certain(caller, inputs, "It draws networks: give the mean.")
    check_inputs(inputs, model.structure)
    check_key(caller, key)
    need(caller, samples >= 2, "samples >= 2", samples)
    graph, state = nnx.split(model)
    keys = jax.random.split(key, samples)[np.arange(-(-samples // AT_ONCE) * AT_ONCE) % samples]

    def timed(what: str, run: Any, *each: Any) -> tuple[list[Any], float]:
        with compiling(f"{what} of {model.name} ({model.structure.__name__})"):
            jax.block_until_ready(run(each[0]))
        start = time.perf_counter()
        found = [jax.block_until_ready(run(x)) for x in bar(progress, "draw", each)]
        return found, time.perf_counter() - start

    def of_state(state: Any) -> Any:
        return run_pass(graph, state, inputs, known=known)

    ((moments, _),), seconds = timed("the pass", of_state, state)
    hold(model, graph, state, inputs, known, lambda x: of_state(x)[1], always=True)
    groups = keys.reshape(-1, AT_ONCE, *keys.shape[1:])
    of_keys = partial(drawn, graph, state, inputs, y, known=known)
    each, seconds_sampled = timed("sampled networks", of_keys, *groups)
    outputs, fits = jax.tree.map(lambda *x: jnp.concatenate(x)[:samples], *each)
    found = outputs.mean(axis=0), outputs.std(axis=0, ddof=1), fits
    return (moments, seconds), (found, seconds_sampled)


def _beside_linearised(model: Any, inputs: Any, known: Static, sd: Array) -> tuple[float, float]:
    """`linear_error` and `nonlinearity`; NaN where the network has no derivative, or was corrected."""
    if model.linearised or model.spread.get_value() is not None:
        return 0.0 if model.linearised else math.nan, math.nan
    size, weights = math.prod(sd.shape[1:]), sum(x.mean[...].size for x in model.owned.values())
    count = max(1, min(ENTRIES, size, MOST // weights))
    entries = tuple(np.linspace(0, size - 1, count).astype(int).tolist())
    given = jax.tree.map(lambda x: x[:EXAMPLES], inputs)
    try:
        linear = _linearised(*nnx.split(model), given, entries=entries, known=known)
    except ValueError:  # its derivatives are not those of its values, or there are none
        return math.nan, math.nan
    little = run_pass(*nnx.split(model.scaled(LITTLE)), inputs, known=known)[0].sd / LITTLE
    each = (np.asarray(x).reshape(-1, size)[: len(linear), list(entries)] for x in (little, sd))
    varies = np.asarray(linear) > 0
    ratios = [x[varies] / linear[varies] for x in each]
    return float(np.abs(ratios[0] - 1).mean()), float(ratios[1].mean() - 1)


@partial(jax.jit, static_argnums=0, static_argnames=("known", "entries"))
def _linearised(graph: Any, state: Any, inputs: Any, *, entries: Any, known: Static) -> Array:
    """Sds of these entries of each example's output, of the network linearised in its weights."""
    model: Any = nnx.merge(graph, state)
    fn, places = as_function(model, known.value), jnp.asarray(entries)

    def of_example(inputs: Any) -> Array:
        given = tuple(with_batch(x) for x in inputs)
        run = linearised(lambda values, *x: fn(values, *x).ravel()[places], structure=Diagonal)
        sd: Array = run(model.beliefs, *given)[1].sd()[0]
        return sd

    return jax.lax.map(of_example, inputs)


def of_draw(model: Any, inputs: Any, y: Any, key: Array, options: dict[str, Any]) -> Any:
    """A sampled network's output, and its log likelihoods (B,) of targets if there are any."""
    output = as_function(model, options)(sample_params(model.beliefs, key), *inputs)
    if y is None:
        return output, None
    certain = Moments(output, Diagonal(jnp.zeros_like(output)))
    return output, likelihoods.expected("check", model.likelihood, y, certain)


@partial(jax.jit, static_argnums=0, static_argnames="known")
def drawn(graph: Any, state: Any, inputs: Any, y: Any, keys: Array, *, known: Static) -> Any:
    """Sampled networks' outputs, one for each key, and their fits (S, B) to targets, in nats."""
    model: Any = nnx.merge(graph, state)
    together = min(len(keys), max(1, TOGETHER // len(inputs[0])))
    draw = partial(of_draw, model, inputs, y, options=known.value)
    return jax.lax.map(draw, keys, batch_size=together)
