"""Argument checks of the decoders, made while tracing."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

State = Any
PAD = -1  # follows the end of a sequence
Step = Callable[[State, Array], tuple[Array, Array, State]]


def whole_number(name: str, argument: str, value: int, least: int) -> int:
    """`value` as an int; an error unless it is known while tracing and at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"`{name}` needs {argument} as a Python int, as shapes depend on it. Got "
            f"{type(value).__name__}; mark it static under jax.jit."
        ) from None
    if number < least:
        raise ValueError(f"`{name}` needs {argument} >= {least}. Got {number}.")
    return number


def as_tokens(name: str, tokens: Array, num_axes: int) -> Array:
    """Tokens as int32; an error unless they are integers with this number of axes."""
    tokens = jnp.asarray(tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"`{name}` needs integer tokens. Got {tokens.dtype}.")
    if tokens.ndim != num_axes:
        wanted = "(B,), one per row" if num_axes else "(), for one sequence"
        raise ValueError(
            f"`{name}` needs first tokens of shape {wanted}. Got {tuple(tokens.shape)}. "
            + ("For one sequence, use tokens[None]." if num_axes else "For several, use jax.vmap.")
        )
    return tokens.astype(jnp.int32)


def as_state(name: str, state: State, num_rows: int) -> State:
    """The state as arrays; an error unless every leaf has a leading axis of `num_rows`."""
    state = jax.tree.map(jnp.asarray, state)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if leaf.ndim == 0 or leaf.shape[0] != num_rows:
            where = jax.tree_util.keystr(path) or "itself"
            raise ValueError(
                f"`{name}` needs a state whose leaves have a leading axis of {num_rows}, the number "
                f"of rows. Got {tuple(leaf.shape)} at state{where}. Give every row a copy, for example "
                f"jnp.broadcast_to(leaf, ({num_rows}, *leaf.shape)); constants belong in the step."
            )
    return state


def check_step(name: str, step: Step, state: State, tokens: Array) -> tuple[int, jnp.dtype]:
    """The number of tokens V and the logits' type; an error unless the step's results fit."""
    result = jax.eval_shape(step, state, tokens)
    if not (isinstance(result, tuple) and len(result) == 3):
        raise TypeError(
            f"`{name}` needs step(state, tokens) -> (mean, cov, state). Got {type(result).__name__}"
            + (f" of {len(result)}." if isinstance(result, tuple) else ".")
        )
    mean, cov, after = result
    num_rows = tokens.shape[0]
    if len(mean.shape) != 2 or mean.shape[0] != num_rows or mean.shape[1] == 0:
        raise ValueError(
            f"`{name}` needs a step whose mean logits have the shape ({num_rows}, V), V >= 1. Got "
            f"{mean.shape}."
        )
    if not jnp.issubdtype(mean.dtype, jnp.floating):
        raise TypeError(f"`{name}` needs floating-point mean logits. Got {mean.dtype}.")
    size = mean.shape[1]
    if not isinstance(cov, jax.ShapeDtypeStruct):
        raise TypeError(
            f"`{name}` needs the logits' variances or covariances as an array. Got "
            f"{type(cov).__name__}. For a structure, use its variance()."
        )
    if cov.shape not in (mean.shape, (*mean.shape, size)):
        raise ValueError(
            f"`{name}` needs the logits' variances {mean.shape} or covariances "
            f"{(*mean.shape, size)}. Got {cov.shape}."
        )
    _check_same(name, state, after)
    return size, mean.dtype


def _check_same(name: str, before: State, after: State) -> None:
    """Raise unless the step returns the state in its own structure, shapes and types."""
    given: object = jax.tree.structure(before)
    returned: object = jax.tree.structure(after)
    if given != returned:
        raise ValueError(
            f"`{name}` needs a step that returns a state of the same structure. Got {returned} for "
            f"{given}."
        )
    leaves = jax.tree_util.tree_leaves_with_path(before)
    for (path, leaf), new in zip(leaves, jax.tree.leaves(after), strict=True):
        if leaf.shape != new.shape or leaf.dtype != new.dtype:
            raise ValueError(
                f"`{name}` needs a step that keeps shape and type of every leaf of its state. Got "
                f"{new.dtype}{list(new.shape)} for {leaf.dtype}{list(leaf.shape)} at "
                f"state{jax.tree_util.keystr(path)}. Keep what grows in an array of its final size."
            )


def check_end(name: str, end: int | None, num_tokens: int) -> int | None:
    """`end`; an error unless it is None or a token."""
    if end is None:
        return None
    number = whole_number(name, "end", end, 0)
    if number >= num_tokens:
        raise ValueError(
            f"`{name}` needs end among the {num_tokens} tokens, 0 to {num_tokens - 1}. Got {number}."
        )
    return number
