"""Moments and draws of every family, its methods under JAX's transformations, and in float32."""

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
from moment_jax.posterior.linalg import psd_sqrt
from tests.builders import KERNEL_FAMILIES
from tests.posterior.families import (
    IN,
    KEY,
    MEMBERS,
    NUM_SAMPLES,
    OUT,
    RANDOM_FAMILIES,
    TOL,
    all_methods,
    assert_gradient,
    compiled_methods,
    dense_cov,
    dense_kernel_cov,
    draws,
    example,
    method_inputs,
    name_of,
    random,
    random_psd,
    stack,
    without_variance,
)

members = pytest.mark.parametrize(("family", "shape"), MEMBERS, ids=name_of)
kernels = pytest.mark.parametrize("family", KERNEL_FAMILIES, ids=name_of)
random_kernels = pytest.mark.parametrize("family", RANDOM_FAMILIES, ids=name_of)

# -- moments ------------------------------------------------------------------------------------------


@jax.jit
def noise(belief, mean, variance, moment):
    return belief.noise_variance(mean, variance), belief.noise_block(moment)


def dense_noise(belief, mean, variance, moment):
    second = np.einsum("...i,...j->...ij", mean, mean) + variance[..., None] * np.eye(IN)
    cov = dense_kernel_cov(belief)
    return np.einsum("...ij,iojo->...o", second, cov), np.einsum("...ij,iojp->...op", moment, cov)


def as_matrix(cov):
    return np.diag(cov) if cov.ndim == 1 else cov


@members
def test_second_moments_are_those_of_the_dense_covariance(family, shape):
    belief = example(family, shape)
    cov, results = dense_cov(belief), compiled_methods(belief)
    assert belief.shape == shape
    np.testing.assert_allclose(np.ravel(results["marginal_variance"]), np.diag(cov), **TOL)
    if len(shape) == 1:
        assert results["vector_cov"].ndim == (2 if family is FullNormal else 1)
        np.testing.assert_allclose(as_matrix(results["vector_cov"]), cov, **TOL)
    if len(shape) == 2:
        variance, block = dense_noise(belief, *method_inputs(belief))
        np.testing.assert_allclose(results["noise_variance"], variance, **TOL)
        np.testing.assert_allclose(results["noise_block"], block, **TOL)
        expected = np.einsum("iojo->ij", dense_kernel_cov(belief))
        metric = results["input_metric"]
        assert metric.ndim == (2 if family in (MatrixNormal, FullNormal) else 1)
        np.testing.assert_allclose(as_matrix(metric), expected, **TOL)


@kernels
def test_noise_of_inputs_with_leading_axes(family):
    """And of second moments that are not symmetric."""
    belief = example(family)
    inputs = random(1, 2, 3, IN), random(2, 2, 3, IN) ** 2, random(3, 2, 3, IN, IN)
    for actual, expected in zip(noise(belief, *inputs), dense_noise(belief, *inputs), strict=True):
        np.testing.assert_allclose(actual, expected, **TOL)


@random_kernels
def test_noise_is_what_samples_show(family):
    """Cov[x @ w] of a random w for a fixed x, which is what a layer needs."""
    belief, x = example(family), random(5, IN)
    outputs = np.einsum("i,nio->no", x, draws(belief).reshape(-1, IN, OUT))
    variance, expected = map(np.asarray, noise(belief, x, np.zeros(IN), np.outer(x, x)))
    np.testing.assert_allclose(variance, np.diag(expected), **TOL)
    error = np.sqrt((np.outer(variance, variance) + expected**2) / NUM_SAMPLES)
    assert np.all(np.abs(np.cov(outputs, rowvar=False) - expected) <= 5 * error)


@pytest.mark.parametrize("variance", [(0.5, 2.0), (0.0, 1.0)], ids=str)
def test_special_cases_agree(variance):
    """The same belief, one variance an output unit, in every family that can hold it."""
    mean, variance = jnp.asarray(random(8, IN, OUT)), np.array(variance)
    full = np.broadcast_to(variance, (IN, OUT))
    dense = np.diag(full.ravel()).reshape(IN, OUT, IN, OUT)
    expected = compiled_methods(OutputShared(mean, jnp.asarray(variance)))
    for other in (
        Factorized(mean, jnp.asarray(full)),
        MatrixNormal(mean, np.eye(IN), np.diag(variance)),
        FullNormal(mean, jnp.asarray(dense)),
    ):
        for name, actual in compiled_methods(other).items():
            wanted = expected[name]
            if name == "input_metric":
                actual, wanted = as_matrix(actual), as_matrix(wanted)
            np.testing.assert_allclose(actual, wanted, err_msg=name, **TOL)


