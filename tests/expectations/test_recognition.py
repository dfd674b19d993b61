"""One reader of activations: what a function of a scalar is, and the same moments through every door."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax import expectations
from moment_jax.expectations.recognition import CLOSED_FORMS, recognised

EXACT_GELU = functools.partial(jax.nn.gelu, approximate=False)
WRITTEN = {  # what is like another function between -6 and 6, bends, jumps, or is written otherwise
    "relu": (jax.nn.relu, "relu"),
    "maximum": (lambda x: jnp.maximum(x, 0), "relu"),
    "where": (lambda x: jnp.where(x > 0, x, 0.0), "relu"),
    "relu6": (jax.nn.relu6, "piecewise linear"),
    "clip": (lambda x: jnp.clip(x, -10, 10), "piecewise linear"),
    "hard_tanh": (jax.nn.hard_tanh, "piecewise linear"),
    "hard_sigmoid": (jax.nn.hard_sigmoid, "piecewise linear"),
    "leaky_relu": (lambda x: jax.nn.leaky_relu(x, 1e-4), "piecewise linear"),
    "abs": (jnp.abs, "piecewise linear"),
    "threshold": (lambda x: jnp.where(x > 0.2, x, 0.0), "steps"),
    "straight through": (lambda x: x + jax.lax.stop_gradient(jnp.sign(x) - x), "steps"),
    "identity": (lambda x: 2 * x - 1, "linear"),
    "gelu": (EXACT_GELU, "gelu"),
    "by erf": (lambda x: 0.5 * x * (1 + jax.lax.erf(x / 2**0.5)), "gelu"),
    "by cdf": (lambda x: x * jax.scipy.stats.norm.cdf(x), "gelu"),
    "nearly gelu": (lambda x: 1.0078125 * EXACT_GELU(x), "quadrature"),
    "clipped gelu": (lambda x: jnp.minimum(EXACT_GELU(x), 9), "quadrature"),
    "bumped": (lambda x: x + 1 / (1 + jnp.square((x - 0.3) * 1e4)), "quadrature"),
    "gelu by tanh": (jax.nn.gelu, "quadrature"),
    "silu": (jax.nn.silu, "quadrature"),
    "tanh": (jnp.tanh, "quadrature"),
    "elu": (jax.nn.elu, "quadrature"),
    "softplus": (jax.nn.softplus, "quadrature"),
    "sin": (jnp.sin, "quadrature"),
    "square": (jnp.square, "quadrature"),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_function_is_not_taken_for_another(dtype):
    """In half precision no more than in single: `nearly gelu` is one rounding away."""
    for name, (fn, kind) in WRITTEN.items():
        if (name, dtype) != ("by cdf", jnp.bfloat16):  # which JAX does not have
            assert recognised(lambda x, fn=fn: fn(x.astype(dtype)))[0] == kind, name


def inside_vmap(fn):
    """What `of` gives while a `vmap` is traced."""
    found = []
    jax.vmap(lambda x: (found.append(expectations.of(fn)), x)[1])(jnp.ones(2))
    return found[0]


def test_of_an_activation():
    for name, (moments, fn) in CLOSED_FORMS.items():
        assert expectations.of(name) is inside_vmap(fn) is moments
    with pytest.raises(ValueError, match=r"one of 'relu', 'gelu'. Got 'swish'.*Give a function"):
        expectations.of("swish")
    for wrong in (lambda x: jnp.stack([x, x]), lambda x, y: x, jnp.ones(3)):
        with pytest.raises(TypeError, match=r"function of a scalar. Got .*jnp.tanh"):
            expectations.of(wrong)
    with pytest.raises(ValueError, match=r"linear pieces where it jumps. Got .*Smooth its jumps"):
        expectations.of(lambda x: jnp.where(x > 0, jnp.exp(x), 0.0))


def test_a_function_that_is_not_finite_everywhere_has_moments_where_it_is():
    mean, variance = jnp.array([-30.0, -7.0, 0.3, 30.0]), jnp.full(4, 1e-6)
    found = expectations.of(lambda x: jnp.log(jnp.abs(x)))(mean, variance)
    np.testing.assert_allclose(found.mean, jnp.log(jnp.abs(mean)), atol=1e-4)
    np.testing.assert_allclose(found.variance, variance / mean**2, rtol=1e-2)


SOME = ("relu6", "threshold", "identity", "gelu", "silu")


@pytest.mark.parametrize(
    ("structure", "names"), [(mj.Diagonal, WRITTEN), (mj.Separable, SOME), (mj.Full, SOME)]
)
def test_layers_and_propagation_agree_with_the_integral(structure, names):
    """Far from zero too. The integral is a sum over a fine grid."""
    mean = jnp.array([[-20.0, -7.0, -0.6, 0.3], [1.1, 5.5, 7.0, 20.0]])
    variance = jnp.full(mean.shape, 0.09)
    belief = mj.posterior.Factorized(mean, variance)

    @jax.jit
    def doors():
        found = {}
        for name in names:
            fn, _ = WRITTEN[name]
            layer = mj.activation(mean, structure.independent(variance), fn)
            found[name] = layer, mj.propagate(fn, structure=structure)(belief)
        return found

    z = jnp.linspace(-8, 8, 8001)
    density = jnp.exp(-0.5 * z**2) / jnp.sum(jnp.exp(-0.5 * z**2))
    for name, ((layer, cov), (passed, passed_cov)) in doors().items():
        chex.assert_trees_all_close(passed, layer, rtol=1e-9, atol=1e-9)
        chex.assert_trees_all_close(passed_cov.to_dense(), cov.to_dense(), rtol=1e-8, atol=1e-9)
        values = WRITTEN[name][0](mean[..., None] + 0.3 * z[None, None])
        right = values @ density
        sd = jnp.sqrt(jnp.square(values - right[..., None]) @ density)
        np.testing.assert_allclose(layer, right, atol=2e-3, rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(cov.sd(), sd, atol=3e-3, rtol=5e-3, err_msg=name)
