"""The training loop: the optimiser, compiled updates, progress, checkpoints, Ctrl-C, early stopping."""

import argparse
import dataclasses
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from experiments.background import Background
from experiments.checkpoints import Checkpoints
from experiments.progress import Progress
from experiments.stopping import StopRequest

T = TypeVar("T")
Params = Any
Report = dict[str, Array]

VALIDATE_EVERY = 50
SHOW_EVERY = 10
RISE = 0.05  # share of the updates in which the learning rate rises


def clipped_adam(
    peak: float, num_steps: int, *, norm: float = 10.0, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """AdamW with clipped gradients and a cosine schedule, which ends at a hundredth of its peak."""
    rising = max(1, int(RISE * num_steps))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, rising, max(num_steps, rising + 1), 0.01 * peak
    )
    adam = optax.adamw(schedule, weight_decay=weight_decay)
    return optax.chain(optax.clip_by_global_norm(norm), adam)


class Best(NamedTuple):
    """The best parameters so far by validation, and their score; lower is better."""

    params: Params
    score: Array


class TrainState(NamedTuple):
    """The state of a run: parameters, optimiser, number of updates made, random key."""

    params: Params
    optimizer: Any
    step: Array
    key: Array
    best: Best | None = None

    @property
    def chosen(self) -> Params:
        """The best parameters by validation, or the last ones where nothing validates."""
        return self.params if self.best is None else self.best.params


class Compiled(NamedTuple):
    """The programs of a task; they donate their state."""

    update: Callable[[TrainState], tuple[TrainState, Report]]
    keep_best: Callable[[TrainState], TrainState] | None


@dataclasses.dataclass(frozen=True)
class Task:
    """What to train.

    Args:
      name: shown with the progress.
      loss: (model, key, step) -> loss, figures to show; it draws its own mini-batch
      optimizer: an optax transformation.
      num_steps: number of updates.
      validate: model -> a score to minimise, by which the best parameters are kept
      graph: of the Flax module that is the model; without one the parameters are
    """

    name: str
    loss: Callable[[Any, Array, Array], tuple[Array, Report]]
    optimizer: optax.GradientTransformation
    num_steps: int
    validate: Callable[[Any], Array] | None = None
    graph: Any = None

    def model(self, params: Params) -> Any:
        """What the loss and the validation take."""
        return params if self.graph is None else nnx.merge(self.graph, params)

    def start(self, params: Params, key: Array) -> TrainState:
        """The state before the first update; the parameters are copied, for updates donate theirs."""
        params = jax.tree.map(jnp.copy, params)
        best = None
        if self.validate is not None:
            best = Best(jax.tree.map(jnp.copy, params), jnp.asarray(jnp.inf, jnp.float32))
        return TrainState(params, self.optimizer.init(params), jnp.int32(0), key, best)

    def update(self, state: TrainState) -> tuple[TrainState, Report]:
        """One step of the optimiser."""

        def loss(params: Params) -> tuple[Array, Report]:
            return self.loss(self.model(params), state.key, state.step)

        (value, report), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        changes, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, changes)
        new = TrainState(params, optimizer, state.step + 1, state.key, state.best)
        return new, {"loss": value, **report}

    def compile(self, state: TrainState) -> Compiled:
        """The programs for states of these shapes, for all seeds."""
        update = jax.jit(self.update, donate_argnums=0).lower(state).compile()
        if self.validate is None:
            return Compiled(update, None)
        return Compiled(update, jax.jit(self.keep_best, donate_argnums=0).lower(state).compile())

    def keep_best(self, state: TrainState) -> TrainState:
        """Compare the parameters with the best so far."""
        assert self.validate is not None
        assert state.best is not None
        score = self.validate(self.model(state.params)).astype(state.best.score.dtype)
        now = Best(state.params, score)
        better = partial(jnp.where, score < state.best.score)
        return state._replace(best=jax.tree.map(better, now, state.best))


