"""Train an autoencoder of binary digits with categorical codes, its Transformers' weights random.

Compares its negative ELBO on test images, with hard codes, with that of the plain Transformer that it
starts from. Writes metrics.json, and prints one table.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from scipy import stats
from sklearn.model_selection import train_test_split

import moment_jax as mj
from experiments import data
from experiments.autoencoder import DiscreteAutoencoder
from experiments.checkpoints import run_folder
from experiments.command_line import Parser
from experiments.networks import BELIEF
from experiments.outputs import aligned, write_json
from experiments.training import Task, clipped_adam, fit_saved

PATCH_SIZE, NUM_CODES, NUM_FEATURES, HIDDEN_FEATURES, NUM_BLOCKS, NUM_HEADS = 4, 32, 24, 40, 2, 4
PLAIN = {"learning_rate": 1e-2, "weight_decay": 5e-2, "temperature": 0.7, "floor": 0.4}
"""How the plain network is trained; its codes are relaxed, from `temperature` down to `floor`."""
LEARNING_RATE = 3e-3  # of the Bayesian network
KL_WARM_UP = 0.4  # share of the plain updates in which the weight of the codes' KL rises to 1
VALIDATION_DRAWS = 4
BAYESIAN, TRANSFORMER = "Bayesian Transformer", "plain Transformer"


def add_arguments(parser: Parser) -> None:
    """The options of the experiment."""
    parser.training("runs/discrete", steps=400, batch_size=64, kl_weight=0.02)
    parser.whole("--plain-steps", 4500, "updates of the plain Transformer before")
    parser.whole("--draws", 20, "draws of the codes of every test image")


def run(args: argparse.Namespace) -> None:
    """Train both networks, score them, write the results."""
    start = time.perf_counter()
    out, images = run_folder(args), load()
    size = min(args.batch_size, len(images.train))
    task = plain_task(images, args.plain_steps, size)
    plain = fit_saved(task, autoencoder(args.seed), args, "plain_Transformer", args.seed)
    settings = {name: getattr(args, name) for name in ("kl_weight", "structure", "plain_steps")}
    task = bayesian_task(images, args.steps, size, **settings)
    network = bayesian_autoencoder(plain.model, args.structure)
    bayesian = fit_saved(task, network, args, "Bayesian_Transformer", args.seed)
    fitted, key = {TRANSFORMER: plain, BAYESIAN: bayesian}, jax.random.key(args.seed + 3)
    found = {name: score(own.model, images.test, key, args.draws) for name, own in fitted.items()}
    gap = found[TRANSFORMER].total - found[BAYESIAN].total  # nats by which it is better
    metrics: dict[str, Any] = {
        "settings": vars(args),
        "images": {name: len(part) for name, part in images._asdict().items()},
        "test": {name: one.summary() for name, one in found.items()},
        "weight_kl_per_training_image": float(bayesian.model.kl()) / len(images.train),
        "gap_to_plain": {"nats": float(gap.mean()), "standard_error": float(stats.sem(gap))},
        "validation": {name: own.score for name, own in fitted.items()},
        "seconds": {
            TRANSFORMER: plain.seconds,
            BAYESIAN: plain.seconds + bayesian.seconds,  # with the plain one's, where it starts
            "total": time.perf_counter() - start,
        },
    }
    write_json(out / "metrics.json", metrics)
    _print(out, metrics)


def _print(out: Path, metrics: dict[str, Any]) -> None:
    rows = [["", "-ELBO (nats)", "reconstruction", "KL of codes", "codes", "perplexity"]]
    for name, row in metrics["test"].items():
        total = f"{row['negative_elbo']:.2f} ± {row['standard_error']:.2f}"
        numbers = [f"{row[key]:.2f}" for key in ("reconstruction", "code_kl")]
        codes = f"{row['codes_per_image']} of {row['num_codes']}"
        rows.append([name, total, *numbers, codes, f"{row['perplexity']:.1f}"])
    gap = metrics["gap_to_plain"]
    print(aligned(rows))
    print(f"better than the plain one by {gap['nats']:.2f} ± {gap['standard_error']:.2f} nats an image; "
          f"KL of the weights, not in the table: {metrics['weight_kl_per_training_image']:.2f} nats for "
          f"each training image; {metrics['seconds']['total']:.0f} s in all; in {out}")  # fmt: skip


class Binary(NamedTuple):
    """Images (N, 8, 8) of zeros and ones."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def load() -> Binary:
    """Scikit-learn's digits: 1,147 to train, 150 to choose by, 500 to test, whatever the seed."""
    images = (data.pixels() >= 0.5).astype(np.float32)
    seed = {"random_state": data.SPLIT_SEED}
    rest, test = train_test_split(images, test_size=data.NUM_TEST, **seed)
    train, validation = train_test_split(rest, test_size=data.NUM_VALIDATION, **seed)
    return Binary(train, validation, test)


def autoencoder(seed: int) -> DiscreteAutoencoder:
    """The plain Transformer autoencoder."""
    return DiscreteAutoencoder.transformers(
        image_size=data.IMAGE_SIZE, patch_size=PATCH_SIZE, num_codes=NUM_CODES,
        num_features=NUM_FEATURES, num_heads=NUM_HEADS, num_blocks=NUM_BLOCKS,
        hidden_features=HIDDEN_FEATURES, rngs=nnx.Rngs(seed),
    )  # fmt: skip


