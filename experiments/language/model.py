"""A causal Transformer over characters, Bayesian and plain, and their objectives."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.networks import BELIEF, PlainTextTransformer, TextTransformer, negative_elbo
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
    sizes = num_characters, CONTEXT, num_characters, NUM_BLOCKS
    own = {"structure": mj.STRUCTURES[structure], "learn_prior": True, **BELIEF}
    return CharacterModel(*sizes, rngs=nnx.Rngs(seed), **own)


def batch(key: Array, step: Array, text: Array, size: int) -> tuple[Array, Array]:
    """Inputs and targets (size, CONTEXT) of an update: windows from random places of the text."""
    starts = jax.random.randint(
        jax.random.fold_in(key, step), (size, 1), 0, text.size - CONTEXT, dtype=jnp.int32
    )
    cut = jnp.asarray(text)[starts + jnp.arange(CONTEXT + 1)[None, :]]
    return cut[:, :-1], cut[:, 1:]


def plain_task(text: Array, validation: Array, *, num_steps: int, batch_size: int) -> Task:
    """Cross-entropy with weight decay; the parameters of the best validation loss are kept."""

    def average(network: Any, inputs: Array, targets: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(network(inputs), targets).mean()

    def loss(network: Any, key: Array, step: Array) -> tuple[Array, Report]:
        return average(network, *batch(key, step, text, batch_size)), {}

    def validate(network: Any) -> Array:
        return average(network, validation[:, :-1], validation[:, 1:])

    optimizer = clipped_adam(PLAIN_RATE, num_steps, norm=1.0, weight_decay=WEIGHT_DECAY)
    return Task("plain network", loss, optimizer, num_steps, validate)


def bayesian_task(text: Array, *, num_steps: int, batch_size: int, kl_weight: float) -> Task:
    """The negative ELBO for each character, by one pass of moments a step.

    With a hundred characters, points would cost more than the network: the data term is the closed lower
    bound on the expected log-likelihood, so the whole is a bound on the evidence still.
    """
    fit_of = jax.vmap(jax.vmap(mj.objectives.expected_log_likelihood_bound))

    def loss(network: Any, key: Array, step: Array) -> tuple[Array, Report]:
        inputs, targets = batch(key, step, text, batch_size)
        fits = fit_of(targets, *network(inputs)).ravel()
        weight = mj.objectives.kl_warmup(step, WARM_UP, kl_weight)
        return negative_elbo(fits, network.kl(), text.size, weight)

    return Task("Bayesian network", loss, clipped_adam(RATE, num_steps), num_steps)
