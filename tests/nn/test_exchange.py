"""Beliefs moved between modules and plain networks: the same distribution, or an error."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax import posterior as families
from tests.builders import KERNEL_FAMILIES, tiny_vision

SETTINGS = {"structure": mj.Diagonal}
X = jax.random.normal(jax.random.key(0), (3, 4))


def mlp(family=families.Factorized, seed=0):
    return mj.nn.MLP([4, 6, 2], posterior=family, rngs=nnx.Rngs(seed), **SETTINGS)


def scattered(module):
    """The module with a different spread for each weight, as after training."""
    rng, state = np.random.default_rng(5), nnx.state(module, mj.nn.VariationalScale)
    noise = jax.tree.map(lambda raw: 0.05 * rng.normal(size=raw.shape).astype(raw.dtype), state)
    nnx.update(module, jax.tree.map(jnp.add, state, noise))
    return module


def is_belief(x):
    return isinstance(x, mj.posterior.Posterior)


def assert_same(module, other):
    mine, theirs = (jax.tree.leaves(m.params, is_leaf=is_belief) for m in (module, other))
    assert [type(a) for a in mine] == [type(b) for b in theirs]
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def pair(make, **options):
    return [make(rngs=nnx.Rngs(seed), **options, **SETTINGS) for seed in (0, 1)]


PAIRS = {
    **{family.__name__: lambda f=family: (mlp(f), mlp(seed=1)) for family in KERNEL_FAMILIES},
    "vit": lambda: pair(tiny_vision),
    "encoder": lambda: pair(mj.nn.Encoder, num_blocks=2, num_features=4, num_heads=2),
}


@pytest.mark.parametrize("make", PAIRS.values(), ids=PAIRS)
def test_what_is_put_in_is_what_is_taken_out(make):
    module, other = make()
    mj.nn.set_beliefs(other, mj.nn.beliefs(scattered(module)))
    assert_same(module, other)


def test_both_sides_have_the_same_moments():
    module = scattered(mlp())
    tree = mj.nn.beliefs(module)
    mean, cov = mj.bayesian(module.mean_network(), tree, structure=mj.Diagonal)(X)
    here, there = jax.vmap(lambda x: module(x[None]))(X)
    np.testing.assert_allclose(mean, here[:, 0], atol=1e-5)
    np.testing.assert_allclose(cov.variance(), there.variance(), rtol=1e-4)


@pytest.mark.usefixtures("ranks_of_a_user")
def test_a_laplace_approximation_of_the_plain_twin():
    module = mj.nn.MultiHeadAttention(4, 2, rngs=nnx.Rngs(0), **SETTINGS)
    plain, x = module.mean_network(), X[None]
    belief = mj.laplace(plain, mj.objectives.Gaussian(1.0), (x, x), prior_precision=10.0)
    mj.nn.set_beliefs(module, belief)

    @jax.jit
    def variances(tree):
        return jax.tree.map(lambda b: b.marginal_variance(), tree, is_leaf=is_belief)

    every = (variances(tree) for tree in (belief, mj.nn.beliefs(module)))
    for a, b in zip(*map(jax.tree.leaves, every), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


def changed(path, leaf):
    tree = mj.nn.beliefs(mlp())
    flat = nnx.traversals.flatten_mapping(tree)
    (key,) = (k for k in flat if "/".join(map(str, k)).endswith(path))
    return nnx.traversals.unflatten_mapping(
        {k: leaf if k == key else v for k, v in flat.items() if k != key or leaf is not None}
    )


SINGULAR = families.MatrixNormal(jnp.zeros((4, 6)), jnp.zeros((4, 4)), jnp.eye(6))
SHIFTED = families.Reshaped(families.Factorized(jnp.zeros(24), jnp.ones(24)), (4, 6))


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (None, "0/kernel in one of them alone"),
        (jnp.zeros((6, 4)), r"shape \(4, 6\) at '.*0/kernel'. Got .* shape \(6, 4\)"),
        (SINGULAR, "positive definite.*0/kernel"),
        (families.Reshaped(families.OutputShared(jnp.zeros((6, 4)), jnp.ones(4)), (4, 6)),
         "own shape. Got OutputShared.*0/kernel"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_is_changed(leaf, words):
    module = mlp(seed=1)
    before = jax.tree.leaves(nnx.state(module))
    with pytest.raises(ValueError, match=words):
        mj.nn.set_beliefs(module, changed("0/kernel", leaf))
    for a, b in zip(before, jax.tree.leaves(nnx.state(module)), strict=True):
        assert np.array_equal(a, b)


def test_entries_in_a_row_fit():
    module = mlp()
    mj.nn.set_beliefs(module, changed("0/kernel", SHIFTED))
    np.testing.assert_allclose(module.params[0].kernel.variance, 1, rtol=1e-5)


def test_other_modules_are_refused():
    with pytest.raises(TypeError, match="Got Linear"):
        mj.nn.beliefs(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
