"""What a pass says: its steps, operations without a rule, and inputs with the wrong batch axes."""

import sys
import sysconfig
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class PropagationError(Exception):
    """Raised for an operation on random values that `propagate` has no rule for."""


LINEARISE = (
    "use mj.linearised(fn), or mj.Bayesian(network, linearised=True): the network linearised in its "
    "weights"
)


def refuse(what: str, source: Any, fix: str) -> PropagationError:
    """The error for an operation: what it is, where it is, and how to fix it."""
    return PropagationError(f"`propagate` needs moments of {what}, at {where(source)}. {fix}")


def register(node: Any) -> str:
    """How to fix the error for a node without a rule."""
    return (
        f'Register one with mj.propagation_rule("{node.op}"), keep this part certain, as with '
        f"mj.Bayesian(network, random=...), or {LINEARISE}. help(mj.propagate) lists what has no rule."
    )


def where(sources: tuple[Any, ...]) -> str:
    """File and line of the innermost frame outside JAX, Flax and this library.

    The sources are the `source_info` of an equation and of the calls around it, innermost first. A
    cached trace carries the line of its first call; the enclosing call has the right one.
    """
    lines = [
        [
            f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
            for frame in getattr(source.traceback, "frames", ())  # innermost first
            if not frame.file_name.startswith("<")
            and not any(part in frame.file_name for part in _INNER)
        ]
        for source in sources
    ]
    for inner, outer in zip(lines, [*lines[1:], []], strict=False):
        if inner and (not outer or outer[0] in inner):
            return inner[0]
    return "an unknown line"


_INNER = (
    "/jax/", "/flax/", "/einops/", "/moment_jax/propagation/", "/moment_jax/nn/bayesian",
    "/moment_jax/nn/law", "/moment_jax/nn/check", "/moment_jax/nn/prediction", sys.prefix,
    sysconfig.get_path("stdlib"),
)  # fmt: skip


def takes(fn: Callable[..., Any], *inputs: Any) -> bool:
    """Whether the function traces with inputs of these shapes."""
    try:
        jax.eval_shape(fn, *inputs)
    except Exception:
        return False
    return True


def shapes(inputs: Any) -> str:
    """The inputs' shapes, for error messages."""
    return ", ".join(str(tuple(np.shape(x))) for x in jax.tree.leaves(inputs))


def with_axes(inputs: Any, axes: int) -> Any:
    """The inputs with this many leading axes of length one."""
    return jax.tree.map(lambda x: jnp.expand_dims(x, tuple(range(axes))), inputs)


def explain(rule: str, inputs: Any, error: Exception, *ways: tuple[Any, Any, str, str]) -> None:
    """Raise a `ValueError` if a call fails only because its inputs lack, or add, a batch axis.

    A way is a function, inputs with which it would trace, why, and how to give them.
    """
    for fn, others, why, mend in ways:
        if takes(fn, others):
            got = f"Got inputs of shape {shapes(inputs)}"
            raise ValueError(f"{rule}, and {why}. {got}. {mend}") from error


class Step(NamedTuple):
    """One operation of a receipt."""

    operation: str  # the primitive
    rule: str  # that computed its moments
    assumes: str
    where: str  # file and line in the user's program
    shape: tuple[int, ...]


class Steps(list[Step]):
    """The operations of one pass; prints as a table, and under it what is known of the whole."""

    law: str = ""

    def __str__(self) -> str:
        rows = [("rule", "shape", "assumes", "where")]
        rows += [(x.rule, "x".join(map(str, x.shape)), x.assumes, x.where) for x in self]
        wide = [max(len(row[i]) for row in rows) for i in range(3)]
        table = ["  ".join((*map(str.ljust, row, wide), row[3])).rstrip() for row in rows]
        return "\n".join([*table, self.law] if self.law else table)
