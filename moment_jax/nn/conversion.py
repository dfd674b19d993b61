"""Checks that a plain network can be converted without losing or inventing weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moment_jax.nn.activations import ACTIVATIONS, find_activation
from moment_jax.nn.belief import Belief

Array = jax.Array
NO_WEIGHTS = (nnx.RngState, nnx.Cache, nnx.Intermediate)


def check_kind(name: str, layer: object, kind: type) -> None:
    """Raise unless `layer` is of this very type: a subclass may compute something else."""
    if type(layer) is not kind:
        raise TypeError(
            f"`{name}` needs an nnx.{kind.__name__}. Got {type(layer).__name__}, which computes "
            "something else."
        )


def check_same(name: str, layer: object, **expected: Any) -> None:
    """Raise unless the attributes that `layer` has are these."""
    for attribute, wanted in expected.items():
        came = getattr(layer, attribute, wanted)
        if came != wanted:
            raise ValueError(
                f"`{name}` needs a {type(layer).__name__} with {attribute} == {wanted}. Got {came}. "
                "There are no moments of another one."
            )


def activation_name(name: str, network: object, given: str | None) -> str:
    """The name of a plain network's activation, found by the values of its function.

    Args:
      name: what the messages are about.
      network: a plain network, with its `activation` or without.
      given: the name that it must have; None for any.

    Raises:
      ValueError: if the function is none of those that have a name, or not the one that was given.
    """
    fn = getattr(network, "activation", None)
    known = ", ".join(ACTIVATIONS)
    if given is not None:
        find_activation(given)
    if not callable(fn):
        if given is None:
            raise ValueError(
                f"`{name}` needs a network with an `activation`. Got {type(network).__name__} without. "
                f"Say activation=..., one of {known}."
            )
        return given
    for candidate in ACTIVATIONS if given is None else (given,):
        if _same_function(fn, ACTIVATIONS[candidate].plain):
            return candidate
    wanted = f"one of {known}" if given is None else f"the activation {given!r}"
    raise ValueError(
        f"`{name}` needs {wanted}. Got {getattr(fn, '__name__', fn)}, of other values. GELU is the "
        "exact one, jax.nn.gelu(x, approximate=False)."
    )


def _same_function(a: Any, b: Any) -> bool:
    with jax.ensure_compile_time_eval():
        x = jnp.linspace(-6, 6, 49, dtype=jnp.float32)
        return bool(jnp.allclose(a(x), b(x), atol=1e-5, rtol=1e-5))


def check_loaded(name: str, module: nnx.Module, network: nnx.Module) -> None:
    """Raise unless a plain network has as many arrays, of the same sizes, as the module has beliefs."""
    beliefs = [node for _, node in nnx.iter_graph(module) if isinstance(node, Belief)]
    arrays = jax.tree.leaves(nnx.state(network, nnx.Not(nnx.Any(*NO_WEIGHTS))))
    mine, theirs = sorted(b.mean.size for b in beliefs), sorted(array.size for array in arrays)
    if mine != theirs:
        raise ValueError(
            f"`{name}` needs a network of the same arrays, {len(mine)} with {sum(mine)} numbers. Got "
            f"{len(theirs)} with {sum(theirs)}: some would be lost or invented."
        )


def check_bias(name: str, what: str, mine: object, theirs: object, neutral: str = "zeros") -> None:
    """Raise if only one of two layers has a bias (or a scale)."""
    if (mine is None) != (theirs is None):
        has, lacks = ("has none", "one") if mine is None else ("has one", "none")
        raise ValueError(
            f"`{name}` needs a layer that has a {what} where the module has one. The module {has}. Got "
            f"{lacks}. A {what} of {neutral} computes the same as none."
        )
