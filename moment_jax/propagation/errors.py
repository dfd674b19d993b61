"""What is not known is refused by name, with the line of the user's program that it came from."""

from __future__ import annotations

import sys
from typing import Any


class PropagationError(NotImplementedError):
    """An operation on random values whose moments `propagate` does not know."""


def refuse(what: str, source: Any, mend: str) -> PropagationError:
    """The error to raise: what is asked for, where, and what to do about it.

    Args:
      what: the operation and the values that came.
      source: `eqn.source_info` of its equation, or None.
      mend: the way out.
    """
    return PropagationError(f"`propagate` needs moments of {what}, at {where(source)}. {mend}")


def where(source: Any) -> str:
    """File and line of the innermost frame that is neither of JAX, of Flax, nor of this library.

    Args:
      source: `eqn.source_info`, or several: of an equation and of the calls around it, innermost first.
        A function that was traced before tells where that was: then the call's line is the right one.
    """
    sources = source if isinstance(source, tuple) else (source,)
    lines = [_lines(one) for one in sources]
    for inner, outer in zip(lines, [*lines[1:], []], strict=True):
        if inner and (not outer or outer[0] in inner):
            return inner[0]
    return "an unknown line"


def _lines(source: Any) -> list[str]:
    """Lines of the user's program, the innermost first."""
    traceback = getattr(source, "traceback", None)
    return [
        f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
        for frame in getattr(traceback, "frames", ()) or ()
        if not frame.file_name.startswith("<")
        and not any(part in frame.file_name for part in _INNER)
    ]


_INNER = (
    "/jax/",
    "/flax/",
    "/moment_jax/propagation/",
    "/moment_jax/nn/any_model",
    "/einops/",
    sys.prefix,
)
