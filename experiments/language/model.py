"""A causal Transformer over characters, Bayesian and plain, and their objectives."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.networks import PlainTextTransformer, TextTransformer
from experiments.schedules import clipped_adam
from experiments.training import Report, Task

CONTEXT = 64
NUM_BLOCKS = 2
RATE, PLAIN_RATE, WEIGHT_DECAY = 2e-3, 3e-3, 1e-2
WARM_UP = 50  # updates in which the KL's weight rises


def causal_mask(num_tokens: int) -> Array:
    """(T, T), True where a row may look."""
    return jnp.tril(jnp.ones((num_tokens, num_tokens), bool))


class PlainCharacterModel(PlainTextTransformer):
    """The deterministic network of one draw of the weights, of Flax's own layers."""

    def __call__(self, tokens: Array) -> Array:
        """(..., T) tokens -> (..., T, V) logits of the next ones."""
        x = self.positions(self.embed(tokens))
        return self.head(self.encoder(x, causal_mask(tokens.shape[-1])))


class CharacterModel(TextTransformer):
    """A causal Transformer over characters: all weights random."""

    plain_type = PlainCharacterModel

    def __call__(self, tokens: Array) -> tuple[Array, Array]:
        """(N, T) tokens -> means and variances (N, T, V) of the logits of the next ones."""
        mean, cov = self.positions(*self.embed(tokens))
        mean, cov = self.encoder(mean, cov, causal_mask(tokens.shape[-1]))
        mean, cov = self.head(mean, cov)
        return mean, jax.vmap(lambda one: one.variance())(cov)


def bayesian_network(num_characters: int, structure: str, seed: int) -> CharacterModel:
    """The Bayesian network, its prior scales learned."""
    return CharacterModel(
        num_characters,
        CONTEXT,
        num_characters,
        NUM_BLOCKS,
        rngs=nnx.Rngs(seed),
        structure=mj.STRUCTURES[structure],
        relative_scale=0.05,
        prior_scale=0.3,
        learn_prior=True,
    )


def batch(key: Array, step: Array, text: Array, size: int) -> tuple[Array, Array]:
    """Inputs and targets (size, CONTEXT) of an update: windows from random places of the text."""
    starts = jax.random.randint(
        jax.random.fold_in(key, step), (size, 1), 0, text.size - CONTEXT, dtype=jnp.int32
    )
    cut = jnp.asarray(text)[starts + jnp.arange(CONTEXT + 1)[None, :]]
    return cut[:, :-1], cut[:, 1:]


def plain_task(
    graph: Any, text: Array, validation: Array, *, num_steps: int, batch_size: int
) -> Task:
    """Cross-entropy with weight decay; the parameters of the best validation loss are kept."""

    def average(params: Any, inputs: Array, targets: Array) -> Array:
        logits = nnx.merge(graph, params)(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def loss(params: Any, key: Array, step: Array) -> tuple[Array, Report]:
        return average(params, *batch(key, step, text, batch_size)), {}

    def validate(params: Any) -> Array:
        return average(params, validation[:, :-1], validation[:, 1:])

    optimizer = clipped_adam(PLAIN_RATE, num_steps, norm=1.0, weight_decay=WEIGHT_DECAY)
    return Task("plain network", loss, optimizer, num_steps, validate)


def bayesian_task(
    graph: Any, text: Array, *, num_steps: int, batch_size: int, kl_weight: float
) -> Task:
    """The negative ELBO for each character, by one pass of moments a step.

    With a hundred characters, points would cost more than the network: the data term is the closed lower
    bound on the expected log-likelihood, so the whole is a bound on the evidence still.
    """
    fit_of = jax.vmap(mj.objectives.expected_log_likelihood_bound)

    def loss(params: Any, key: Array, step: Array) -> tuple[Array, Report]:
        inputs, targets = batch(key, step, text, batch_size)
        network = nnx.merge(graph, params)
        mean, variance = network(inputs)
        size = mean.shape[-1]
        fits = fit_of(targets.reshape(-1), mean.reshape(-1, size), variance.reshape(-1, size))
        kl = network.kl()
        weight = mj.objectives.kl_warmup(step, WARM_UP, kl_weight)
        bound = mj.objectives.elbo(fits, kl, dataset_size=text.size, kl_weight=weight)
        return -bound / text.size, {"fit": fits.mean(), "kl": kl}

    return Task("Bayesian network", loss, clipped_adam(RATE, num_steps), num_steps)
