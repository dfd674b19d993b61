"""A causal Transformer over characters, Bayesian and plain, and what each is trained by."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import moment_jax as mj
from experiments.training import Report, Task

Array = jax.Array

CONTEXT = 64
NUM_FEATURES = 64
NUM_HEADS = 4
NUM_BLOCKS = 2
HIDDEN_FEATURES = 128
WARM_UP = 0.05  # share of the updates in which the learning rate rises


class CharacterParams(NamedTuple):
    """Beliefs about all weights, or arrays in their place."""

    embed: Any
    positions: Any
    encoder: Any
    head: Any


def causal_mask(num_tokens: int) -> Array:
    """(T, T), True where a row may look."""
    return jnp.tril(jnp.ones((num_tokens, num_tokens), bool))


class PlainCharacterModel(nnx.Module):
    """The deterministic network of one draw of the weights, of Flax's own layers."""

    def __init__(
        self, embed: nnx.Embed, positions: Any, encoder: mj.nn.PlainEncoder, head: nnx.Linear
    ) -> None:
        self.embed = embed
        self.positions = positions
        self.encoder = encoder
        self.head = head

    def __call__(self, tokens: Array) -> Array:
        """(..., T) tokens -> (..., T, V) logits of the next ones."""
        x = self.positions(self.embed(tokens))
        return self.head(self.encoder(x, causal_mask(tokens.shape[-1])))


class CharacterModel(mj.nn.BayesianModule):
    """Embedding and learned positions, a causal pre-norm encoder, a linear head: all weights random."""

    def __init__(self, num_characters: int, *, rngs: nnx.Rngs, **settings: Any) -> None:
        self.embed = mj.nn.Embedding(num_characters, NUM_FEATURES, rngs=rngs, **settings)
        self.positions = mj.nn.LearnedPositions(CONTEXT, NUM_FEATURES, rngs=rngs, **settings)
        self.encoder = mj.nn.Encoder(
            NUM_BLOCKS,
            NUM_FEATURES,
            NUM_HEADS,
            norm_first=True,
            hidden_features=HIDDEN_FEATURES,
            activation="gelu",
            rngs=rngs,
            **settings,
        )
        self.head = mj.nn.Dense(NUM_FEATURES, num_characters, rngs=rngs, **settings)

    @property
    def params(self) -> CharacterParams:
        """Beliefs about all weights."""
        return CharacterParams(
            self.embed.params, self.positions.params, self.encoder.params, self.head.params
        )

    def network(self, params: CharacterParams) -> PlainCharacterModel:
        """The plain network with these arrays."""
        return PlainCharacterModel(
            self.embed.network(params.embed),
            self.positions.network(params.positions),
            self.encoder.network(params.encoder),
            self.head.network(params.head),
        )

    def plain(self) -> PlainCharacterModel:
        """The plain network at the means."""
        network = self.mean_network()
        assert isinstance(network, PlainCharacterModel)
        return network

    def load(self, network: PlainCharacterModel) -> None:
        """Take the weights of a trained plain network as means."""
        for mine in ("embed", "positions", "encoder", "head"):
            getattr(self, mine).load(getattr(network, mine))

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


def _schedule(peak: float, num_steps: int) -> optax.Schedule:
    rising = max(1, int(WARM_UP * num_steps))
    return optax.warmup_cosine_decay_schedule(
        0.0, peak, rising, max(num_steps, rising + 1), 0.01 * peak
    )


def plain_task(
    graph: Any,
    text: Array,
    validation: Array,
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    weight_decay: float,
) -> Task:
    """Cross-entropy with weight decay; the parameters of the best validation loss are kept."""

    def average(params: Any, inputs: Array, targets: Array) -> Array:
        logits = nnx.merge(graph, params)(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def loss(params: Any, key: Array, step: Array) -> tuple[Array, Report]:
        return average(params, *batch(key, step, text, batch_size)), {}

    def validate(params: Any) -> Array:
        return average(params, validation[:, :-1], validation[:, 1:])

    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(_schedule(learning_rate, num_steps), weight_decay=weight_decay),
    )
    return Task("plain network", loss, optimizer, num_steps, validate)


def bayesian_task(
    graph: Any,
    text: Array,
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    kl_weight: float,
    warm_up_steps: int,
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
        weight = mj.objectives.kl_warmup(step, warm_up_steps, kl_weight)
        bound = mj.objectives.elbo(fits, kl, dataset_size=text.size, kl_weight=weight)
        return -bound / text.size, {"fit": fits.mean(), "kl": kl}

    optimizer = optax.chain(
        optax.clip_by_global_norm(10.0), optax.adam(_schedule(learning_rate, num_steps))
    )
    return Task("Bayesian network", loss, optimizer, num_steps)
