"""Training by the library's loop, with validation, progress, checkpoints and Ctrl-C."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments.checkpoints import Checkpoints
from experiments.command_line import PartError
from experiments.programs import Program, compile_program
from experiments.stopping import StopRequest

T = TypeVar("T")

RISE = 0.05  # share of the updates in which the learning rate rises
SAVE_SECONDS = 20.0  # between two checkpoints
SHOW_SECONDS = 10.0  # between two lines of progress
QUICKLY = {"xla_backend_optimization_level": 1}  # a fifth less to compile, and as fast on CPU


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


@dataclasses.dataclass(frozen=True)
class Task:
    """What to train.

    Args:
      name: shown with the progress.
      loss: (model, given, step) -> the loss; it draws its own mini-batch, by the key in what is given.
      optimizer: an optax transformation.
      num_steps: number of updates.
      validate: (model, given) -> a score to minimise, by which the best parameters are kept.
      wrt: an NNX filter of the variables that are trained.
      settings: those that a checkpoint has to agree with, beside the seed and the number of updates.
    """

    name: str
    loss: Callable[[Any, Any, Array], Array]
    optimizer: optax.GradientTransformation
    num_steps: int
    validate: Callable[[Any, Any], Array] | None = None
    wrt: Any = nnx.Param
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def start(self, model: nnx.Module) -> tuple[mj.inference.Training, Any]:
        """The loop, and the state before the first update."""
        return mj.inference.Training.of(model, self.optimizer, self.loss, wrt=self.wrt)

    def compile(self, model: nnx.Module, given: Any) -> Program:
        """`Training.advance` for models of this form."""
        training, state = self.start(model)
        zero, advance = jnp.int32(0), type(training).advance
        return compile_program(advance, training, state, given, zero, zero, options=QUICKLY)


class Fitted(NamedTuple):
    """A trained model: the best by validation, or the last."""

    model: Any
    score: float
    seconds: float


def fit(
    task: Task, model: nnx.Module, given: Any, store: Checkpoints | None = None,
    advance: Any = None, request: StopRequest | None = None,
) -> Fitted:  # fmt: skip
    """Train a copy of a model, from the latest checkpoint if there is one.

    Args:
      task: what to train.
      model: where to start if there is no checkpoint.
      given: to the loss: a random key, and data if it takes any.
      store: where to save; None to save nothing, and not to wait for Ctrl-C.
      advance: the program of `Task.compile`; None to compile here.
      request: to stop, heard by `together`; None to listen here.

    Raises:
      InputError: if the checkpoint is of other settings.
      KeyboardInterrupt: after Ctrl-C, from between two chunks of updates; all that was done is saved.
    """
    begin = saved = time.perf_counter()
    training, state = task.start(model)
    now = {"step": jnp.int32(0), "state": state, "best": state[0], "score": jnp.float32(jnp.inf)}
    now = now if store is None else store.latest(now)
    shown, first = time.perf_counter(), int(now["step"])
    _tell(f"{task.name}: {first} of {task.num_steps} steps")
    options = {"first": first, "advance": advance}
    updates = training.run(now["state"], lambda _: given, task.num_steps, **options)
    heard = nullcontext(StopRequest()) if store is None else StopRequest()
    with heard if request is None else nullcontext(request) as request:
        for step, state, loss in updates:
            score = jnp.float32(-step)  # the last is the best
            if task.validate is not None:
                score = _score(training, task.validate, state, given)
            best = {"best": state[0], "score": score} if score < now["score"] else {}
            now = now | {"step": jnp.int32(step), "state": state} | best
            last, clock = step == task.num_steps, time.perf_counter()
            if last or clock > shown + SHOW_SECONDS:
                _tell(f"{task.name}: {step} of {task.num_steps} steps; loss {loss:.4g}")
                shown = clock
            if not jnp.isfinite(loss):
                raise PartError(
                    f"{task.name}: the loss is {loss} after update {step}; take other settings"
                )
            if store is not None and (last or clock > saved + SAVE_SECONDS or request.received):
                store.keep(step, now)
                saved = clock
            if store is not None and request.received:
                raise KeyboardInterrupt(
                    f"stopped after update {step} of {task.num_steps} ({task.name}), which is saved in "
                    f"{store.directory}; run the same command with --resume to go on"
                )
    chosen = nnx.merge(training.graph, nnx.State({0: now["best"], 1: now["state"][1]}))[0]
    return Fitted(chosen, float(now["score"]), time.perf_counter() - begin)


@partial(jax.jit, static_argnums=(0, 1))
def _score(training: Any, validate: Callable[..., Array], state: Any, given: Any) -> Array:
    return validate(training.model(state), given).astype(jnp.float32)


def fit_saved(
    task: Task, model: nnx.Module, args: argparse.Namespace, folder: str, seed: int, *more: Any,
    add: int = 1, data: Any = None,
) -> Fitted:  # fmt: skip
    """`fit` with checkpoints in a folder below --out, as --resume says.

    The loss is given the random key of `seed + add`, or (key, data); `more` are further arguments of
    `fit`.
    """
    settings = {"seed": seed, "num_steps": task.num_steps, **task.settings}
    with Checkpoints(args.out / "checkpoints" / folder, settings, resume=args.resume) as store:
        key = jax.random.key(seed + add)
        return fit(task, model, key if data is None else (key, data), store, *more)


def together(fits: Sequence[Callable[[StopRequest], T]], threads: int | None = None) -> list[T]:
    """Several fits at the same time, or `threads` of them: small updates leave cores idle.

    Each is given the request to stop, which only the main thread hears. Where one fails, the others
    stop as after Ctrl-C, and its error is raised.
    """
    request = StopRequest()

    def guarded(one: Callable[[StopRequest], T]) -> T:
        if request.received:
            raise KeyboardInterrupt("stopped before it began")
        try:
            return one(request)
        except BaseException:
            request.received = True
            raise

    with request:  # before any of them begins, or Ctrl-C would leave them running
        running = in_background(
            *(partial(guarded, one) for one in fits), threads=threads or len(fits)
        )
        wait(running)
    errors = [error for one in running if (error := one.exception()) is not None]
    if errors:  # those that were only stopped come last
        raise min(errors, key=lambda error: isinstance(error, KeyboardInterrupt))
    return [one.result() for one in running]


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # in one piece, for several threads may write at the same time
    sys.stderr.flush()


def compiling(programs: dict[str, Callable[[], Program]]) -> dict[str, Future[Program]]:
    """Compile in the background, two at a time, and tell for how long."""

    def told(name: str, compiled: Callable[[], Program]) -> Program:
        program = compiled()
        _tell(f"compiled {name} in {program.seconds:.1f} s")
        return program

    running = in_background(*(partial(told, *one) for one in programs.items()), threads=2)
    return dict(zip(programs, running, strict=True))


def in_background(*functions: Callable[[], T], threads: int = 1) -> list[Future[T]]:
    """Start functions in threads, which the end of the process does not wait for (see `__main__`)."""
    pool = ThreadPoolExecutor(threads)
    return [pool.submit(function) for function in functions]