@random_kernels
def test_no_variance_is_a_point(family):
    """Except for `kl`, whose convention is tested in test_kl.py."""
    expected, actual = compiled_methods(example(Point)), compiled_methods(without_variance(family))
    for name in set(actual) - {"kl", "input_metric"}:
        np.testing.assert_array_equal(actual[name], expected[name])
    assert not np.any(actual["input_metric"])


@random_kernels
def test_noise_variance_has_its_whole_gradient_at_zero(family):
    """It is linear in each covariance, so its gradient there is the same at zero as elsewhere."""
    inputs = method_inputs(example(family))[:2]
    gradient = jax.jit(jax.grad(lambda belief: jnp.sum(belief.noise_variance(*inputs))))
    mean, first, *rest = jax.tree.leaves(example(family))
    _, expected, *_ = jax.tree.leaves(gradient(family(mean, first, *rest)))
    _, actual, *_ = jax.tree.leaves(gradient(family(mean, np.zeros(first.shape), *rest)))
    np.testing.assert_allclose(actual, expected, **TOL)


def test_rounding_leaves_no_negative_noise_variance():
    """For inputs in the null space of a singular covariance only rounding is left."""
    mean, moment = np.zeros((IN, OUT)), np.zeros((IN, IN))
    for seed in range(50):
        basis, _ = np.linalg.qr(random(seed, IN, IN))
        in_cov = np.outer(basis[:, 0], basis[:, 0]) * 1e6
        cov = np.einsum("ij,op->iojp", in_cov, np.eye(OUT))
        for belief in (MatrixNormal(mean, in_cov, np.eye(OUT)), FullNormal(mean, cov)):
            assert np.all(np.asarray(noise(belief, basis[:, 1], np.zeros(IN), moment)[0]) >= 0)


# -- draws --------------------------------------------------------------------------------------------

BELIEFS = {
    **{f"{name_of(family)}-{name_of(shape)}": example(family, shape) for family, shape in MEMBERS},
    **{f"{family.__name__}-zero": without_variance(family) for family in KERNEL_FAMILIES},
    "MatrixNormal-singular": example(MatrixNormal, rank=1),
    "FullNormal-singular": example(FullNormal, rank=2),
}


@pytest.mark.parametrize("belief", BELIEFS.values(), ids=BELIEFS)
def test_sample_moments(belief):
    deviations = draws(belief) - np.ravel(belief.mean)
    cov = dense_cov(belief)
    variance = np.diag(cov)
    mean_error = np.sqrt(variance / NUM_SAMPLES)
    cov_error = np.sqrt((np.outer(variance, variance) + cov**2) / NUM_SAMPLES)
    # Without variance only rounding is allowed.
    rounding = 100 * np.finfo(np.float64).eps * max(1, np.max(variance))
    assert np.all(np.abs(deviations.mean(0)) <= 5 * mean_error + rounding)
    sampled = deviations.T @ deviations / NUM_SAMPLES
    assert np.all(np.abs(sampled - cov) <= 5 * cov_error + rounding)


def test_a_point_is_not_random():
    point = example(Point)
    np.testing.assert_array_equal(point.sample(KEY), point.mean)


def test_draws_of_a_singular_belief_stay_in_its_range():
    belief = example(FullNormal, rank=2)
    values, vectors = np.linalg.eigh(dense_cov(belief))
    null = vectors[:, values < 1e-10]
    deviation = np.ravel(compiled_methods(belief)["sample"]) - np.ravel(belief.mean)
    # The root of a variance that is zero up to rounding.
    rounding = np.sqrt(100 * np.finfo(np.float64).eps * np.max(values))
    assert null.shape[1] == IN * OUT - 2
    assert np.all(np.abs(null.T @ deviation) <= rounding)


@kernels
def test_sample_gradients(family):
    """The draw is reparametrised: its gradient against finite differences."""
    target = random(9, IN, OUT)
    loss = jax.jit(jax.value_and_grad(lambda belief: jnp.sum((belief.sample(KEY) - target) ** 2)))
    assert_gradient(loss, example(family), example(family, seed=5))


@jax.jit
def root_and_derivatives(cov, first, second):
    """The root, its derivative along `first` and the second one; that in reverse mode too."""

    def along(step):
        return jax.jvp(psd_sqrt, (cov + step * second,), (first,))[1]

    def backward(cov):
        return jax.grad(lambda cov: jnp.sum(jnp.sin(psd_sqrt(cov))))(cov)

    forward, twice = jax.jvp(along, (0.0,), (1.0,))
    in_reverse = jax.grad(lambda step: jnp.vdot(backward(cov + step * first), second))(0.0)
    plain = jax.grad(lambda cov: jnp.vdot(psd_sqrt(cov), first))(cov)
    return psd_sqrt(cov), forward, twice, in_reverse, plain


