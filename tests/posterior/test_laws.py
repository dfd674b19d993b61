"""Moments and draws of every family, its methods under JAX's transformations, and in float32."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.layers import DenseParams, EncoderBlockParams
from moment_jax.posterior import GaussianPrior, sample_params
from tests.builders import KERNEL_FAMILIES, random_block, random_psd, random_vector
from tests.posterior import families as of
from tests.posterior.families import IN, KERNEL, KEY, MEMBERS, OUT, TOL, example, name_of, random

Point, Factorized, OutputShared, KroneckerEigen, FullNormal = KERNEL_FAMILIES
NUM_SAMPLES = 20_000
TREE_KEY = jax.random.key(0)  # of the others, draws together are other ones
members = pytest.mark.parametrize(("family", "shape"), MEMBERS, ids=name_of)
kernels = pytest.mark.parametrize("family", KERNEL_FAMILIES, ids=name_of)
random_kernels = pytest.mark.parametrize("family", of.RANDOM_FAMILIES, ids=name_of)

# -- moments ------------------------------------------------------------------------------------------


def as_matrix(cov):
    return np.diag(cov) if cov.ndim == 1 else cov


@members
def test_second_moments_are_those_of_the_dense_covariance(family, shape):
    belief = example(family, shape)
    cov, results = of.dense_cov(belief), of.compiled_methods(belief)
    assert belief.shape == shape
    np.testing.assert_allclose(np.ravel(results["marginal_variance"]), np.diag(cov), **TOL)
    matrix = np.ravel(belief.matrix.marginal_variance())
    np.testing.assert_array_equal(matrix, np.ravel(belief.marginal_variance()))
    if len(shape) == 1:
        assert results["vector_cov"].ndim == (2 if family is FullNormal else 1)
        np.testing.assert_allclose(as_matrix(results["vector_cov"]), cov, **TOL)
    if len(shape) == 2:
        cov = cov.reshape(*shape, *shape)
        mean, variance, moment = of.method_inputs(belief)
        second = np.einsum("...i,...j->...ij", mean, mean) + variance[..., None] * np.eye(IN)
        metric = results["input_metric"]
        assert metric.ndim == (1 if belief.uncorrelated else 2)
        for actual, path, *operands in (
            (results["noise_variance"], "...ij,iojo->...o", second, cov),
            (results["noise_block"], "...ij,iojp->...op", moment, cov),
            (as_matrix(metric), "iojo->ij", cov),
        ):
            np.testing.assert_allclose(actual, np.einsum(path, *operands), **TOL)


@random_kernels
def test_no_variance_is_a_point(family):
    """Except for `kl`, whose convention is tested in test_kl.py."""
    expected, actual = (
        of.compiled_methods(example(Point)),
        of.compiled_methods(of.without_variance(family)),
    )
    for name in set(actual) - {"kl", "input_metric"}:
        np.testing.assert_array_equal(actual[name], expected[name])
    assert not np.any(actual["input_metric"])


@jax.jit
def slopes(belief):
    """Of all results but `kl`; for kernels, of the noise variance, and of a loss of a draw, with it."""

    def total(belief):
        results = of.all_methods(belief)
        del results["kl"]  # infinite without variance; see test_kl.py
        return sum(jnp.sum(jnp.sin(1 + leaf)) for leaf in results.values())

    if len(belief.shape) != 2:
        return {"total": jax.grad(total)(belief)}
    inputs, target = of.method_inputs(belief)[:2], random(9, IN, OUT)

    def noise(belief):
        return jnp.sum(belief.noise_variance(*inputs))

    def loss(belief):
        return jnp.sum((belief.sample(KEY) - target) ** 2)

    return {
        "total": jax.grad(total)(belief),
        "noise": jax.grad(noise)(belief),
        "draw": jax.value_and_grad(loss)(belief),
    }


@members
def test_gradients_are_finite_without_variance(family, shape):
    gradient = slopes(of.without_variance(family, shape))["total"]
    chex.assert_tree_all_finite(gradient)


@kernels
def test_sample_gradients(family):
    """The draw is reparametrised: its gradient against finite differences."""
    of.assert_gradient(lambda b: slopes(b)["draw"], example(family), example(family, seed=5))


@random_kernels
def test_noise_variance_has_its_whole_gradient_at_zero(family):
    """It is linear in each covariance, so its gradient there is the same at zero as elsewhere."""
    belief = example(family)
    name = of.covariances(family)[0]
    certain = dataclasses.replace(belief, **{name: jnp.zeros_like(getattr(belief, name))})
    expected, actual = (getattr(slopes(b)["noise"], name) for b in (belief, certain))
    np.testing.assert_allclose(actual, expected, **TOL)


def test_rounding_leaves_no_negative_noise_variance():
    """For inputs in the null space of a singular covariance only rounding is left."""
    noise = jax.jit(lambda belief, mean: belief.noise_variance(mean, np.zeros(IN)))
    for seed in range(50):
        basis, _ = np.linalg.qr(random(seed, IN, IN))
        in_cov = np.outer(basis[:, 0], basis[:, 0]) * 1e6
        cov = np.einsum("ij,op->iojp", in_cov, np.eye(OUT))
        found = noise(FullNormal(np.zeros((IN, OUT)), cov), basis[:, 1])
        assert np.all(np.asarray(found) >= 0)


# -- draws --------------------------------------------------------------------------------------------

BELIEFS = {
    **{f"{name_of(family)}-{name_of(shape)}": example(family, shape) for family, shape in MEMBERS},
    "FullNormal-singular": FullNormal(
        np.zeros(KERNEL), random_psd(TREE_KEY, 6, rank=1).reshape(2 * KERNEL)
    ),
    "KroneckerEigen-rows": example(KroneckerEigen).rows(np.array([2, 0])),
}
draw = jax.jit(lambda belief, keys: jax.vmap(belief.sample)(keys))


@pytest.mark.parametrize("belief", BELIEFS.values(), ids=BELIEFS)
def test_sample_moments(belief):
    """Without variance: see `test_no_variance_is_a_point`."""
    draws = draw(belief, jax.random.split(jax.random.key(3), NUM_SAMPLES))
    deviations = np.asarray(draws).reshape(NUM_SAMPLES, -1) - np.ravel(belief.mean)
    cov = of.dense_cov(belief)
    variance = np.diag(cov)
    mean_error = np.sqrt(variance / NUM_SAMPLES)
    cov_error = np.sqrt((np.outer(variance, variance) + cov**2) / NUM_SAMPLES)
    rounding = 100 * np.finfo(np.float64).eps * max(1, np.max(variance))
    assert np.all(np.abs(deviations.mean(0)) <= 5 * mean_error + rounding)
    sampled = deviations.T @ deviations / NUM_SAMPLES
    assert np.all(np.abs(sampled - cov) <= 5 * cov_error + rounding)


# -- draws of a whole tree of beliefs -----------------------------------------------------------------

draw_tree = jax.jit(sample_params)


def test_sample_params_keeps_the_tree():
    params = random_block(TREE_KEY, 4, 6, family=Point)
    shapes = jax.eval_shape(sample_params, params, TREE_KEY)
    assert isinstance(shapes, EncoderBlockParams)
    assert shapes.attention.query.kernel.shape == params.attention.query.kernel.shape
    beliefs = {"certain": DenseParams(Point(np.ones((2, 3)))), "other": (np.arange(3), None)}
    drawn = draw_tree(beliefs, TREE_KEY)
    assert drawn["certain"].bias is None
    assert drawn["other"][1] is None
    np.testing.assert_array_equal(drawn["certain"].kernel, np.ones((2, 3)))
    np.testing.assert_array_equal(drawn["other"][0], np.arange(3))
    assert sample_params({}, TREE_KEY) == {}


def test_sample_params_draws_each_leaf_with_its_own_key():
    """Also where leaves alike in family and shape are drawn together, and others lie between them."""
    keys = jax.random.split(TREE_KEY, 3)
    beliefs = [random_vector(k, Factorized, n) for k, n in zip(keys, (2, 3, 2), strict=True)]
    got = draw_tree(beliefs, TREE_KEY)

    @jax.jit
    def one_by_one(beliefs):
        keys = jax.random.split(TREE_KEY, 3)
        return [belief.sample(key) for belief, key in zip(beliefs, keys, strict=True)]

    for one, wanted in zip(got, one_by_one(beliefs), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-14)
    for one in (Factorized(np.zeros(2), np.ones(2)), OutputShared(np.zeros((1, 2)), np.ones(2))):
        first, second = draw_tree((one, one), TREE_KEY)
        assert first.shape == one.shape
        assert not np.any(np.asarray(first) == np.asarray(second))


# -- transformations, tree maps and float32 ---------------------------------------------------------


@pytest.mark.parametrize(("family", "shape"), MEMBERS[:-3], ids=name_of)
def test_numpy_arrays_are_welcome_and_vmap_is_a_loop(family, shape):
    beliefs = [example(family, shape, seed=10 * seed) for seed in range(3)]
    by_numpy = jax.eval_shape(lambda: of.all_methods(jax.tree.map(np.asarray, beliefs[0])))
    batch = jax.jit(jax.vmap(of.all_methods))(of.stack(beliefs))
    assert by_numpy.keys() == batch.keys()
    for i, belief in enumerate(beliefs):
        for name, expected in of.compiled_methods(belief).items():
            np.testing.assert_allclose(batch[name][i], expected, err_msg=name, **TOL)
            assert by_numpy[name].shape == expected.shape


@members
def test_float32_stays(family, shape):
    narrow = example(family, shape, dtype=np.float32)
    prior = GaussianPrior(np.zeros(()), np.ones(shape[-1]))  # of float64
    results = jax.eval_shape(lambda belief: (of.all_methods(belief), belief.kl(prior)), narrow)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(results))
    assert jax.eval_shape(lambda b, p: b.kl(p), narrow, GaussianPrior()).dtype == jnp.float32


@kernels
def test_float32_is_as_good_as_its_digits_and_huge_values_give_no_nan(family):
    belief = example(family, dtype=np.float32)
    narrow = of.compiled_methods(belief)
    eps = float(np.finfo(np.float32).eps)
    for name, wide in of.compiled_methods(example(family)).items():
        if name != "sample":  # whose random bits are others
            scale = max(1, np.max(np.abs(wide)))
            assert np.max(np.abs(narrow[name] - np.asarray(wide))) <= 100 * eps * scale, name
    for scale in (1e4, 1e12, 1e25):
        names = ["mean", *of.covariances(family)]
        fields = {n: np.asarray(getattr(belief, n)) * np.float32(scale) for n in names}
        huge = dataclasses.replace(belief, **fields)
        for name, leaf in of.compiled_methods(huge).items():
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
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(belief)]
    assert paths == [f".{name}" for name in names]
    with pytest.raises(dataclasses.FrozenInstanceError):
        belief.mean = 0
    axes, stacked = family(*[0] * len(names)), of.stack([belief] * 2)
    draw = jax.vmap(lambda belief: belief.sample(KEY), in_axes=(axes,))
    assert jax.eval_shape(draw, stacked).shape == (2, IN, OUT)
    hessian = jax.eval_shape(jax.hessian(lambda b: b.kl(of.PRIOR)), belief)  # more axes
    assert hessian.mean.mean.shape == (IN, OUT, IN, OUT)
