"""The document's identities (Eq. 1, 11, 12, 14, 15 and 3.4.2), Ito's lemma, and paths by their laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import assert_close

brownian = mj.brownian


def sphere_tokens(count=7, features=6, seed=0):
    random = np.random.default_rng(seed)
    return np.asarray(brownian.to_sphere(random.normal(size=(count, features))))


def test_attention_is_the_gaussian_kernel_on_the_sphere():
    one = sphere_tokens(1)
    assert_close(brownian.transition_matrix(one), np.ones((1, 1)))
    assert_close(brownian.row_normalize(brownian.gaussian_kernel(one, one)), np.ones((1, 1)))
    x = sphere_tokens(9, 16)
    scores = np.exp(np.asarray(x @ x.T) / 4)
    expected = scores / scores.sum(axis=1, keepdims=True)
    assert_close(brownian.transition_matrix(x), expected)
    kernel = brownian.gaussian_kernel(x, x)
    assert_close(np.asarray(kernel) * np.exp(4.0), scores)  # Eq. 14's constant s
    assert_close(brownian.row_normalize(kernel), expected)
    free = np.random.default_rng(3).normal(size=(9, 16))
    walk = brownian.row_normalize(brownian.gaussian_kernel(free, free))
    assert np.max(np.abs(np.asarray(brownian.transition_matrix(free)) - np.asarray(walk))) > 0.05


def test_gaussian_kernel_as_printed():
    x, y = np.random.default_rng(0).normal(size=(2, 3, 4))
    expected = np.exp(-np.sum((x[:, None] - y[None]) ** 2, axis=-1) / (2 * 0.7**2))
    assert_close(brownian.gaussian_kernel(x, y, bandwidth=0.7), expected)


def test_reversible_with_identity_projections_and_not_with_others():
    x = sphere_tokens()
    transition = brownian.transition_matrix(x)
    law = brownian.stationary(transition)
    kernel = np.asarray(brownian.gaussian_kernel(x, x))
    assert_close(law, kernel.sum(axis=1) / kernel.sum())
    assert brownian.detailed_balance_gap(transition, law) < 1e-12
    query, key = np.random.default_rng(5).normal(size=(2, 6, 6))
    other = jax.nn.softmax(brownian.attention_scores(x, query, key), axis=1)
    assert brownian.detailed_balance_gap(other, brownian.stationary(other)) > 0.05


def test_attention_scores_are_flax_attention():
    layer = nnx.MultiHeadAttention(
        2, 6, qkv_features=8, param_dtype=jnp.float64, decode=False, rngs=nnx.Rngs(0)
    )
    layer.query.bias.set_value(np.random.default_rng(8).normal(size=(2, 4)))
    x = sphere_tokens()
    parts = layer.query.kernel, layer.key.kernel, layer.query.bias, layer.key.bias
    scores = brownian.attention_scores(x, *(part[...] for part in parts))
    query, key = layer.query(x) / 2, layer.key(x)
    assert_close(scores, np.einsum("qhk,shk->hqs", query, key))


def test_to_sphere_is_layer_norm():
    x = np.random.default_rng(1).normal(size=(2, 5, 8))
    norm = nnx.LayerNorm(8, epsilon=0.1, use_scale=False, use_bias=False, use_fast_variance=False,
                         param_dtype=x.dtype, rngs=nnx.Rngs(0))  # fmt: skip
    assert_close(brownian.to_sphere(x, epsilon=0.1), norm(x))
    on_sphere = np.asarray(brownian.to_sphere(x))
    assert_close(np.linalg.norm(on_sphere, axis=-1), np.full((2, 5), 8**0.5))
    assert_close(np.sum(on_sphere, axis=-1), np.zeros((2, 5)))
    gradient = jax.jit(jax.grad(lambda y: jnp.sum(brownian.to_sphere(y) ** 3)))(np.ones((2, 4)))
    assert np.isfinite(gradient).all()


def test_squared_distances_are_dot_products_on_the_sphere():
    x, y = sphere_tokens(seed=1), sphere_tokens(4, seed=2)
    assert_close(brownian.squared_distances(x, y), 2 * 6 - 2 * x @ y.T)
    distances = np.sum((2 * x[:, None] - y[None, :]) ** 2, axis=-1)
    assert_close(brownian.squared_distances(2 * x, y), distances)


# -- Ito's lemma, against closed forms and the Hessian ------------------------------------------------


CLOSED_FORMS = {
    "square": (lambda t, x: x**2, 1.0, lambda t, x: 2 * x),
    "exponential": (lambda t, x: jnp.exp(x), np.exp(0.4) / 2, lambda t, x: jnp.exp(x)),
    # A martingale: no drift.
    "exponential martingale": (lambda t, x: jnp.exp(x - t / 2), 0.0, lambda t, x: jnp.exp(x - t / 2)),
    "time": (lambda t, x: t * x**3, 0.4**3 + 3 * 0.7 * 0.4, lambda t, x: 3 * t * x**2),
}  # fmt: skip


def test_closed_forms():
    """The last: d log S = (mu - sigma^2/2) dt + sigma dB for dS = mu S dt + sigma S dB."""
    mu, sigma = 0.3, 0.8
    geometric = {"drift": lambda t, s: mu * s, "diffusion": lambda t, s: sigma * s}
    moved = brownian.ito(lambda t, s: jnp.log(s), **geometric)

    @jax.jit
    def found(t, x):
        forms = {name: brownian.ito(form[0])(t, x) for name, form in CLOSED_FORMS.items()}
        return forms, moved(t, x)

    forms, geometric = found(0.7, 0.4)
    for name, (_, drift, diffusion) in CLOSED_FORMS.items():
        assert_close(forms[name][0], drift)
        assert_close(forms[name][1], diffusion(0.7, 0.4))
    assert_close(np.stack(geometric), np.array([mu - sigma**2 / 2, sigma]))


def function_of_vector(t, x):
    return {"a": jnp.sin(x[0]) * x[1] ** 2 + t * x[2], "b": jnp.outer(x, x)}


MATRIX = np.random.default_rng(0).normal(size=(3, 2))
SPREADS = {"standard": None, "scalar": 0.4, "diagonal": np.array([0.1, 2.0, 0.5]), "matrix": MATRIX}


def test_vectors_against_the_hessian():
    """Every kind of diffusion coefficient, as the matrix that it stands for."""
    x, t, a = np.array([0.3, -1.2, 0.7]), 0.5, np.array([1.0, 0.5, -2.0])
    matrices = {"standard": np.eye(3), "scalar": 0.4 * np.eye(3), "matrix": MATRIX}
    matrices["diagonal"] = np.diag(SPREADS["diagonal"])

    def of_kind(spread, t, x):
        diffusion = None if spread is None else lambda t, x: spread
        moved = brownian.ito(function_of_vector, drift=lambda t, x: a, diffusion=diffusion)
        return moved(t, x)

    @jax.jit
    def results(t, x):
        first = jax.jacobian(function_of_vector, argnums=(0, 1))(t, x)
        hessian = jax.jacfwd(jax.jacobian(function_of_vector, argnums=1), argnums=1)(t, x)
        return {k: of_kind(s, t, x) for k, s in SPREADS.items()}, first, hessian

    found, first, hessian = results(t, x)
    for kind, (drifts, diffusions) in found.items():
        b = matrices[kind]
        for name in ("a", "b"):
            by_time, jacobian = (np.asarray(part) for part in (first[name][0], first[name][1]))
            drift = by_time + jacobian @ a
            drift = drift + 0.5 * np.einsum("...ij,ik,jk->...", hessian[name], b, b)
            assert_close(drifts[name], drift)
            assert_close(diffusions[name], jacobian @ b)


def test_matrices_move_entry_by_entry():
    x = np.random.default_rng(1).normal(size=(2, 3))
    drift, diffusion = jax.jit(brownian.ito(lambda t, x: jnp.sum(x**2, axis=1)))(0.0, x)
    assert_close(drift, np.full(2, 3.0))
    assert diffusion.shape == (2, 6)


def test_whole_numbers_are_numbers_too():
    square = jax.jit(brownian.ito(lambda t, x: x**2))
    assert square(0, 3)[0] == 1.0
    assert np.isfinite(square(0.0, np.float32(3))[0])


# -- paths by their laws, and the heat equation -------------------------------------------------------


def increments(seed, count, dt, shape):
    key = jax.random.key(seed)
    return brownian.brownian_increments(key, count, dt=dt, shape=shape, dtype=jnp.float64)


@pytest.fixture(scope="module")
def paths():
    return np.asarray(brownian.brownian_path(increments(0, 64, 1 / 64, (20_000,))))


def within(sample, expected, errors=4.5):
    """The mean over the last axis is within so many standard errors of the expectation."""
    mean, error = np.mean(sample, axis=-1), np.std(sample, axis=-1) / sample.shape[-1] ** 0.5
    assert np.all(np.abs(mean - expected) <= errors * error + 1e-12)


def test_covariance_is_the_earlier_time(paths):
    assert np.all(paths[0] == 0)
    for s, t in [(16, 16), (16, 48), (64, 64)]:
        within(paths[s] * paths[t], min(s, t) / 64)
    within((paths[40] - paths[20]) * paths[20], 0.0)


def test_quadratic_variation_tends_to_time():
    """Mean t, standard deviation sqrt(2 t dt): it falls with the step."""
    for steps in (64, 512):
        path = brownian.brownian_path(increments(1, steps, 2 / steps, (2000,)))
        variation = np.asarray(brownian.quadratic_variation(path))
        within(variation[-1], 2.0)
        within(variation[steps // 2], 1.0)
        np.testing.assert_allclose(np.std(variation[-1]), (4 * 2 / steps) ** 0.5, rtol=0.1)


def test_heat_step_is_a_walk_on_the_grid():
    """With the rate of the explicit scheme, D dt / dx^2, which is of second order in the grid."""
    density, rate = np.random.default_rng(0).dirichlet(np.ones(9)), 0.7 * 0.1 / 0.5**2
    aside = np.roll(np.eye(9), 1, axis=0) + np.roll(np.eye(9), -1, axis=0)
    walk = (1 - 2 * rate) * np.eye(9) + rate * aside
    stepped = brownian.heat_step(density, diffusivity=0.7, dx=0.5, dt=0.1)
    assert_close(stepped, walk.T @ density)
    assert stepped.min() >= 0


# -- errors state the rule and what came --------------------------------------------------------------


b, ONES, ROW, SWAP = brownian, jnp.ones((2, 2)), jnp.ones(3), np.array([[0.0, 1.0], [1.0, 0.0]])


def heat(dx, dt):
    return b.heat_step(jnp.ones(4), diffusivity=1.0, dx=dx, dt=dt)


CASES = [
    (lambda: b.diffusion_map(jnp.ones((1, 2)), bandwidth=1.0), "two points"),
    (lambda: b.diffusion_map(jnp.eye(4), bandwidth=0.0), "bandwidth > 0"),
    (lambda: b.diffusion_map(jnp.eye(4), bandwidth=1.0, count=4), "T - 1"),
    (lambda: b.ito(lambda t, x: x, diffusion=lambda t, x: ONES)(0.0, ROW), "of the shape of x"),
    (lambda: b.ito(lambda t, x: x, drift=lambda t, x: ONES[0])(0.0, ROW), "drift of the shape"),
    (lambda: b.gaussian_kernel(ONES, ONES, bandwidth=0.0), "> 0"),
    (lambda: b.gaussian_kernel(ONES, jnp.ones((2, 3))), "same number"),
    (lambda: b.transition_matrix(ONES[None]), "vmap"),
    (lambda: b.row_normalize(jnp.array([[1.0, -0.1]])), "none negative"),
    (lambda: b.row_normalize(jnp.array([[1.0, 1.0], [0.0, 0.0]])), "none in row 1"),
    (lambda: b.attention_scores(jnp.ones((2, 3)), ONES, ONES), "D the features"),
    (lambda: b.to_sphere(ONES[:, :1]), "D >= 2"),
    (lambda: b.stationary(np.array([[0.5, 0.4], [0.5, 0.5]])), "Got 0.9 for row 0"),
    (lambda: b.stationary(np.array([[1.5, -0.5], [0.5, 0.5]])), "none negative"),
    (lambda: b.stationary(np.array([[np.nan, 1.0], [0.5, 0.5]])), "finite"),
    (lambda: b.stationary(np.ones((2, 3))), r"\(T, T\)"),
    (lambda: b.detailed_balance_gap(SWAP, np.ones(3)), "law"),
    (lambda: b.mixing_time(SWAP, distance=1.5), "distance < 1"),
    (lambda: b.brownian_increments(jax.random.key(0), 0, dt=1.0), "needs"),
    (lambda: b.brownian_increments(jax.random.key(0), 2, dt=0.0), "needs"),
    (lambda: b.brownian_path(jnp.zeros(())), "needs"),
    (lambda: heat(1.0, 0.6), "1/2.*as many steps"),
    (lambda: heat(0.0, 0.6), "dx > 0"),
]


@pytest.mark.parametrize(("call", "words"), CASES)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