def bayesian_autoencoder(plain: DiscreteAutoencoder, structure: str) -> DiscreteAutoencoder:
    """The same with all weights random, its prior scales learned."""
    return plain.bayesian(structure=mj.STRUCTURES[structure], learn_prior=True, **BELIEF)


def _batch(images: np.ndarray, size: int, key: Array, step: Array) -> tuple[Array, Array]:
    """The images of an update, and its key for draws of codes."""
    order_key, draw_key = jax.random.split(key)
    chosen = data.batch_indices(order_key, step, len(images), size)
    return jnp.asarray(images)[chosen], jax.random.fold_in(draw_key, step)


def _validation(images: np.ndarray) -> Callable[[Any, Any], Array]:
    """A network's negative ELBO given its weights' distribution, by a few draws of hard codes."""
    options = {"dataset_size": len(images), "straight_through": True}
    repeated = jnp.tile(jnp.asarray(images), (VALIDATION_DRAWS, 1, 1))

    def score(network: Any, _: Any) -> Array:
        bound = network.negative_elbo(repeated, jax.random.key(0), 1.0, **options)
        return jnp.mean(bound.reconstruction + bound.code_kl)

    return score


def plain_task(images: Binary, num_steps: int, batch_size: int) -> Task:
    """The negative ELBO with relaxed codes, stopped where the validation's with hard codes is best."""
    rate, decay, start, floor = PLAIN.values()
    temperature = optax.exponential_decay(
        start, max(1, int(0.7 * num_steps)), floor / start, end_value=floor
    )

    def loss(network: Any, key: Array, step: Array) -> Array:
        batch, draw_key = _batch(images.train, batch_size, key, step)
        size = len(images.train)
        bound = network.negative_elbo(batch, draw_key, temperature(step), dataset_size=size)
        weight = mj.objectives.kl_warmup(step, int(KL_WARM_UP * num_steps))
        return bound.reconstruction.mean() + weight * bound.code_kl.mean()

    optimizer = clipped_adam(rate, num_steps, norm=10.0, weight_decay=decay)
    settings = PLAIN | {"batch_size": batch_size}
    validate = _validation(images.validation)
    return Task(TRANSFORMER, loss, optimizer, num_steps, validate, settings=settings)


def bayesian_task(images: Binary, num_steps: int, batch_size: int, **settings: Any) -> Task:
    """The analytic negative ELBO for each training image, stopped where the validation's is best.

    Codes are hard; their gradient is that of relaxed ones. `settings` have the `kl_weight`, and what
    else a checkpoint has to agree with.
    """
    size = len(images.train)
    weights = {"dataset_size": size, "kl_weight": settings["kl_weight"], "straight_through": True}

    def loss(network: Any, key: Array, step: Array) -> Array:
        batch, draw_key = _batch(images.train, batch_size, key, step)
        return network.negative_elbo(batch, draw_key, PLAIN["floor"], **weights).total.mean()

    optimizer = clipped_adam(LEARNING_RATE, num_steps, norm=100.0)
    validate = _validation(images.validation)
    settings |= {"batch_size": batch_size}
    return Task(BAYESIAN, loss, optimizer, num_steps, validate, settings=settings)


class Scores(NamedTuple):
    """Nats for each image, averaged over draws of its codes; codes of the last draw."""

    reconstruction: np.ndarray
    code_kl: np.ndarray
    codes: np.ndarray
    num_codes: int

    @property
    def total(self) -> np.ndarray:
        """The negative ELBO of each image given the weights' distribution, (N,)."""
        return self.reconstruction + self.code_kl

    def summary(self) -> dict[str, float]:
        """The entry of metrics.json."""
        usage = np.bincount(self.codes.ravel(), minlength=self.num_codes)
        return {
            "negative_elbo": float(self.total.mean()),
            "standard_error": float(stats.sem(self.total)),
            "reconstruction": float(self.reconstruction.mean()),
            "code_kl": float(self.code_kl.mean()),
            "num_codes": self.num_codes,
            "codes_per_image": self.codes.shape[1],
            "perplexity": float(np.exp(stats.entropy(usage))),
        }


def score(network: DiscreteAutoencoder, images: np.ndarray, key: Array, num_draws: int) -> Scores:
    """The negative ELBO of images by exact draws of hard codes; by moments where weights are random."""
    target = jnp.asarray(images)
    log_probs = jax.jit(network.code_log_probs)(target)

    @jax.jit
    def draw(key: Array) -> tuple[Array, Array]:
        codes = mj.discrete.gumbel_max(key, log_probs)
        z = jax.nn.one_hot(codes, network.num_codes)
        return codes, -network.log_likelihood(target, z)

    drawn = [draw(jax.random.fold_in(key, i)) for i in range(num_draws)]
    code_kl = np.asarray(network.code_kl(log_probs))
    fit = np.mean([loss for _, loss in drawn], axis=0)
    return Scores(fit, code_kl, np.asarray(drawn[-1][0]), network.num_codes)
