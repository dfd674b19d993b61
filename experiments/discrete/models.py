"""Binary digits, the autoencoders of them that are compared, and how each is trained."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from sklearn.model_selection import train_test_split

import moment_jax as mj
from experiments import data
from experiments.networks import BELIEF
from experiments.training import Task, clipped_adam

PATCH_SIZE, NUM_CODES, NUM_FEATURES, HIDDEN_FEATURES, NUM_BLOCKS, NUM_HEADS = 4, 32, 24, 40, 2, 4
LEARNING_RATE = 3e-3  # of the Bayesian network
KL_WARM_UP = 0.4  # share of the updates in which the weight of the codes' KL rises to 1
VALIDATION_DRAWS = 4


class Training(NamedTuple):
    """How a plain autoencoder is trained; codes are relaxed, from one temperature to another."""

    learning_rate: float
    weight_decay: float
    temperature: float
    floor: float


TRANSFORMER = Training(1e-2, 5e-2, 0.7, 0.4)


class Binary(NamedTuple):
    """Images (N, 8, 8) of zeros and ones."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def load() -> Binary:
    """Scikit-learn's digits: 1,147 to train, 150 to choose by, 500 to test, whatever the seed."""
    images = (data.pixels() >= 0.5).astype(np.float32)
    rest, test = train_test_split(images, test_size=data.NUM_TEST, random_state=data.SPLIT_SEED)
    train, validation = train_test_split(
        rest, test_size=data.NUM_VALIDATION, random_state=data.SPLIT_SEED
    )
    return Binary(train, validation, test)


def autoencoder(seed: int) -> mj.nn.DiscreteAutoencoder:
    """The plain Transformer autoencoder."""
    return mj.nn.DiscreteAutoencoder.transformers(
        image_size=data.IMAGE_SIZE, patch_size=PATCH_SIZE, num_codes=NUM_CODES,
        num_features=NUM_FEATURES, num_heads=NUM_HEADS, num_encoder_blocks=NUM_BLOCKS,
        num_decoder_blocks=NUM_BLOCKS, hidden_features=HIDDEN_FEATURES, rngs=nnx.Rngs(seed),
    )  # fmt: skip


def bayesian_autoencoder(
    plain: mj.nn.DiscreteAutoencoder, structure: str
) -> mj.nn.DiscreteAutoencoder:
    """The same with all weights random, its prior scales learned."""
    return plain.bayesian(structure=mj.STRUCTURES[structure], learn_prior=True, **BELIEF)


def _batch(images: np.ndarray, size: int, key: Array, step: Array) -> tuple[Array, Array]:
    """The images of an update, and its key for draws of codes."""
    order_key, draw_key = jax.random.split(key)
    chosen = data.batch_indices(order_key, step, len(images), size)
    return jnp.asarray(images)[chosen], jax.random.fold_in(draw_key, step)


def _validation(images: np.ndarray, **options: Any) -> Callable[[Any, Any], Array]:
    """A network's negative ELBO, by a few draws of hard codes, always the same.

    `options` are further arguments of its `negative_elbo`.
    """
    repeated = jnp.tile(jnp.asarray(images), (VALIDATION_DRAWS, 1, 1))

    def score(network: Any, _: Any) -> Array:
        key = jax.random.key(0)
        bound = network.negative_elbo(repeated, key, 1.0, straight_through=True, **options)
        return jnp.mean(bound.reconstruction + bound.code_kl)

    return score


def plain_task(
    name: str, images: Binary, training: Training, num_steps: int, batch_size: int
) -> Task:
    """The negative ELBO with relaxed codes, stopped where the validation's with hard codes is best."""
    rate, decay, start, floor = training
    temperature = mj.discrete.exponential_annealing(start, floor, max(1, int(0.7 * num_steps)))

    def loss(network: Any, key: Array, step: Array) -> Array:
        batch, draw_key = _batch(images.train, batch_size, key, step)
        bound = network.negative_elbo(batch, draw_key, temperature(step))
        weight = mj.objectives.kl_warmup(step, int(KL_WARM_UP * num_steps))
        return bound.reconstruction.mean() + weight * bound.code_kl.mean()

    optimizer = clipped_adam(rate, num_steps, norm=10.0, weight_decay=decay)
    return Task(name, loss, optimizer, num_steps, _validation(images.validation))


def bayesian_task(
    name: str, images: Binary, num_steps: int, batch_size: int, kl_weight: float
) -> Task:
    """The analytic negative ELBO for each training image, stopped where the validation's is best.

    Codes are hard; their gradient is that of relaxed ones.
    """
    size = len(images.train)

    def loss(network: Any, key: Array, step: Array) -> Array:
        batch, draw_key = _batch(images.train, batch_size, key, step)
        weights = {"dataset_size": size, "kl_weight": kl_weight}
        bound = network.negative_elbo(
            batch, draw_key, TRANSFORMER.floor, straight_through=True, **weights
        )
        return bound.total.mean()

    optimizer = clipped_adam(LEARNING_RATE, num_steps, norm=100.0)
    validate = _validation(images.validation, dataset_size=size)
    return Task(name, loss, optimizer, num_steps, validate)
