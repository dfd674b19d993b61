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
    ANY_METHODS,
    CALLS,
    IN,
    KERNEL_FAMILIES,
    KEY,
    OUT,
    call_name,
    example,
    without_variance,
)

TOL = {"rtol": 1e-10, "atol": 1e-10}
calls = pytest.mark.parametrize(("family", "shape", "method"), CALLS, ids=call_name)
kernels = pytest.mark.parametrize("family", KERNEL_FAMILIES, ids=call_name)


@calls
def test_jit_changes_nothing(family, shape, method):
    belief = example(family, shape)
    np.testing.assert_allclose(jax.jit(method[1])(belief), method[1](belief), **TOL)


@calls
def test_vmap_is_a_loop(family, shape, method):
    beliefs = [example(family, shape, seed=10 * seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *beliefs)
    assert isinstance(stacked, family)
    expected = jnp.stack([method[1](belief) for belief in beliefs])
    np.testing.assert_allclose(jax.vmap(method[1])(stacked), expected, **TOL)


@calls
def test_float32_stays(family, shape, method):
    belief = example(family, shape, dtype=np.float32)
    assert method[1](belief).dtype == jnp.float32
    assert jax.jit(method[1])(belief).dtype == jnp.float32
    wide = method[1](example(family, shape))
    eps = np.finfo(np.float32).eps
    if method[0] != "sample":  # other bits are drawn in float32
        np.testing.assert_allclose(method[1](belief), wide, rtol=1e4 * eps, atol=1e3 * eps)


@kernels
@pytest.mark.parametrize("jit", [False, True])
def test_float32_stays_with_any_prior(family, jit):
    belief = example(family, dtype=np.float32)
    kl = jax.jit(lambda b, p: b.kl(p)) if jit else lambda b, p: b.kl(p)
    for prior in (GaussianPrior(), GaussianPrior(jnp.zeros(OUT), jnp.ones((IN, 1)))):
        assert kl(belief, prior).dtype == jnp.float32


@calls
def test_gradients_are_finite_without_variance(family, shape, method):
    if method[0] == "kl" and family is not Point:
        pytest.skip("infinite, tested beside the divergences")
    belief = without_variance(family, shape)
    gradient = jax.grad(lambda belief: jnp.sum(jnp.sin(1 + method[1](belief))))(belief)
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


@calls
def test_huge_values_give_no_nan(family, shape, method):
    belief = example(family, shape, dtype=np.float32)
    huge = jax.tree.map(lambda leaf: leaf * jnp.float32(1e12), belief)
    assert not jnp.any(jnp.isnan(method[1](huge)))


@kernels
def test_tree_maps_put_anything_in_the_leaves(family):
    belief = example(family)
    for leaf in (None, object(), 0, True, "name", jax.ShapeDtypeStruct((7,), jnp.float32), KEY):
        mapped = jax.tree.map(lambda _, leaf=leaf: leaf, belief)
        assert isinstance(mapped, family)
        assert all(vars(mapped)[field.name] is leaf for field in dataclasses.fields(family))
    # Summaries and factors, as optimisers keep them.
    for summary in (jnp.max, jnp.ravel, lambda leaf: leaf[..., 0]):
        assert isinstance(jax.tree.map(summary, belief), family)
    shapes = jax.eval_shape(lambda: belief)
    assert isinstance(shapes, family)
    assert shapes.shape == (IN, OUT)


@kernels
def test_fields_are_named_by_tree_paths(family):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(example(family))]
    assert paths == [f".{field.name}" for field in dataclasses.fields(family)]


@kernels
def test_axes_axis_numbers_and_none_are_allowed_by_hand(family):
    """As for `jax.vmap(in_axes=...)`, and for beliefs that are stacked along leading axes."""
    num_fields = len(dataclasses.fields(family))
    for leaf in (0, None, jax.ShapeDtypeStruct((7,), jnp.float32)):
        assert isinstance(family(*[leaf] * num_fields), family)
    stacked = [jnp.stack([leaf, leaf]) for leaf in jax.tree.leaves(example(family))]
    axes = family(*[0] * num_fields)
    assert jax.vmap(ANY_METHODS["sample"], in_axes=(axes,))(family(*stacked)).shape == (2, IN, OUT)


@kernels
def test_derivatives_are_beliefs_with_more_axes(family):
    belief = example(family, (2, 1))
    hessian = jax.jit(jax.hessian(ANY_METHODS["kl"]))(belief)
    assert isinstance(hessian, family)
    assert hessian.mean.mean.shape == (2, 1, 2, 1)
    for jacobian in (jax.jacrev, jax.jacfwd):
        assert jacobian(ANY_METHODS["marginal_variance"])(belief).mean.shape == (2, 1, 2, 1)


@kernels
def test_vmap_may_put_the_new_axis_anywhere(family):
    belief = example(family)

    def scaled(scale):
        return jax.tree.map(lambda leaf: scale * leaf, belief)

    for axis in (0, 1, -1):
        assert isinstance(jax.vmap(scaled, out_axes=axis)(jnp.ones((2,))), family)


@kernels
def test_scan_over_layers(family):
    beliefs = [example(family, (2, 2), seed=10 * seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *beliefs)
    total, _ = jax.lax.scan(
        lambda total, belief: (total + ANY_METHODS["kl"](belief), None), 0.0, stacked
    )
    np.testing.assert_allclose(total, sum(map(ANY_METHODS["kl"], beliefs)), **TOL)


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
        for method in ANY_METHODS.values():
            assert isinstance(method(belief), jax.Array)
