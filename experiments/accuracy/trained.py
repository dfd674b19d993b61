"""Cases that are made here: small vision Transformers trained by sampled variational inference.

On scikit-learn's digits, so that nobody needs our files, and without moments, so that no method of
moments is favoured. The weights of the encoder's blocks have factorized Gaussian beliefs, drawn anew for
every update and reparameterised; the embedding of the patches, the positions and the head are certain,
so that the encoder's input is, as in the case files.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import data
from experiments.accuracy.cases import Blocks, Case, Truth, sampled
from experiments.data import Digits
from experiments.training import Task, clipped_adam, fit

NETWORKS = {
    "cold": (0.1, "mean"),
    "full KL": (1.0, "mean"),
    "class token": (0.1, "class token"),
    "last token": (0.1, "last token"),
    "every token": (0.1, "every token"),
}
"""The weight of the KL in training, and the tokens that the head reads; the last two are causal."""
NUM_BLOCKS, NUM_FEATURES, NUM_HEADS, PATCH_SIZE = 2, 32, 4, 2  # T 16, as digits have 8 x 8 pixels
NUM_INPUTS = 8  # sequences that the moments are compared on
STEPS, BATCH, LEARNING_RATE = 3000, 64, 4e-3
DRAWS = 2  # of the weights in each update, each for its own part of the batch
START_SD = 0.02  # of every weight
VECTOR_VARIANCE = 0.25  # of the prior of biases and gains


class Classifier(nnx.Module):
    """Patches and positions, certain, and blocks with random weights below a certain head."""

    def __init__(self, seed: int, read: str) -> None:
        rngs = nnx.Rngs(seed)
        self.patches = mj.nn.Patches(PATCH_SIZE)
        self.embed = nnx.Linear(PATCH_SIZE**2, NUM_FEATURES, use_bias=False, rngs=rngs)
        self.extra = int(read == "class token")  # its embedding is its position
        size = (data.IMAGE_SIZE // PATCH_SIZE) ** 2 + self.extra, NUM_FEATURES
        self.position = nnx.Param(0.5 * jax.random.normal(rngs.params(), size))
        sizes = NUM_BLOCKS, NUM_FEATURES, NUM_HEADS, 4 * NUM_FEATURES, data.NUM_CLASSES
        network = Blocks(*sizes, read, rngs=rngs)
        beliefs = nnx.to_pure_dict(nnx.state(network, nnx.Param))
        beliefs["blocks"] = jax.tree.map(
            lambda w: mj.posterior.Factorized(w, jnp.full_like(w, START_SD**2)), beliefs["blocks"]
        )
        self.model = mj.Bayesian(network, beliefs=beliefs, verify=False)  # set beside samples

    def embedded(self, images: Array) -> Array:
        """The blocks' input, (N, T, D)."""
        patches = self.embed(self.patches(images))
        return jnp.pad(patches, ((0, 0), (self.extra, 0), (0, 0))) + self.position[...]

    def kl(self) -> Array:
        """To N(0, 1 / fan_in) for kernels, N(start, 1/4) for biases and gains."""
        normal, total = mj.posterior.GaussianPrior, jnp.zeros(())
        for path, belief in self.model.owned.items():
            prior = normal(float(path[-1] == "scale"), VECTOR_VARIANCE)
            if path[-1] == "kernel":  # attention's are of heads, with D inputs each
                own = belief.mean[...]
                prior = normal(0.0, 1 / (own.shape[0] if own.ndim == 2 else NUM_FEATURES))
            total += belief.posterior.kl(prior)
        return total


def cases(num_samples: int, seed: int) -> list[Case]:
    """Train each network, and sample the truth of the first test images."""
    digits, found = data.load(), []
    for name, (kl_weight, read) in NETWORKS.items():
        training = task(f"training {name}", kl_weight, digits)
        classifier = fit(training, Classifier(seed, read), jax.random.key(seed)).model
        inputs = np.asarray(classifier.embedded(jnp.asarray(digits.test.images[:NUM_INPUTS])))
        none = Truth(inputs, inputs)
        case = Case(name, classifier.model, inputs, none, none)
        output, logits = sampled(case, num_samples, jax.random.key(seed + 1))()
        found.append(case._replace(truth=Truth(*output), logits=Truth(*logits)))
    return found


def task(name: str, kl_weight: float, digits: Digits) -> Task:
    """The negative sampled ELBO for each training image."""
    size = digits.train.labels.size

    def loss(classifier: Classifier, key: Array, step: Array) -> Array:
        order_key, shift_key, draw_key = jax.random.split(key, 3)
        images, labels = data.mini_batch(order_key, step, digits.train, BATCH)
        images = data.shifted(jax.random.fold_in(shift_key, step), images, digits.background)
        inputs = classifier.embedded(images)
        parts = [part.reshape(DRAWS, -1, *part.shape[1:]) for part in (inputs, labels)]

        def fits(part: tuple[Array, Array, Array]) -> Array:
            draw, x, y = part
            own = jax.random.fold_in(jax.random.fold_in(draw_key, step), draw)
            logits = classifier.model.sample(own)(x, logits=True)
            labels = y.reshape(-1, *[1] * (logits.ndim - 2))
            labels = jnp.broadcast_to(labels, logits.shape[:-1])
            fit = -optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return fit.reshape(len(x), -1).mean(axis=1)

        each = jax.lax.map(fits, (jnp.arange(DRAWS), *parts)).ravel()
        weight = mj.objectives.kl_warmup(step, STEPS // 3, kl_weight)
        bound = mj.objectives.elbo(each, classifier.kl(), dataset_size=size, kl_weight=weight)
        return -bound / size

    return Task(name, loss, clipped_adam(LEARNING_RATE, STEPS), STEPS)
