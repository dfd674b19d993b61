"""`Forecaster`: an encoder-decoder Bayesian Transformer over the hours of a day, and its plain form."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.networks import BELIEF
from experiments.seq2seq.data import DAY

WIDTH, NUM_HEADS, NUM_BLOCKS, HIDDEN_FEATURES = 32, 4, 1, 64


class PlainForecaster(nnx.Module):
    """One draw of a `Forecaster`, of Flax's own layers."""

    def __init__(
        self, source: Any, target: Any, transformer: Any, head: nnx.Linear, linear: nnx.Linear
    ) -> None:
        self.source, self.target, self.transformer = source, target, transformer
        self.head, self.linear = head, linear

    def __call__(self, changes: Array, source: Array, target: Array) -> Array:
        """The change since yesterday and the logarithm of its noise variance, (N, 24, 2)."""
        known = self.source(jnp.concatenate([changes, source], axis=-1))
        wanted = self.target(jnp.concatenate([changes, target], axis=-1))
        output = self.head(self.transformer(known, wanted))
        straight = self.linear(changes.reshape(-1, 2 * DAY))
        return output.at[..., 0].add(straight)


class Forecaster(mj.nn.Composite):
    """The change from yesterday of the next 24 hours, with its uncertainty.

    The encoder reads the last 24 hours, a token each, with their changes since the day before and that
    day's since its own. The decoder has a token for each hour to come, with its place, its time of day
    and the changes at that time of day, and no mask: nothing is fed back, all hours are forecast in one
    pass. Each target token has two outputs, the change and the logarithm of its noise variance. Layer
    normalisation inside the Transformer flattens the size of a change, so a dense layer carries the
    changes straight to the output too: the Transformer adds to a Bayesian linear regression what is not
    linear, and the noise.

    All weights are random. The straight path and the Transformer have independent weights, so their
    moments add.
    """

    parts = ("source", "target", "transformer", "head", "linear")
    plain_type = PlainForecaster

    def __init__(self, structure: str, num_calendar: int, rngs: nnx.Rngs) -> None:
        own = {"structure": mj.STRUCTURES[structure], "learn_prior": True, "rngs": rngs, **BELIEF}
        self.source, self.target = (mj.nn.Dense(2 + num_calendar, WIDTH, **own) for _ in range(2))
        blocks = {"hidden_features": HIDDEN_FEATURES, "norm_first": True, "activation": "gelu"}
        self.transformer = mj.nn.Transformer(WIDTH, NUM_HEADS, NUM_BLOCKS, **own | blocks)
        self.head = mj.nn.Dense(WIDTH, 2, **own)
        self.linear = mj.nn.Dense(2 * DAY, DAY, use_bias=False, **own)
        self.linear.kernel.mean.set_value(jnp.zeros_like(self.linear.kernel.mean[...]))

    def __call__(self, changes: Array, source: Array, target: Array) -> tuple[Array, Array]:
        """Moments of change and log noise variance, in units of the scale of `data.tokens`.

        Of changes (N, 24, 2), and what is known about the last hours and those to come, (N, 24, C): the
        mean (N, 24, 2), and each hour's own covariance (N, 24, 2, 2).
        """
        known, known_cov = self.source(jnp.concatenate([changes, source], axis=-1))
        wanted, wanted_cov = self.target(jnp.concatenate([changes, target], axis=-1))
        mean, cov = self.head(*self.transformer(known, wanted, known_cov, wanted_cov))
        straight, straight_cov = self.linear(changes.reshape(-1, 1, 2 * DAY))
        variance = jax.vmap(lambda each: each.variance())(straight_cov)
        blocks = jax.vmap(lambda each: each.token_blocks())(cov)
        mean = mean.at[..., 0].add(straight[:, 0])
        return mean, blocks.at[..., 0, 0].add(variance[:, 0])