@pytest.mark.parametrize(
    "cov",
    [random_psd(0, 3), np.eye(3), np.diag([2.0, 2.0, 0.5])],
    ids=["regular", "identity", "repeated"],
)
def test_psd_sqrt_and_its_derivatives(cov):
    """R R = C, differentiated twice; at repeated eigenvalues too, where eigh has no derivative."""
    first, second = random_psd(1, 3), random_psd(2, 3)
    results = root_and_derivatives(cov, first, second)
    root, along, twice, in_reverse, _ = map(np.asarray, results)
    other = np.asarray(root_and_derivatives(cov, second, first)[1])
    np.testing.assert_allclose(root, root.T, **TOL)
    np.testing.assert_allclose(root @ root, cov, **TOL)
    np.testing.assert_allclose(root @ along + along @ root, first, **TOL)
    crossed = along @ other + other @ along
    np.testing.assert_allclose(root @ twice + twice @ root + crossed, np.zeros((3, 3)), **TOL)
    expected = np.sum(np.cos(root) * twice - np.sin(root) * along * other)
    np.testing.assert_allclose(in_reverse, expected, **TOL)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_psd_sqrt_of_a_singular_matrix(rank):
    cov, weights = random_psd(4, 3, rank), random_psd(1, 3)
    root, *_, gradient = map(np.asarray, root_and_derivatives(cov, weights, weights))
    np.testing.assert_allclose(root @ root, cov, **TOL)
    # By the equation, |gradient| <= |weights| / (the least positive eigenvalue of the root):
    # rounding in the null space does not come back multiplied by 1e8.
    values = np.linalg.eigvalsh(cov)
    least = np.sqrt(np.min(values[values > 1e-10], initial=np.inf))
    assert np.linalg.norm(gradient) <= np.linalg.norm(weights) / least


def test_psd_sqrt_forgives_a_hair_below_zero():
    np.testing.assert_allclose(psd_sqrt(np.diag([1.0, -1e-18])), np.diag([1.0, 0.0]), **TOL)


# -- transformations ----------------------------------------------------------------------------------


@members
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
        huge = jax.tree.map(lambda leaf, scale=scale: np.asarray(leaf) * np.float32(scale), belief)
        for name, leaf in compiled_methods(huge).items():
            assert not np.any(np.isnan(leaf)), (name, scale)


@members
def test_gradients_are_finite_without_variance(family, shape):
    def total(belief):
        results = all_methods(belief)
        if family is not Point:
            del results["kl"]  # infinite; see test_kl.py
        return sum(jnp.sum(jnp.sin(1 + leaf)) for leaf in results.values())

    gradient = jax.jit(jax.grad(total))(without_variance(family, shape))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


@kernels
def test_tree_maps_put_anything_in_the_leaves(family):
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


@kernels
def test_axis_numbers_and_stacks_may_be_made_by_hand(family):
    """As `jax.vmap(in_axes=...)` takes them, and as `stack` makes them."""
    num_fields = len(dataclasses.fields(family))
    for leaf in (0, None, jax.ShapeDtypeStruct((7,), jnp.float32)):
        assert isinstance(family(*[leaf] * num_fields), family)
    axes, stacked = family(*[0] * num_fields), stack([example(family)] * 2)
    draw = jax.vmap(lambda belief: belief.sample(KEY), in_axes=(axes,))
    assert jax.eval_shape(draw, stacked).shape == (2, IN, OUT)


@random_kernels
def test_derivatives_are_beliefs_with_more_axes(family):
    belief = example(family)
    hessian = jax.eval_shape(jax.hessian(lambda belief: belief.kl(GaussianPrior())), belief)
    assert isinstance(hessian, family)
    assert hessian.mean.mean.shape == (IN, OUT, IN, OUT)
    for jacobian in (jax.jacrev, jax.jacfwd):
        result = jax.eval_shape(jacobian(lambda belief: belief.marginal_variance()), belief)
        assert result.mean.shape == (IN, OUT, IN, OUT)


@kernels
def test_vmap_may_put_the_new_axis_anywhere_and_scan_goes_over_layers(family):
    belief = example(family)
    for axis in (0, 1, -1):
        scaled = jax.vmap(lambda k: jax.tree.map(lambda leaf: k * leaf, belief), out_axes=axis)
        assert jax.eval_shape(scaled, jnp.ones((4,))).mean.shape[axis] == 4
    beliefs = [example(family, seed=10 * seed) for seed in range(3)]
    total, _ = jax.lax.scan(
        lambda total, belief: (total + belief.kl(GaussianPrior(0.25, 0.5)), None),
        0.0,
        stack(beliefs),
    )
    expected = sum(float(compiled_methods(belief)["kl"]) for belief in beliefs)
    np.testing.assert_allclose(total, expected, **TOL)
