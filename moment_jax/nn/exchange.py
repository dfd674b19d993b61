"""`beliefs` and `set_beliefs`: exchange of posteriors between a module and its plain network."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax import posterior as families
from moment_jax.nn.base import BayesianModule
from moment_jax.nn.belief import Belief, owned_beliefs, stored_form
from moment_jax.posterior import Posterior, Reshaped

Path = tuple[str | int, ...]
FIRST = 2.5  # the first number of a probe: not 0 or 1, the constants of plain networks


def beliefs(module: BayesianModule) -> dict[Any, Any]:
    """The beliefs of a module, as a tree for its plain network, `module.mean_network()`.

    `mj.bayesian(plain, tree)` and `mj.linearised` take it, like a tree from `mj.laplace`.

    Returns:
      A tree like `nnx.to_pure_dict(nnx.state(plain, nnx.Param))`, with a `Posterior` for each array, or
      the array itself if it is a constant of the plain network.

    Raises:
      TypeError: for another module. ValueError: if an array does not belong to exactly one belief.

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
            "`beliefs` needs one belief per array of the plain network. Got one shared by "
            f"{', '.join(map(_name, twice))}. Use the module itself."
        )
    taken = {
        path: _shaped(_name(path), found[path].posterior, value.shape) if path in found else value
        for path, value in plain.items()
    }
    return nnx.traversals.unflatten_mapping(taken)


def set_beliefs(module: BayesianModule, tree: Any) -> None:
    """Set a module's beliefs from beliefs about its plain network: means, covariances and families.

    Arrays without a belief become certain. Priors stay. Families may change, so create optimisers after.

    Args:
      module: a module of `mj.nn`, which is changed.
      tree: beliefs about the arrays of its plain network, in that network's structure: from
        `mj.laplace(plain, ...)`, or `beliefs(module)`.

    Raises:
      TypeError: for another module. ValueError: if a leaf is missing, unknown, of another shape, of a
        family that the module does not support, or singular. Nothing is changed then.

    >>> import moment_jax as mj
    >>> net = mj.nn.MLP([3, 8, 2], rngs=nnx.Rngs(0))
    >>> plain, data = net.mean_network(), (jnp.ones((5, 3)), jnp.zeros(5, int))
    >>> set_beliefs(net, mj.laplace(plain, mj.objectives.Categorical(), data))
    >>> type(net.params[0].kernel).__name__
    'KroneckerEigen'
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
                    f"`set_beliefs` needs the plain network's constant at '{name}', where the module "
                    f"has no belief. Got {_said(leaf)}."
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
    """The arrays of the plain network, and their beliefs: found by means whose entries are numbered."""
    if not isinstance(module, BayesianModule):
        raise TypeError(f"Beliefs belong to a module of mj.nn. Got {type(module).__name__}.")
    owners = owned_beliefs(module)
    sizes = [owner.mean.size for owner in owners]
    firsts = np.cumsum([FIRST, *sizes[:-1]])
    probe: Any = nnx.merge(*nnx.split(module), copy=True)
    with jax.enable_x64(True):  # so that large numbers are exact
        for copy, size, first in zip(owned_beliefs(probe), sizes, firsts, strict=True):
            copy.mean.set_value(jnp.arange(float(size)).reshape(copy.mean.shape) + first)
        numbered = {p: np.asarray(x).ravel() for p, x in _arrays(probe.mean_network()).items()}
    plain, found = _arrays(module.mean_network()), {}
    for path, value in plain.items():
        numbers = numbered[path]
        if np.array_equal(numbers, np.ravel(value)):
            continue
        whose = [i for i, first in enumerate(firsts) if first == numbers[0]]
        if not whose or not np.array_equal(numbers, numbers[0] + np.arange(sizes[whose[0]])):
            raise ValueError(
                "Each array of the plain network needs a belief of the module. Got one that the module "
                f"computes at '{_name(path)}'. Use the module itself."
            )
        found[path] = owners[whose[0]]
    return plain, found


def _arrays(network: nnx.Module) -> dict[Path, Array]:
    pure = nnx.to_pure_dict(nnx.state(network, nnx.Param))
    flat: dict[Path, Array] = nnx.traversals.flatten_mapping(pure)
    return {path: x for path, x in flat.items() if x is not None}


def _shaped(name: str, leaf: Any, shape: tuple[int, ...]) -> Posterior:
    """The belief, reshaped."""
    if not isinstance(leaf, Posterior):
        leaf = families.Point(jnp.asarray(leaf))
    if isinstance(leaf, Reshaped):
        leaf = leaf.belief
    if leaf.shape == shape:
        return leaf
    if isinstance(leaf, families.Point | families.Factorized):
        return jax.tree.map(lambda x: x.reshape(shape), leaf)
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
