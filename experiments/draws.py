"""Random networks for the methods without moments: dropout and sampled weights.

Every method here is a draw: key -> arrays in place of the beliefs in a tree, such as `model.beliefs` of
`mj.Bayesian`. Training and prediction are then the same for all of them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import moment_jax as mj

Arrays = Any  # a tree with arrays in place of its beliefs
Draw = Callable[[Array], Arrays]


def function_of(network: nnx.Module) -> Callable[..., Array]:
    """(arrays in place of the parameters, inputs) -> the plain network's output."""
    split: Any = nnx.split(network, nnx.Param, ...)
    graph, params, rest = split
    form = jax.tree.structure(params)

    def apply(arrays: Arrays, *inputs: Array, **options: Any) -> Any:
        state = jax.tree.unflatten(form, jax.tree.leaves(arrays))
        own: Any = nnx.merge(graph, state, rest)
        return own(*inputs, **options)

    return apply


def means(params: Any) -> Arrays:
    """The arrays at the centre of the beliefs, and those that are certain."""
    return jax.tree.map(lambda x: x.mean if is_belief(x) else x, params, is_leaf=is_belief)


def weights(params: Any) -> Draw:
    """Every weight from its belief: sampled variational inference."""
    return lambda key: mj.posterior.sample_params(params, key)


def relative(params: Any, spread: float) -> Draw:
    """Every weight times 1 + spread * normal: dropout of single weights (Kingma et al., 2015).

    Under a log-uniform prior the KL of these beliefs depends on `spread` alone, not on the means.
    """
    leaves, form = jax.tree.flatten(means(params))

    def draw(key: Array) -> Arrays:
        pairs = zip(leaves, jax.random.split(key, len(leaves)), strict=True)
        noisy = [mean * (1 + spread * jax.random.normal(k, mean.shape)) for mean, k in pairs]
        return jax.tree.unflatten(form, noisy)

    return draw


def dropout(params: Any, rate: Array | float) -> Draw:
    """The mean network with a random share of the inputs of every kernel (in, out) dropped.

    An input that is dropped is dropped from all tokens of an example (Gal and Ghahramani, 2016); what is
    left is scaled up, so the mean stays. Biases and gains are kept whole.
    """
    leaves, form = jax.tree.flatten_with_path(means(params))

    def draw(key: Array) -> Arrays:
        arrays = []
        for number, (path, array) in enumerate(leaves):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if not name.endswith(("bias", "scale")):
                inputs = array.ndim - 1 if name.endswith("out/kernel") else 1  # heads (H, K, out)
                shape = array.shape[:inputs] + (1,) * (array.ndim - inputs)
                kept = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - rate, shape)
                array = array * kept / (1 - rate)
            arrays.append(array)
        return jax.tree.unflatten(form, arrays)

    return draw


def outputs(
    network: Callable[[Arrays, Array], Array], draw: Draw, key: Array, x: Array, groups: int
) -> Array:
    """Outputs of a mini-batch (N, ...); each of `groups` equal parts uses its own drawn network."""
    if groups == 1:  # single matrix products are faster than batched ones
        return network(draw(key), x)
    parts = x.reshape(groups, x.shape[0] // groups, *x.shape[1:])
    keys = jax.random.split(key, groups)
    result = jax.vmap(lambda key, part: network(draw(key), part))(keys, parts)
    return result.reshape(x.shape[0], *result.shape[2:])


def many(
    network: Callable[[Arrays, Array], Array], draw: Draw, key: Array, x: Array, count: int
) -> Array:
    """Outputs of `count` networks, (count, N, ...)."""
    keys = jax.random.split(key, count)
    return jax.lax.map(lambda key: network(draw(key), x), keys, batch_size=8)


def with_spreads(model: mj.Bayesian, sd: Callable[[Array], Array]) -> mj.Bayesian:
    """Set the standard deviations of all weights, a function of their means; `Factorized` only."""
    for belief in model.owned.values():
        belief.raw["scale"].set_value(jnp.log(jnp.expm1(sd(belief.mean[...]))))
    return model


def is_belief(leaf: Any) -> bool:
    """Whether a node of a tree is a belief."""
    return isinstance(leaf, mj.posterior.Posterior)


def learned_prior_kl(params: Any) -> Array:
    """KL (nats) of all beliefs to priors N(0, s^2), with the optimal s of each array.

    The best s^2 of an array (empirical Bayes, type II) is the mean of mean^2 + variance; there the KL is
    the half of sum log(s^2 / variance). `Factorized` beliefs only.
    """

    def kl(own: mj.posterior.Factorized) -> Array:
        best = jnp.mean(own.mean**2 + own.variance)
        return 0.5 * jnp.sum(jnp.log(best) - jnp.log(own.variance))

    return sum(map(kl, beliefs(params)), jnp.zeros(()))


def beliefs(params: Any) -> list[mj.posterior.Factorized]:
    """All beliefs of a tree."""
    leaves = jax.tree.leaves(params, is_leaf=is_belief)
    return [leaf for leaf in leaves if is_belief(leaf)]
