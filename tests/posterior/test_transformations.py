"""Beliefs under JAX's transformations and tree maps, and in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.posterior import GaussianPrior
from tests.builders import KERNEL_FAMILIES
from tests.posterior.families import (
    IN,
    KEY,
    MEMBERS,
    OUT,
    PRIOR,
    TOL,
    all_methods,
    compiled_methods,
    covariances,
    example,
    name_of,
    stack,
)

members = pytest.mark.parametrize(("family", "shape"), MEMBERS, ids=name_of)
kernels = pytest.mark.parametrize("family", KERNEL_FAMILIES, ids=name_of)


@pytest.mark.parametrize(("family", "shape"), MEMBERS[:-3], ids=name_of)
def test_numpy_arrays_are_welcome_and_vmap_is_a_loop(family, shape):
    by_numpy = jax.eval_shape(lambda: all_methods(example(family, shape, array=np.asarray)))
    beliefs = [example(family, shape, seed=10 * seed) for seed in range(3)]
    batch = jax.jit(jax.vmap(all_methods))(stack(beliefs))
    assert by_numpy.keys() == batch.keys()
    for i, belief in enumerate(beliefs):
        for name, expected in compiled_methods(belief).items():
            np.testing.assert_allclose(batch[name][i], expected, err_msg=name, **TOL)
            assert by_numpy[name].shape == expected.shape


@members
def test_float32_stays(family, shape):
    narrow = example(family, shape, dtype=np.float32)
    prior = GaussianPrior(np.zeros(()), np.ones(shape[-1]))  # of float64
    results = jax.eval_shape(lambda belief: (all_methods(belief), belief.kl(prior)), narrow)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(results))
    assert jax.eval_shape(lambda b, p: b.kl(p), narrow, GaussianPrior()).dtype == jnp.float32


@kernels
def test_float32_is_as_good_as_its_digits_and_huge_values_give_no_nan(family):
    belief = example(family, dtype=np.float32)
    narrow = compiled_methods(belief)
    eps = float(np.finfo(np.float32).eps)
    for name, wide in compiled_methods(example(family)).items():
        if name != "sample":  # whose random bits are others
            scale = max(1, np.max(np.abs(wide)))
            assert np.max(np.abs(narrow[name] - np.asarray(wide))) <= 100 * eps * scale, name
    for scale in (1e4, 1e12, 1e25):
        names = ["mean", *covariances(family)]
        fields = {n: np.asarray(getattr(belief, n)) * np.float32(scale) for n in names}
        huge = dataclasses.replace(belief, **fields)
        for name, leaf in compiled_methods(huge).items():
            assert not np.any(np.isnan(leaf)), (name, scale)


@kernels
def test_anything_may_be_in_the_leaves(family):
    """By tree maps, and by hand: axis numbers, as `jax.vmap(in_axes=...)` takes them, and stacks."""
    belief = example(family)
    names = [field.name for field in dataclasses.fields(family)]
    for leaf in (None, object(), 0, True, "name", jax.ShapeDtypeStruct((7,), jnp.float32), KEY):
        mapped = jax.tree.map(lambda _, leaf=leaf: leaf, belief)
        assert isinstance(mapped, family)
        assert all(vars(mapped)[name] is leaf for name in names)
    # Summaries and factors, as optimisers keep them.
    for summary in (np.max, np.ravel, lambda leaf: np.asarray(leaf)[..., 0]):
        assert isinstance(jax.tree.map(summary, belief), family)
    shapes = jax.eval_shape(lambda: belief)
    assert isinstance(shapes, family)
    assert shapes.shape == (IN, OUT)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(belief)]
    assert paths == [f".{name}" for name in names]
    with pytest.raises(dataclasses.FrozenInstanceError):
        belief.mean = 0
    axes, stacked = family(*[0] * len(names)), stack([belief] * 2)
    draw = jax.vmap(lambda belief: belief.sample(KEY), in_axes=(axes,))
    assert jax.eval_shape(draw, stacked).shape == (2, IN, OUT)
    hessian = jax.eval_shape(jax.hessian(lambda b: b.kl(PRIOR)), belief)  # more axes
    assert hessian.mean.mean.shape == (IN, OUT, IN, OUT)