def fit(
    task: Task,
    state: TrainState,
    checkpoints: Checkpoints | None = None,
    save_every: int = 1,
    compiled: Callable[[], Compiled] | None = None,
    request: StopRequest | None = None,
) -> TrainState:
    """Train, from the latest checkpoint if there is one.

    Args:
      task: what to train.
      state: where to start if there is no checkpoint.
      checkpoints: where to save; the end is saved too. None to save nothing; then Ctrl-C is not waited
        for.
      save_every: updates between checkpoints.
      compiled: gives the programs, from a thread that compiles them or from the fit of another seed;
        None to compile them.
      request: to stop, heard elsewhere (see `together`); None to listen here.

    Returns:
      The state after `task.num_steps` updates.

    Raises:
      InputError: if the checkpoint is of other settings.
      KeyboardInterrupt: after Ctrl-C, from between two updates; all that was done is saved.
    """
    if checkpoints is not None:
        state = checkpoints.restore(state) or state
    first = int(state.step)
    if first >= task.num_steps:
        return state
    progress = Progress(task.name, task.num_steps, initial=first)
    # Compile first: there is nothing yet that Ctrl-C would have to save.
    update, keep_best = compiled() if compiled else task.compile(state)
    own = StopRequest(*([] if checkpoints is None else [signal.SIGINT]))
    with own if request is None else nullcontext(request) as request:
        for step in range(first + 1, task.num_steps + 1):
            state, report = update(state)
            last = step == task.num_steps
            stop = request.received is not None
            if keep_best is not None and (step % VALIDATE_EVERY == 0 or last):
                state = keep_best(state)
            shown = step % SHOW_EVERY == 0 or last
            progress.update(1, {k: float(v) for k, v in report.items()} if shown else None)
            if checkpoints is not None and (step % save_every == 0 or last or stop):
                checkpoints.save(step, state)
            if stop:
                break
    if checkpoints is not None and request.received is not None:  # or after the last update
        raise KeyboardInterrupt(
            f"stopped after update {step} of {task.num_steps} ({task.name}), which is saved in "
            f"{checkpoints.folder}; run the same command with --resume to go on"
        )
    return state


def fit_saved(
    task: Task, params: Params, args: argparse.Namespace, name: str, settings: dict[str, Any],
    seed: int, save_every: int, *more: Any,
) -> TrainState:  # fmt: skip
    """`fit` from `params`, with checkpoints in a folder `name` below --out, as --resume says.

    `more`: further arguments of `fit`.
    """
    settings = {"seed": args.seed, **settings}
    with Checkpoints(args.out / "checkpoints" / name, settings, resume=args.resume) as store:
        return fit(task, task.start(params, jax.random.key(seed)), store, save_every, *more)


def fit_network(task: Task, network: Any, *saved: Any) -> tuple[Any, TrainState]:
    """`fit_saved` of a Flax module: the trained one, and the last state; `saved`: its arguments."""
    graph, params = nnx.split(network)
    state = fit_saved(dataclasses.replace(task, graph=graph), params, *saved)
    return nnx.merge(graph, state.chosen), state


def together(
    fits: Sequence[Callable[[StopRequest], T]], compiled: Callable[[], Compiled]
) -> list[T]:
    """Several fits at the same time, of one program: small updates leave cores idle.

    Each has a thread, and is given the request to stop, which only the main thread hears. Where one
    fails, the others stop as after Ctrl-C, and its error is raised.
    """
    request = StopRequest(signal.SIGINT)

    def guarded(one: Callable[[StopRequest], T]) -> T:
        try:
            return one(request)
        except BaseException:
            request.received = signal.SIGINT
            raise

    results, errors = [], []
    with request:  # before any of them begins, or Ctrl-C would leave them running
        running = [Background().start(partial(guarded, one)) for one in fits]
        compiled()
        for result in running:
            try:
                results.append(result())
            except BaseException as error:
                errors.append(error)
    if errors:  # those that were only stopped come last
        raise min(errors, key=lambda error: isinstance(error, KeyboardInterrupt))
    return results
