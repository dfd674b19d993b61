"""Posteriors trained by sampled variational inference, without moments.

A vision Transformer on scikit-learn's digits. The weights of its encoder blocks have factorized Gaussian
beliefs, drawn anew for every update and reparameterised; the embedding of the patches, the positions and
the head are certain, so that the encoder's input is, as in the case files.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import moment_jax as mj
from experiments import data, draws
from experiments.data import Digits
from experiments.frontier.passes import classify, plain_tokens
from experiments.frontier.problem import Problem, Spec, Training, tree_of
from experiments.training import Report, Task

BATCH = 64
DRAWS = 2  # of the weights in each update, each for its own part of the batch
LEARNING_RATE = 4e-3
START_SD = 0.02  # of every weight
VECTOR_PRIOR_SD = 0.5  # of biases and gains; a kernel's is 1 / sqrt(fan_in)


class Weights(NamedTuple):
    """All trained arrays."""

    means: Any  # of the blocks' weights, stacked
    raws: Any  # their sds before softplus
    embed: Array  # (pixels, D)
    position: Array  # (T, D)
    head: tuple[Array, Array]

    def blocks(self) -> Any:
        """Beliefs about the blocks' weights."""
        return jax.tree.map(
            lambda mean, raw: mj.posterior.Factorized(mean, jax.nn.softplus(raw) ** 2),
            self.means,
            self.raws,
        )

    def embedded(self, spec: Spec, images: Array) -> Array:
        """The encoder's input, (N, T, D)."""
        return mj.nn.Patches(patch_size(spec))(images) @ self.embed + self.position


def patch_size(spec: Spec) -> int:
    """Side of the patches that cut a digit into as many tokens."""
    side = math.isqrt(spec.num_tokens)
    if side**2 != spec.num_tokens or data.IMAGE_SIZE % side:
        raise ValueError(f"digits of {data.IMAGE_SIZE} pixels have no {spec.num_tokens} patches")
    return data.IMAGE_SIZE // side


def initial(spec: Spec, seed: int) -> Weights:
    """LeCun normal means, small spreads."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float) -> Array:
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)

    blocks, features, pixels = spec.num_blocks, spec.num_features, patch_size(spec) ** 2
    means = tree_of(
        spec,
        lambda into, out: normal(blocks, into, out, scale=into**-0.5),
        lambda size: jnp.zeros((blocks, size), jnp.float32),
        lambda size: jnp.ones((blocks, size), jnp.float32),
    )
    raw = math.log(math.expm1(START_SD))
    embed = normal(pixels, features, scale=pixels**-0.5)
    position = normal(spec.num_tokens, features, scale=0.5)
    head = normal(features, data.NUM_CLASSES, scale=features**-0.5)
    return Weights(
        means,
        jax.tree.map(lambda mean: jnp.full_like(mean, raw), means),
        embed,
        position,
        (head, jnp.zeros(data.NUM_CLASSES, jnp.float32)),
    )


def divergence(spec: Spec, blocks: Any) -> Array:
    """KL of all beliefs: kernels from N(0, 1/fan_in), biases from N(0, 1/4), gains from N(1, 1/4)."""
    prior = mj.posterior.GaussianPrior
    priors = tree_of(
        spec,
        lambda into, out: prior(0.0, 1 / into),
        lambda size: prior(0.0, VECTOR_PRIOR_SD**2),
        lambda size: prior(1.0, VECTOR_PRIOR_SD**2),
    )
    terms = jax.tree.map(
        lambda belief, prior: belief.kl(prior), blocks, priors, is_leaf=draws.is_belief
    )
    return sum(jax.tree.leaves(terms), jnp.zeros(()))


def task(spec: Spec, training: Training, digits: Digits) -> Task:
    """The negative sampled ELBO for each training image."""
    dataset_size = digits.train.labels.size

    def loss(weights: Weights, key: Array, step: Array) -> tuple[Array, Report]:
        order_key, shift_key, draw_key = jax.random.split(key, 3)
        images, labels = data.mini_batch(order_key, step, digits.train, BATCH)
        images = data.shifted(jax.random.fold_in(shift_key, step), images, digits.background)
        blocks, inputs = weights.blocks(), weights.embedded(spec, images)
        parts = [part.reshape(DRAWS, -1, *part.shape[1:]) for part in (inputs, labels)]

        def fit(part: tuple[Array, Array, Array]) -> Array:
            draw, x, y = part
            key = jax.random.fold_in(jax.random.fold_in(draw_key, step), draw)
            arrays = mj.posterior.sample_params(blocks, key)
            logits = classify(plain_tokens(spec, arrays, x), weights.head)
            return -optax.softmax_cross_entropy_with_integer_labels(logits, y)

        fits = jax.lax.map(fit, (jnp.arange(DRAWS), *parts)).ravel()
        kl = divergence(spec, blocks)
        weight = mj.objectives.kl_warmup(step, training.steps // 3, training.kl_weight)
        bound = mj.objectives.elbo(fits, kl, dataset_size=dataset_size, kl_weight=weight)
        return -bound / dataset_size, {"fit": fits.mean(), "kl": kl}

    schedule = optax.warmup_cosine_decay_schedule(
        0.0, LEARNING_RATE, max(1, training.steps // 20), max(2, training.steps), 1e-4
    )
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(schedule))
    return Task(f"training {spec.name}", loss, optimizer, training.steps)


def finished(spec: Spec, weights: Weights, digits: Digits) -> Problem:
    """The trained network with the first test images."""
    images = jnp.asarray(digits.test.images[: spec.batch])
    inputs, labels = weights.embedded(spec, images), digits.test.labels[: spec.batch]
    return Problem(spec, weights.blocks(), weights.head, inputs, labels)
