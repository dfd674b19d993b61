"""The main job's two networks: training, checkpoints and loading."""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import data
from experiments.checkpoints import Checkpoints
from experiments.command_line import InputError
from experiments.data import Digits
from experiments.schedules import clipped_adam
from experiments.stopping import StopRequest
from experiments.training import Compiled, Report, Task, TrainState, fit_saved, together

PATCH_SIZE = 2
NUM_FEATURES = 32
NUM_HEADS = 4
NUM_BLOCKS = 2
HIDDEN_FEATURES = 64
POSITION_SCALE = (
    1.0  # as large as the patches; Flax's customary 0.02 leaves attention blind to place
)

POSTERIORS = {
    "factorized": mj.posterior.Factorized,
    "output_shared": mj.posterior.OutputShared,
    "matrix_normal": mj.posterior.MatrixNormal,
    "full_normal": mj.posterior.FullNormal,
}
"""The families of beliefs about weights, by the names that the command line takes."""


@dataclasses.dataclass(frozen=True)
class Belief:
    """How the Bayesian network begins: see `mj.nn.Settings`."""

    structure: str = "Separable"
    posterior: str = "factorized"
    relative_scale: float = 0.05
    prior_scale: float = 0.3


def bayesian_network(belief: Belief, seed: int) -> mj.nn.VisionTransformer:
    """A Bayesian vision Transformer, its prior scales learned."""
    return mj.nn.VisionTransformer(
        image_size=data.IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        num_classes=data.NUM_CLASSES,
        num_features=NUM_FEATURES,
        num_heads=NUM_HEADS,
        num_blocks=NUM_BLOCKS,
        hidden_features=HIDDEN_FEATURES,
        rngs=nnx.Rngs(seed),
        structure=mj.STRUCTURES[belief.structure],
        posterior=POSTERIORS[belief.posterior],
        relative_scale=belief.relative_scale,
        prior_scale=belief.prior_scale,
        learn_prior=True,
    )


def plain_network(seed: int) -> mj.nn.PlainVisionTransformer:
    """The same network in Flax's own layers, untrained."""
    network = bayesian_network(Belief(), seed).mean_network()
    assert isinstance(network, mj.nn.PlainVisionTransformer)
    shape = network.position[...].shape
    start = POSITION_SCALE * jax.random.normal(jax.random.key(seed), shape)
    network.position.set_value(start)
    return network


def plain_task(
    graph: Any,
    digits: Digits,
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    weight_decay: float,
) -> Task:
    """Cross-entropy with weight decay, stopped where the validation NLL is best."""

    def logits(params: Any, images: Array) -> Array:
        return nnx.merge(graph, params)(images)

    def loss(params: Any, key: Array, step: Array) -> tuple[Array, Report]:
        images, labels = data.mini_batch(key, step, digits.train, batch_size)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels)
        return losses.mean(), {}

    def validate(params: Any) -> Array:
        images, labels = (jnp.asarray(part) for part in digits.validation)
        probabilities = jax.nn.softmax(logits(params, images))
        return mj.objectives.negative_log_likelihood(probabilities, labels)

    optimizer = clipped_adam(learning_rate, num_steps, norm=1.0, weight_decay=weight_decay)
    return Task("plain network", loss, optimizer, num_steps, validate)


def bayesian_task(
    graph: Any,
    digits: Digits,
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    kl_weight: float,
    warm_up_steps: int,
) -> Task:
    """The negative analytic ELBO for each training image, by one pass of moments a step."""
    dataset_size = digits.train.labels.size
    fit_of = partial(mj.objectives.expected_log_likelihood, mj.objectives.Categorical())

    def loss(params: Any, key: Array, step: Array) -> tuple[Array, Report]:
        images, labels = data.mini_batch(key, step, digits.train, batch_size)
        network = nnx.merge(graph, params)
        fits = jax.vmap(fit_of)(labels, *network(images))
        kl = network.kl()
        weight = mj.objectives.kl_warmup(step, warm_up_steps, kl_weight)
        bound = mj.objectives.elbo(fits, kl, dataset_size=dataset_size, kl_weight=weight)
        return -bound / dataset_size, {"fit": fits.mean(), "kl": kl}

    return Task("Bayesian network", loss, clipped_adam(learning_rate, num_steps), num_steps)


def predicting(network: mj.nn.VisionTransformer) -> mj.nn.VisionTransformer:
    """The network for prediction: images must not share statistics, as batches do in training."""
    shared = network.settings.structure is mj.BatchSeparable
    return mj.nn.with_structure(network, mj.Separable) if shared else network


