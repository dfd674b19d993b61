"""Cases that are made here: small vision Transformers trained by sampled variational inference.

On scikit-learn's digits, so that nobody needs our files, and without moments, so that no method of
moments is favoured. The weights of the encoder's blocks have factorized Gaussian beliefs, drawn anew for
every update and reparameterised; the embedding of the patches, the positions and the head are certain,
so that the encoder's input is, as in the case files.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import data, draws
from experiments.accuracy import passes
from experiments.accuracy.cases import Case, Truth
from experiments.data import Digits
from experiments.networks import negative_elbo
from experiments.training import Report, Task, clipped_adam, fit

NETWORKS = {"cold": 0.1, "full KL": 1.0}
"""The weights of the KL that the networks are trained with."""
NUM_BLOCKS, NUM_FEATURES, NUM_HEADS, PATCH_SIZE = 2, 32, 4, 2  # T 16, as digits have 8 x 8 pixels
NUM_INPUTS = 8  # sequences that the moments are compared on
STEPS, BATCH, LEARNING_RATE = 3000, 64, 4e-3
DRAWS = 2  # of the weights in each update, each for its own part of the batch
START_SD = 0.02  # of every weight
VECTOR_VARIANCE = 0.25  # of the prior of biases and gains


class Weights(NamedTuple):
    """All trained arrays."""

    means: list[mj.EncoderBlockParams]  # of the blocks' weights
    raws: list[mj.EncoderBlockParams]  # their sds before softplus
    embed: Array  # (pixels, D)
    position: Array  # (T, D)
    head: tuple[Array, Array]  # (D, C) and (C,)

    def blocks(self) -> Any:
        """Beliefs about the blocks' weights."""
        return jax.tree.map(
            lambda mean, raw: mj.posterior.Factorized(mean, jax.nn.softplus(raw) ** 2),
            self.means,
            self.raws,
        )

    def embedded(self, images: Array) -> Array:
        """The encoder's input, (N, T, D)."""
        return mj.nn.Patches(PATCH_SIZE)(images) @ self.embed + self.position


def cases(num_samples: int, seed: int) -> list[Case]:
    """Train each network, and sample the truth of the first test images."""
    digits, found = data.load(), []
    for name, kl_weight in NETWORKS.items():
        trained = task(f"training {name}", kl_weight, digits)
        weights = fit(trained, trained.start(initial(seed), jax.random.key(seed))).params
        head = mj.DenseParams(*map(mj.posterior.Point, weights.head))
        inputs = np.asarray(weights.embedded(jnp.asarray(digits.test.images[:NUM_INPUTS])))
        none = Truth(inputs, inputs)
        case = Case(name, [], weights.blocks(), NUM_HEADS, head, inputs, none, none)
        output, logits = passes.sampled(case, num_samples, jax.random.key(seed + 1))()
        found.append(case._replace(truth=Truth(*output), logits=Truth(*logits)))
    return found


def initial(seed: int) -> Weights:
    """LeCun normal means, small spreads."""
    rngs = nnx.Rngs(seed)
    made = [mj.nn.EncoderBlock(NUM_FEATURES, NUM_HEADS, rngs=rngs) for _ in range(NUM_BLOCKS)]
    means = [draws.means(block.params) for block in made]
    raw = math.log(math.expm1(START_SD))

    def normal(*shape: int, scale: float) -> Array:
        return scale * jax.random.normal(rngs.params(), shape)

    head = normal(NUM_FEATURES, data.NUM_CLASSES, scale=NUM_FEATURES**-0.5)
    return Weights(
        means,
        jax.tree.map(lambda mean: jnp.full_like(mean, raw), means),
        normal(PATCH_SIZE**2, NUM_FEATURES, scale=1 / PATCH_SIZE),
        normal((data.IMAGE_SIZE // PATCH_SIZE) ** 2, NUM_FEATURES, scale=0.5),
        (head, jnp.zeros(data.NUM_CLASSES)),
    )


def task(name: str, kl_weight: float, digits: Digits) -> Task:
    """The negative sampled ELBO for each training image."""
    size = digits.train.labels.size
    normal = mj.posterior.GaussianPrior

    def kl(belief: Any, start: Array) -> Array:
        """From N(0, 1 / fan_in) for kernels, N(start, 1/4) for biases and gains."""
        prior = (
            normal(0.0, 1 / start.shape[0]) if start.ndim == 2 else normal(start, VECTOR_VARIANCE)
        )
        return jnp.asarray(belief.kl(prior))

    starts = initial(0).means

    def loss(weights: Weights, key: Array, step: Array) -> tuple[Array, Report]:
        order_key, shift_key, draw_key = jax.random.split(key, 3)
        images, labels = data.mini_batch(order_key, step, digits.train, BATCH)
        images = data.shifted(jax.random.fold_in(shift_key, step), images, digits.background)
        blocks, inputs = weights.blocks(), weights.embedded(images)
        parts = [part.reshape(DRAWS, -1, *part.shape[1:]) for part in (inputs, labels)]

        def fits(part: tuple[Array, Array, Array]) -> Array:
            draw, x, y = part
            own = jax.random.fold_in(jax.random.fold_in(draw_key, step), draw)
            arrays = mj.posterior.sample_params(blocks, own)
            x = passes.plain_blocks(arrays, NUM_HEADS, x).mean(axis=1)
            logits = x @ weights.head[0] + weights.head[1]
            return -optax.softmax_cross_entropy_with_integer_labels(logits, y)

        each = jax.lax.map(fits, (jnp.arange(DRAWS), *parts)).ravel()
        terms = jax.tree.map(kl, blocks, starts, is_leaf=draws.is_belief)
        total = sum(jax.tree.leaves(terms), jnp.zeros(()))
        weight = mj.objectives.kl_warmup(step, STEPS // 3, kl_weight)
        return negative_elbo(each, total, size, weight)

    return Task(name, loss, clipped_adam(LEARNING_RATE, STEPS), STEPS)
