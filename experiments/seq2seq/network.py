"""`Forecaster`: an encoder-decoder Transformer over the hours of a day, with random weights, trained."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.networks import BELIEF
from experiments.seq2seq.data import DAY, Tokens, mini_batch, mirrored
from experiments.training import Task, clipped_adam

WIDTH, NUM_HEADS, NUM_BLOCKS, HIDDEN_FEATURES = 32, 4, 1, 64
LEARNING_RATE = 3e-3
KL_WARM_UP = 0.25  # share of the updates in which the weight of the KL rises
VALIDATED = 3  # every third validation window selects the best parameters


class Forecaster(nnx.Module):
    """The change from yesterday of the next 24 hours, and the logarithm of its noise variance.

    The encoder reads the last 24 hours, a token each, with their changes since the day before and that
    day's since its own. The decoder has a token for each hour to come, with its place, its time of day
    and the changes at that time of day, and no mask: nothing is fed back, all hours are forecast in one
    pass. Layer normalisation inside the Transformer flattens the size of a change, so a linear layer
    carries the changes straight to the output too: the Transformer adds to a linear regression what is
    not linear, and the noise.
    """

    def __init__(self, num_calendar: int, rngs: nnx.Rngs) -> None:
        inputs = 2 + num_calendar
        self.source, self.target = (nnx.Linear(inputs, WIDTH, rngs=rngs) for _ in range(2))
        self.transformer = mj.nn.Transformer(
            WIDTH, NUM_HEADS, NUM_BLOCKS, hidden_features=HIDDEN_FEATURES, norm_first=True,
            activation="gelu", rngs=rngs,
        )  # fmt: skip
        self.head = nnx.Linear(WIDTH, 2, rngs=rngs)
        zeros = nnx.initializers.zeros
        self.linear = nnx.Linear(2 * DAY, DAY, use_bias=False, kernel_init=zeros, rngs=rngs)

    def __call__(self, changes: Array, source: Array, target: Array) -> Array:
        """(N, 24, 2), in units of the scale of `data.tokens`.

        Of changes (N, 24, 2), and what is known about the last hours and those to come, (N, 24, C).
        """
        known = self.source(jnp.concatenate([changes, source], axis=-1))
        wanted = self.target(jnp.concatenate([changes, target], axis=-1))
        output = self.head(self.transformer(known, wanted))
        straight = self.linear(changes.reshape(-1, 2 * DAY))
        return output + straight[:, :, None] * jnp.asarray([1.0, 0.0])


def bayesian_forecaster(structure: str, num_calendar: int, seed: int) -> mj.Bayesian:
    """A forecaster with all weights random, its prior scales learned."""
    network = Forecaster(num_calendar, nnx.Rngs(seed))
    options = {"structure": mj.STRUCTURES[structure], "learn_prior": True, **BELIEF}
    return mj.Bayesian(network, mj.HeteroscedasticGaussian(), **options)


def task(
    train: Tokens, validation: Tokens, *, num_steps: int, batch_size: int, kl_weight: float,
    structure: str,
) -> Task:  # fmt: skip
    """The negative analytic ELBO for each hour, by one pass of moments a step; best on validation kept.

    The windows overlap, so each hour of the data is counted up to 24 times against the one KL. Bayes'
    rule for the hours would be a KL weight of about 24; with less the posterior is colder.
    """
    size = len(train.correction)
    judged = Tokens(*(jnp.asarray(array[::VALIDATED]) for array in validation))

    def loss(network: Any, key: Array, step: Array) -> Array:
        order_key, sign_key = jax.random.split(key)
        batch = mini_batch(order_key, step, train, batch_size)
        batch = mirrored(jax.random.fold_in(sign_key, step), batch)
        weight = mj.objectives.kl_warmup(step, round(KL_WARM_UP * num_steps), kl_weight)
        options = {"dataset_size": size, "kl_weight": weight}
        return -network.elbo(tuple(batch[:3]), batch.correction, **options) / DAY

    def validate(network: Any, _: Any) -> Array:
        found = network.likelihood(network(*judged[:3]))
        mean, variance, truth = found.mean[..., 0], found.variance[..., 0], judged.correction
        # As the forecasts will be: with the one factor that fits this part.
        variance = variance * jnp.mean((truth - mean) ** 2 / variance)
        return -jnp.mean(jax.scipy.stats.norm.logpdf(truth, mean, jnp.sqrt(variance)))

    settings = {"structure": structure, "num_steps": num_steps, "batch_size": batch_size}
    return Task(
        "Bayesian Transformer", loss, clipped_adam(LEARNING_RATE, num_steps), num_steps, validate,
        settings=settings | {"kl_weight": kl_weight},
    )  # fmt: skip