class Training(NamedTuple):
    """One of the two networks and its training."""

    name: str
    graph: Any
    params: Any  # their shapes, to compile for
    task: Task
    settings: dict[str, Any]  # of a checkpoint

    def network(self, params: Any) -> Any:
        """The network for prediction."""
        network = nnx.merge(self.graph, params)
        is_plain = isinstance(network, mj.nn.PlainVisionTransformer)
        return network if is_plain else predicting(network)

    def compile(self) -> Compiled:
        """The programs, for all seeds."""
        return self.task.compile(self.start())

    def start(self) -> TrainState:
        """The shapes of a state."""
        state: TrainState = jax.eval_shape(self.task.start, self.params, jax.random.key(0))
        return state

    def fit(
        self, args: argparse.Namespace, params: Any, seed: int, key: int, save_every: int,
        compiled: Callable[[], Compiled], request: StopRequest | None = None,
    ) -> TrainState:  # fmt: skip
        """Train from `params`; the random key is that of `seed` + `key`."""
        own = argparse.Namespace(**{**vars(args), "seed": seed})
        task = dataclasses.replace(self.task, name=f"{self.task.name}, seed {seed}")
        return fit_saved(
            task, params, own, f"{self.name}/seed_{seed}", self.settings, seed + key, save_every,
            compiled, request,
        )  # fmt: skip


def plain(args: argparse.Namespace, digits: Digits) -> Training:
    """The plain network and its training."""
    graph, params = nnx.split(nnx.eval_shape(lambda: plain_network(args.seed)))
    options: dict[str, Any] = {
        "num_steps": args.plain_steps,
        "batch_size": min(args.batch_size, digits.train.labels.size),
        "learning_rate": args.plain_learning_rate,
        "weight_decay": args.weight_decay,
    }
    return Training("plain", graph, params, plain_task(graph, digits, **options), options)


def bayesian(args: argparse.Namespace, digits: Digits) -> Training:
    """The Bayesian network and its training."""
    graph, params = nnx.split(nnx.eval_shape(lambda: _network(args, args.seed)))
    options: dict[str, Any] = {
        "num_steps": args.steps,
        "batch_size": min(args.batch_size, digits.train.labels.size),
        "learning_rate": args.learning_rate,
        "kl_weight": args.kl_weight,
        "warm_up_steps": args.warm_up,
    }
    task = bayesian_task(graph, digits, **options)
    belief = {name: getattr(args, name) for name in ("structure", "posterior", "plain_steps")}
    return Training("bayesian", graph, params, task, {**belief, **options})


def _network(args: argparse.Namespace, seed: int) -> mj.nn.VisionTransformer:
    return bayesian_network(Belief(args.structure, args.posterior), seed)


def train_plain(
    args: argparse.Namespace, training: Training, compiled: Callable[[], Compiled], seed: int
) -> tuple[Any, float]:
    """The best parameters by the validation NLL, and the seconds."""
    start = time.perf_counter()
    # Its updates are cheap: one checkpoint halfway.
    every = max(1, args.plain_steps // 2)
    params = nnx.state(plain_network(seed))
    state = training.fit(args, params, seed, 0, every, compiled)
    assert state.best is not None
    return state.best.params, time.perf_counter() - start


def train_bayesian(
    args: argparse.Namespace,
    training: Training,
    compiled: Callable[[], Compiled],
    starts: dict[int, mj.nn.PlainVisionTransformer],
) -> list[tuple[Any, float]]:
    """Start at the trained plain networks' weights, with small spreads, and maximise the ELBO.

    The seeds of `starts` train at the same time; of each the parameters, and the seconds, of waiting
    for the program too.
    """

    def train(seed: int, request: StopRequest) -> tuple[Any, float]:
        start = time.perf_counter()
        every = args.save_every
        state = training.fit(args, params[seed], seed, 1, every, compiled, request)
        return state.params, time.perf_counter() - start

    networks = {seed: _network(args, seed) for seed in starts}
    for seed, network in networks.items():
        network.load(starts[seed])
    params = {seed: nnx.state(network) for seed, network in networks.items()}
    return together([partial(train, seed) for seed in starts], compiled)


def trained(run_folder: Path) -> tuple[mj.nn.VisionTransformer, Digits]:
    """The first seed's Bayesian network in the --out of a finished main job, and its data."""
    try:
        stored = json.loads((run_folder / "metrics.json").read_text())["settings"]
        args = argparse.Namespace(**{**stored, "out": run_folder})
        digits = data.load()
        training = bayesian(args, digits)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(
            f"{run_folder} holds no finished run of the main job ({error}); make one by "
            f"python -m experiments digits --out {run_folder}"
        ) from error
    folder = run_folder / "checkpoints" / training.name / f"seed_{args.seed}"
    with Checkpoints(folder, {"seed": args.seed, **training.settings}, resume=True) as store:
        state = store.restore(training.start())
    if state is None:
        raise InputError(f"{run_folder} holds no checkpoint; run the main job into it again")
    return training.network(state.params), digits
