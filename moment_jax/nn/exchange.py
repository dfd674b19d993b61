"""`beliefs` and `set_beliefs`: posteriors of a plain network out of a module of `mj.nn` and into it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moment_jax import posterior as families
from moment_jax.nn.base import BayesianModule
from moment_jax.nn.belief import Belief, stored_form
from moment_jax.posterior import Posterior, Reshaped

Array = jax.Array
Path = tuple[str | int, ...]
FIRST = 2.5  # a belief's number in a probe; zeros and ones are constants of plain networks


def beliefs(module: BayesianModule) -> dict[Any, Any]:
    """What a module believes, as a tree for its plain network, `module.mean_network()`.

    `mj.bayesian(plain, tree)` and `mj.linearised` take it, as a tree from `mj.posterior.laplace`.

    Args:
      module: a module of `mj.nn`.

    Returns:
      A tree as `nnx.to_pure_dict(nnx.state(plain, nnx.Param))`, with a `Posterior` at each array, and
      an array where the plain network has a constant.

    Raises:
      TypeError: for another module. ValueError: if an array of the plain network is not one belief's.

    >>> import moment_jax as mj
    >>> net = mj.nn.MLP([3, 8, 2], rngs=nnx.Rngs(0))
    >>> x = jnp.ones((4, 3))
    >>> mean, cov = mj.bayesian(net.mean_network(), mj.nn.beliefs(net))(x)
    >>> bool(jnp.allclose(mean, jax.vmap(lambda x: net(x[None])[0][0])(x), atol=1e-5))
    True
    """
    plain, found = _places(module)
    twice = [p for p, b in found.items() if sum(b is other for other in found.values()) > 1]
    if twice:
        raise ValueError(
            "`beliefs` needs a belief for each array of the plain network. Got one for all of "
            f"{', '.join(map(_name, twice))}. Use the module itself."
        )
    taken = {
        path: _shaped(_name(path), found[path].posterior, value.shape) if path in found else value
        for path, value in plain.items()
    }
    return nnx.traversals.unflatten_mapping(taken)


def set_beliefs(module: BayesianModule, tree: Any) -> None:
    """Put beliefs about the plain network into a module: means, covariances and families.

    Arrays without a belief become certain. Priors stay. As families may change, make optimisers after.

    Args:
      module: a module of `mj.nn`, which is changed.
      tree: beliefs about its plain network's arrays, of that one's structure: from
        `mj.posterior.laplace(plain, ...)`, `swag`, or `beliefs(module)`.

    Raises:
      TypeError: for another module. ValueError: if a leaf is missing or unknown, of another shape, of a
        family that the module cannot hold, or singular; then nothing is changed.

    >>> import moment_jax as mj
    >>> net = mj.nn.MLP([3, 8, 2], rngs=nnx.Rngs(0))
    >>> plain, data = net.mean_network(), (jnp.ones((5, 3)), jnp.zeros(5, int))
    >>> set_beliefs(net, mj.posterior.laplace(plain, mj.objectives.Categorical(), data))
    >>> type(net.params[0].kernel).__name__
    'MatrixNormal'
    """
    plain, found = _places(module)
    pure = nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree
    given = nnx.traversals.flatten_mapping(pure) if isinstance(pure, dict) else {(): pure}
    given = {path: leaf for path, leaf in given.items() if leaf is not None}
    odd = sorted(_name(p) for p in set(given) ^ set(plain))
    if odd:
        raise ValueError(
            "`set_beliefs` needs a leaf for each array of the plain network, and no other. Got "
            f"{', '.join(odd)} in one of them alone. Start from mj.nn.beliefs(module)."
        )
    new: list[tuple[Belief, Posterior]] = []
    for path, leaf in given.items():
        name, shape = _name(path), plain[path].shape
        if tuple(jnp.shape(leaf.mean if isinstance(leaf, Posterior) else leaf)) != shape:
            raise ValueError(f"`set_beliefs` needs shape {shape} at '{name}'. Got {_said(leaf)}.")
        if path not in found:
            fixed = not isinstance(leaf, Posterior) and np.array_equal(leaf, plain[path])
            if not fixed:
                raise ValueError(
                    f"`set_beliefs` needs the plain network's constant at '{name}', about which the "
                    f"module has no belief. Got {_said(leaf)}."
                )
            continue
        belief = _shaped(name, leaf, found[path].mean.shape)
        try:
            stored_form(belief)
        except ValueError as error:
            raise ValueError(f"`set_beliefs`: {error} It is at '{name}'.") from error
        new.append((found[path], belief))
    for owner, belief in new:
        owner.hold(belief)


def _places(module: Any) -> tuple[dict[Path, Array], dict[Path, Belief]]:
    """The arrays of the plain network, and whose each is: found by a probe with numbers for means."""
    if not isinstance(module, BayesianModule):
        raise TypeError(f"Beliefs are of a module of mj.nn. Got {type(module).__name__}.")
    owners = _owners(module)

    def probe(numbers: Any) -> dict[Path, Array]:
        copy: Any = nnx.merge(*nnx.split(module), copy=True)
        for i, owner in enumerate(_owners(copy)):
            owner.mean.set_value(numbers(i, owner.mean.shape).astype(owner.mean.dtype))
        return _arrays(copy.mean_network())

    whose = probe(lambda i, shape: jnp.full(shape, i + FIRST))
    order = probe(lambda i, shape: jnp.arange(np.prod(shape, dtype=int)).reshape(shape) + FIRST)
    plain, found = _arrays(module.mean_network()), {}
    for path, value in plain.items():
        number = float(whose[path].ravel()[0]) - FIRST
        if np.array_equal(whose[path], value) and np.array_equal(order[path], value):
            continue
        in_order = np.arange(value.size) + FIRST
        if number not in range(len(owners)) or not (
            np.all(whose[path] == number + FIRST) and np.array_equal(order[path].ravel(), in_order)
        ):
            raise ValueError(
                f"A belief about an array of the plain network has to be one of the module's. Got one "
                f"that the module computes at '{_name(path)}'. Use the module itself."
            )
        found[path] = owners[int(number)]
    return plain, found


def _owners(module: nnx.Module) -> list[Belief]:
    return [node for _, node in nnx.iter_graph(module) if isinstance(node, Belief)]


def _arrays(network: nnx.Module) -> dict[Path, Array]:
    pure = nnx.to_pure_dict(nnx.state(network, nnx.Param))
    flat: dict[Path, Array] = nnx.traversals.flatten_mapping(pure)
    return {path: x for path, x in flat.items() if x is not None}


def _shaped(name: str, leaf: Any, shape: tuple[int, ...]) -> Posterior:
    """The belief with its entries in this shape."""
    if not isinstance(leaf, Posterior):
        leaf = families.Point(jnp.asarray(leaf))
    if isinstance(leaf, Reshaped):
        leaf = leaf.belief
    if leaf.shape == shape:
        return leaf
    if isinstance(leaf, families.Point):
        return families.Point(leaf.mean.reshape(shape))
    if isinstance(leaf, families.Factorized):
        return families.Factorized(leaf.mean.reshape(shape), leaf.variance.reshape(shape))
    if isinstance(leaf, families.FullNormal):
        return families.FullNormal(leaf.mean.reshape(shape), leaf.cov.reshape(*shape, *shape))
    if leaf.mean.size == np.prod(shape):
        return Reshaped(leaf, shape)
    raise ValueError(f"A belief of shape {shape} is needed at '{name}'. Got {_said(leaf)}.")


def _said(leaf: Any) -> str:
    kind = type(leaf.belief if isinstance(leaf, Reshaped) else leaf).__name__
    return f"{kind} of shape {tuple(np.shape(leaf.mean if isinstance(leaf, Posterior) else leaf))}"


def _name(path: Path) -> str:
    return "/".join(map(str, path))
