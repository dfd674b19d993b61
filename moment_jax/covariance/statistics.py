"""Feature statistics that one pass writes and later passes read, in call order."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import get_opaque_trace_state

Written = tuple[Any, ...]
"""Arrays, and a nested tuple for each scan or checkpoint, in call order."""

_NO_TAPE = (
    "`FrozenSeparable` needs the feature statistics of a module of `mj.nn`. Got a call outside of one. "
    "Use `Separable`, or call a module made by `mj.nn.freeze_features`."
)


class Tape:
    """The statistics read or written while one function is traced."""

    def __init__(self, given: Written | None) -> None:
        self.given = given  # None to write
        self.values: list[Any] = []
        self._trace = _trace()

    def exchange(self, statistic: Array, average: Callable[[Array], Array]) -> Array:
        """Reading: the stored statistic. Writing: store and return the average of this one."""
        if self._trace != _trace():
            raise ValueError(
                "`FrozenSeparable` supports only the scans over blocks and `remat` inside `mj.nn`'s "
                "modules. Got another transformation inside of one. Use `Separable`."
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
                    f"{statistic.shape} is stored as {got}. Call `mj.nn.freeze_features` again."
                )
            value = value.astype(statistic.dtype)
        return value

    def take(self) -> Any:
        """The next given statistic; None when writing."""
        if self.given is None:
            return None
        if len(self.values) == len(self.given):
            raise ValueError(
                "`FrozenSeparable` needs the statistics of this very model. Got only "
                f"{len(self.given)}, fewer than it reads. Call `mj.nn.freeze_features` again."
            )
        value = self.given[len(self.values)]
        self.values.append(value)
        return value

    def put(self, written: Written) -> None:
        """Append what an inner function wrote."""
        if self.given is None:
            self.values.append(written)


_open: ContextVar[Tape | None] = ContextVar("tape", default=None)


def exchange(statistic: Array, average: Callable[[Array], Array]) -> Array:
    """`Tape.exchange` on the open tape.

    Raises:
      ValueError: if no tape is open.
    """
    tape = _open.get()
    if tape is None:
        raise ValueError(_NO_TAPE)
    return tape.exchange(statistic, average)


def with_feature_statistics(fn: Callable[..., Any]) -> Callable[..., tuple[Any, Written]]:
    """Make the feature statistics of `FrozenSeparable` an argument and a result of `fn`.

    `jax.vmap(lambda x: with_feature_statistics(fn)(None, x)[1], axis_name="batch")(inputs)` writes
    them, the same for every input. Later passes take their means over that axis.

    Args:
      fn: uses `FrozenSeparable`, under no transformation except a batch's `vmap`.

    Returns:
      A function (statistics, *args) -> (result of `fn`, statistics written). With statistics None, they
      are averaged over the axis "batch", if there is one, and written; otherwise they are read and ()
      is written.

    Raises:
      ValueError: on a call, if `fn` reads another number of statistics than given, or other shapes.
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
                f"{len(tape.values)} of the {len(given)} given. Call `mj.nn.freeze_features` again."
            )
        return result, ()

    return run


def scan(body: Callable[[Any, Any], tuple[Any, Any]], start: Any, xs: Any) -> tuple[Any, Any]:
    """`jax.lax.scan` in which every step has its own statistics."""
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
    """`jax.checkpoint` that passes statistics in and out as arrays."""

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
