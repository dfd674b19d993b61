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
    """File and line of the innermost frame that is neither of JAX, of Flax, nor of this library."""
    traceback = getattr(source, "traceback", None)
    frames = list(getattr(traceback, "frames", ()) or ())
    for frame in frames:
        name = frame.file_name
        if not name.startswith("<") and not any(part in name for part in _INNER):
            return f"{name}:{frame.line_num} ({frame.function_name})"
    return "an unknown line"


_INNER = ("/jax/", "/flax/", "/moment_jax/propagation/", "/moment_jax/nn/bayesian", "/einops/", sys.prefix)
