"""Compiled passes and predictions of a `mj.Bayesian`, in batches.

The model's graph and the network's options are static.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.nn.law import hold, note_unheld
from moment_jax.nn.static import Static
from moment_jax.progress import compiling
from moment_jax.xla import inlined


def predicted(
    model: nnx.Module, inputs: Any, options: dict[str, Any], batch_size: int, axes: int
) -> Any:
    """`model.likelihood(model(*inputs, **options))`, batch by batch where there are batch axes.

    The last batch is filled up with its first example.
    """
    if not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise ValueError(f"`predict` needs an integer batch_size >= 1. Got {batch_size}.")
    known = Static(options)
    size = jax.tree.leaves(inputs)[0].shape[0] if axes and inputs else 0
    if size <= batch_size:
        return _run(_predicted, model, inputs, known)
    parts = []
    for first in range(0, size, batch_size):
        rows = np.arange(first, first + batch_size)
        rows = np.where(rows < size, rows, first)
        batch = jax.tree.map(lambda x, rows=rows: jnp.asarray(x)[rows], inputs)
        parts.append(_run(_predicted, model, batch, known))
    return _joined(parts, size)


@partial(inlined, static_argnums=1)
def _joined(parts: list[Any], size: int) -> Any:
    return jax.tree.map(lambda *each: jnp.concatenate(each)[:size], *parts)


def compiled_pass(model: Any, inputs: Any, options: dict[str, Any]) -> Any:
    """`model(*inputs, **options)` as one program; in compiled or differentiated code as it stands."""
    if _traced((nnx.state(model), inputs, options)):
        note_unheld(model)
        return model._moments(inputs, options)
    return _run(run_pass, model, inputs, Static(options))


def _run(program: Any, model: Any, inputs: Any, known: Static) -> Any:
    """The result of a program, which is held to the law at its first call."""
    graph, state = nnx.split(model)
    with compiling(f"the pass of {model.name} ({model.structure.__name__})"):
        result, _ = program(graph, state, inputs, known=known)
    if _traced((state, inputs)):
        note_unheld(model)
    else:
        hold(
            model, graph, state, inputs, known, lambda x: program(graph, x, inputs, known=known)[1]
        )
    return result


def _traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


@jax.custom_jvp
def as_corrected(beliefs: Any) -> Any:
    """Beliefs that have no derivative, for the spread was found at their values."""
    return beliefs


@as_corrected.defjvp
def _refused(*_: Any) -> Any:
    raise ValueError(
        "A corrected model has factors that hold for its present beliefs. Got a derivative by them. "
        "Train the model that `corrected` was called on, or model.replace(), and correct it afterwards."
    )


@partial(jax.jit, static_argnums=0, static_argnames="known")
def _predicted(graph: Any, state: Any, inputs: Any, *, known: Static) -> tuple[Any, Array]:
    """The predictive distribution, and the mean of the pass, to which the law holds."""
    model: Any = nnx.merge(graph, state)
    moments = model._moments(inputs, known.value)
    return model.likelihood(moments), moments.mean


@partial(jax.jit, static_argnums=0, static_argnames="known")
def run_pass(graph: Any, state: Any, inputs: Any, *, known: Static) -> tuple[Any, Array]:
    """The moments, and their mean."""
    model: Any = nnx.merge(graph, state)
    moments = model._moments(inputs, known.value)
    return moments, moments.mean
