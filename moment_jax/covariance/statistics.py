"""Statistics that one pass writes and later passes read, in the order in which they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

Array = jax.Array
Written = tuple[Any, ...]
"""Arrays, and for every scan or checkpoint a tuple of its own, in the order of the calls."""

_NO_TAPE = (
    "`FrozenSeparable` needs the feature statistics of a module of `mj.nn`, and is used outside of one. "
    "Use `Separable`, or call a module that `mj.nn.freeze_features` has made."
)


class Tape:
    """What is read, or written, while one function is traced."""

    def __init__(self, given: Written | None) -> None:
        self.given = given  # None to write
        self.values: list[Any] = []
        self._trace = _trace()

    def exchange(self, statistic: Array, average: Callable[[Array], Array]) -> Array:
        """The stored array in the place of a statistic; when writing, its average, which is stored."""
        if self._trace != _trace():
            raise ValueError(
                "`FrozenSeparable` reads its statistics in `mj.nn`'s modules, through their scans over "
                "blocks and `remat`. Got another transformation inside of one. Use `Separable`."
            )
        if self.given is None:
            value = average(statistic)
            self.values.append(jax.lax.stop_gradient(value))
        else:
            value = self.take()
            got = value.shape if isinstance(value, jax.Array) else "a scan's"
            if got != statistic.shape:
                raise ValueError(
                    "`FrozenSeparable` needs the statistics of this very model. A statistic of shape "
                    f"{statistic.shape} is stored as {got}. Call `mj.nn.freeze_features` anew."
                )
            value = value.astype(statistic.dtype)
        return value

    def take(self) -> Any:
        """The next of those given; None when writing."""
        if self.given is None:
            return None
        if len(self.values) == len(self.given):
            raise ValueError(
                "`FrozenSeparable` needs the statistics of this very model, and has fewer than it asks "
                f"for, {len(self.given)}. Call `mj.nn.freeze_features` anew."
            )
        value = self.given[len(self.values)]
        self.values.append(value)
        return value

    def put(self, written: Written) -> None:
        """Add what an inner function has written."""
        if self.given is None:
            self.values.append(written)


_open: ContextVar[Tape | None] = ContextVar("tape", default=None)


def exchange(statistic: Array, average: Callable[[Array], Array]) -> Array:
    """`Tape.exchange` with the tape that is open.

    Raises:
      ValueError: if none is.
    """
    tape = _open.get()
    if tape is None:
        raise ValueError(_NO_TAPE)
    return tape.exchange(statistic, average)


def with_feature_statistics(fn: Callable[..., Any]) -> Callable[..., tuple[Any, Written]]:
    """Make the feature statistics that `FrozenSeparable` reads an argument and a result of `fn`.

    `jax.vmap(lambda x: with_feature_statistics(fn)(None, x)[1], axis_name="batch")(inputs)` writes them,
    the same for every input; their means over that axis are what later passes take.

    Args:
      fn: uses `FrozenSeparable`, outside of other transformations than a batch's `vmap`.

    Returns:
      A function (statistics, *args) -> (the result of `fn`, what was written). Statistics of None: they
      are written, by averaging over the axis "batch" where there is one; else read, and () is written.

    Raises:
      ValueError: on a call, if fewer or more statistics are given than `fn` reads, or of other shapes.
    """

    def run(given: Written | None, *args: Any) -> tuple[Any, Written]:
        tape = Tape(given)
        token = _open.set(tape)
        try:
            result = fn(*args)
        finally:
            _open.reset(token)
        if given is None:
            return result, tuple(tape.values)
        if len(tape.values) != len(given):
            raise ValueError(
                f"`FrozenSeparable` needs the statistics of this very model. It reads "
                f"{len(tape.values)} of the {len(given)} given. Call `mj.nn.freeze_features` anew."
            )
        return result, ()

    return run


def scan(body: Callable[[Any, Any], tuple[Any, Any]], start: Any, xs: Any) -> tuple[Any, Any]:
    """`jax.lax.scan`, every step with its own statistics."""
    tape = _open.get()
    if tape is None:
        return jax.lax.scan(body, start, xs)

    def step(carry: Any, own: Any) -> tuple[Any, Any]:
        given, x = own
        (carry, y), written = with_feature_statistics(body)(given, carry, x)
        return carry, (y, written)

    end, (ys, written) = jax.lax.scan(step, start, (tape.take(), xs))
    tape.put(written)
    return end, ys


def checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.checkpoint`, statistics going in and out as arrays."""

    def run(*args: Any) -> Any:
        tape = _open.get()
        if tape is None:
            return jax.checkpoint(fn)(*args)
        result, written = jax.checkpoint(with_feature_statistics(fn))(tape.take(), *args)
        tape.put(written)
        return result

    return run


def averaged(every: list[Any]) -> Any:
    """The mean over trees of statistics."""
    return jax.tree.map(lambda *parts: jnp.mean(jnp.stack(parts), axis=0), *every)


def _trace() -> object:
    return get_opaque_trace_state(convention="moment_jax")
