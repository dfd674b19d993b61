"""Checks that a plain network is converted without losing or inventing weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.nn.activations import ACTIVATIONS, find_activation
from moment_jax.nn.belief import Belief, owned_beliefs

NO_WEIGHTS = (nnx.RngState, nnx.Cache, nnx.Intermediate)


def check_kind(cls: Any, layer: object) -> None:
    """Raise unless `layer` has exactly the type that `cls` needs: subclasses compute other things."""
    kind = cls.flax_type
    if kind is not None and type(layer) is not kind:
        raise TypeError(
            f"`{cls.__name__}` takes the weights of an nnx.{kind.__name__}. Got "
            f"{type(layer).__name__}, which computes something else."
        )


def check_same(name: str, layer: object, **expected: Any) -> None:
    """Raise if an attribute of `layer` has another value; missing attributes are ignored."""
    for attribute, wanted in expected.items():
        found = getattr(layer, attribute, wanted)
        if found not in (wanted, (wanted,)):  # one axis may be written as a tuple
            raise ValueError(
                f"`{name}` needs a {type(layer).__name__} with {attribute} == {wanted}. Got {found}, "
                "whose moments are not implemented."
            )


def activation_name(name: str, network: object, given: str | None) -> str:
    """The name of a plain network's activation, identified by the values of its function.

    Raises a ValueError if no known activation has these values, or if they differ from those of the one
    given; a network without an attribute `activation` has the one given.
    """
    fn = getattr(network, "activation", None)
    known = ", ".join(ACTIVATIONS)
    if given is not None:
        find_activation(given)
    if not callable(fn):
        if given is None:
            raise ValueError(
                f"`{name}` needs a network with an `activation`. Got {type(network).__name__} without "
                f"one. Pass activation=..., one of {known}."
            )
        return given
    with jax.ensure_compile_time_eval():
        x = jnp.linspace(-6, 6, 49, dtype=jnp.float32)
        for candidate in ACTIVATIONS if given is None else (given,):
            if np.allclose(fn(x), ACTIVATIONS[candidate].plain(x), atol=1e-5, rtol=1e-5):
                return candidate
    wanted = f"one of {known}" if given is None else f"the activation {given!r}"
    raise ValueError(
        f"`{name}` needs {wanted}. Got {getattr(fn, '__name__', fn)}, which has other values. GELU is "
        "the exact one, jax.nn.gelu(x, approximate=False)."
    )


def check_loaded(name: str, module: nnx.Module, network: nnx.Module) -> None:
    """Raise unless the sizes of a plain network's arrays are those of the module's beliefs."""
    arrays = jax.tree.leaves(nnx.state(network, nnx.Not(nnx.Any(*NO_WEIGHTS))))
    mine = sorted(belief.mean.size for belief in owned_beliefs(module))
    theirs = sorted(array.size for array in arrays)
    if mine != theirs:
        raise ValueError(
            f"`{name}` needs a network of the same arrays, {len(mine)} with {sum(mine)} numbers. Got "
            f"{len(theirs)} with {sum(theirs)}: some would be lost or invented."
        )


def load_part(name: str, what: str, mine: Any, theirs: Any) -> None:
    """Take a belief's mean, a parameter, a module or a list from another network, if both have it."""
    if (mine is None) != (theirs is None):
        has, lacks = ("has none", "one") if mine is None else ("has one", "none")
        neutral = {"scale": "ones", "bias": "zeros"}.get(what)
        raise ValueError(
            f"`{name}` needs a network that has a {what} if the module has one. The module {has}. Got "
            f"{lacks}." + (f" A {what} of {neutral} computes the same as none." if neutral else "")
        )
    if isinstance(mine, Belief):
        set_mean(mine, theirs[...])
    elif isinstance(mine, nnx.Param):
        mine.set_value(theirs[...])
    elif isinstance(mine, nnx.List):
        if len(mine) != len(theirs):
            raise ValueError(f"`{name}` needs {len(mine)} {what}. Got {len(theirs)}.")
        for one, other in zip(mine, theirs, strict=True):
            load_part(name, what, one, other)
    elif mine is not None:
        mine.load(theirs)


def set_mean(belief: Belief, value: Array) -> None:
    """Start a belief at another mean, for instance a trained weight."""
    if value.shape != belief.mean.shape:
        raise ValueError(
            f"A belief about an array of shape {tuple(belief.mean.shape)} needs a mean of that "
            f"shape. Got {tuple(value.shape)}."
        )
    belief.mean.set_value(value.astype(belief.mean.dtype))
