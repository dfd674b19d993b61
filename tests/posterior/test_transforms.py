"""Every family and method under jit, vmap, grad and tree maps, and in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.posterior import (
    Factorized,
    FullNormal,
    GaussianPrior,
    MatrixNormal,
    OutputShared,
    Point,
)
from tests.posterior.families import (
    IN,
    KERNEL_FAMILIES,
    KEY,
    MEMBERS,
    OUT,
    RANDOM_FAMILIES,
    TOL,
    all_methods,
    compiled_methods,
    example,
    name_of,
    stack,
    without_variance,
)

members = pytest.mark.parametrize(("family", "shape"), MEMBERS, ids=name_of)
kernels = pytest.mark.parametrize("family", KERNEL_FAMILIES, ids=name_of)


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name in actual:
        np.testing.assert_allclose(actual[name], expected[name], err_msg=name, **TOL)


@members
def test_jit_changes_nothing(family, shape):
    belief = example(family, shape)
    assert_same(compiled_methods(belief), all_methods(belief))


@members
def test_vmap_is_a_loop(family, shape):
    beliefs = [example(family, shape, seed=10 * seed) for seed in range(3)]
    actual = jax.jit(jax.vmap(all_methods))(stack(beliefs))
    for i, belief in enumerate(beliefs):
        assert_same({name: leaf[i] for name, leaf in actual.items()}, compiled_methods(belief))


@members
def test_float32_stays(family, shape):
    narrow = example(family, shape, dtype=np.float32)
    prior = GaussianPrior(jnp.zeros(()), jnp.ones(shape[-1]))  # of float64
    results = jax.eval_shape(lambda belief: (all_methods(belief), belief.kl(prior)), narrow)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(results))
    assert jax.eval_shape(lambda b, p: b.kl(p), narrow, GaussianPrior()).dtype == jnp.float32


@kernels
def test_float32_is_as_good_as_its_digits(family):
    narrow = compiled_methods(example(family, dtype=np.float32))
    eps = float(np.finfo(np.float32).eps)
    for name, wide in compiled_methods(example(family)).items():
        if name != "sample":  # whose random bits are others
            scale = max(1, np.max(np.abs(wide)))
            assert np.max(np.abs(narrow[name] - wide)) <= 100 * eps * scale, name


@members
def test_gradients_are_finite_without_variance(family, shape):
    def total(belief):
        results = all_methods(belief)
        if family is not Point:
            del results["kl"]  # infinite, tested beside the divergences
        return sum(jnp.sum(jnp.sin(1 + leaf)) for leaf in results.values())

    gradient = jax.jit(jax.grad(total))(without_variance(family, shape))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


@kernels
def test_huge_values_give_no_nan(family):
    narrow = example(family, dtype=np.float32)
    for scale in (1e4, 1e12, 1e25):
        huge = jax.tree.map(lambda leaf, scale=scale: np.asarray(leaf) * np.float32(scale), narrow)
        for name, leaf in compiled_methods(huge).items():
            assert not np.any(np.isnan(leaf)), (name, scale)


@kernels
def test_tree_maps_put_anything_in_the_leaves(family):
    belief = example(family)
    for leaf in (None, object(), 0, True, "name", jax.ShapeDtypeStruct((7,), jnp.float32), KEY):
        mapped = jax.tree.map(lambda _, leaf=leaf: leaf, belief)
        assert isinstance(mapped, family)
        assert all(vars(mapped)[field.name] is leaf for field in dataclasses.fields(family))
    # Summaries and factors, as optimisers keep them.
    for summary in (np.max, np.ravel, lambda leaf: leaf[..., 0]):
        assert isinstance(jax.tree.map(summary, belief), family)
    shapes = jax.eval_shape(lambda: belief)
    assert isinstance(shapes, family)
    assert shapes.shape == (IN, OUT)


@kernels
def test_fields_are_named_by_tree_paths(family):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(example(family))]
    assert paths == [f".{field.name}" for field in dataclasses.fields(family)]


@kernels
def test_axis_numbers_and_stacks_may_be_made_by_hand(family):
    """As `jax.vmap(in_axes=...)` takes them, and as `stack` makes them."""
    num_fields = len(dataclasses.fields(family))
    for leaf in (0, None, jax.ShapeDtypeStruct((7,), jnp.float32)):
        assert isinstance(family(*[leaf] * num_fields), family)
    axes, stacked = family(*[0] * num_fields), stack([example(family)] * 2)
    draw = jax.vmap(lambda belief: belief.sample(KEY), in_axes=(axes,))
    assert jax.eval_shape(draw, stacked).shape == (2, IN, OUT)


@pytest.mark.parametrize("family", RANDOM_FAMILIES, ids=name_of)
def test_derivatives_are_beliefs_with_more_axes(family):
    belief = example(family)
    hessian = jax.eval_shape(jax.hessian(lambda belief: belief.kl(GaussianPrior())), belief)
    assert isinstance(hessian, family)
    assert hessian.mean.mean.shape == (IN, OUT, IN, OUT)
    for jacobian in (jax.jacrev, jax.jacfwd):
        result = jax.eval_shape(jacobian(lambda belief: belief.marginal_variance()), belief)
        assert result.mean.shape == (IN, OUT, IN, OUT)


@kernels
def test_vmap_may_put_the_new_axis_anywhere(family):
    belief = example(family)

    def scaled(scale):
        return jax.tree.map(lambda leaf: scale * leaf, belief)

    for axis in (0, 1, -1):
        stacked = jax.eval_shape(jax.vmap(scaled, out_axes=axis), jnp.ones((4,)))
        assert stacked.mean.shape[axis] == 4


@kernels
def test_scan_over_layers(family):
    beliefs = [example(family, seed=10 * seed) for seed in range(3)]
    prior = GaussianPrior(0.25, 0.5)
    total, _ = jax.lax.scan(
        lambda total, belief: (total + belief.kl(prior), None), 0.0, stack(beliefs)
    )
    expected = sum(float(compiled_methods(belief)["kl"]) for belief in beliefs)
    np.testing.assert_allclose(total, expected, **TOL)


@kernels
def test_beliefs_are_immutable(family):
    with pytest.raises(dataclasses.FrozenInstanceError):
        example(family).mean = 0


def test_numpy_arrays_are_welcome():
    mean = np.ones((IN, OUT))
    for belief in (
        Point(mean),
        Factorized(mean, mean),
        OutputShared(mean, np.ones(OUT)),
        MatrixNormal(mean, np.eye(IN), np.eye(OUT)),
        FullNormal(mean, np.eye(IN * OUT).reshape(IN, OUT, IN, OUT)),
    ):
        results = all_methods(belief)
        assert all(isinstance(leaf, jax.Array) for leaf in results.values())
        assert_same(results, compiled_methods(belief))
