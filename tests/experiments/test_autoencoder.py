"""The discrete autoencoder against its plain form and the ELBO's definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from experiments.autoencoder import DiscreteAutoencoder
from tests.builders import assert_close

CODES, SIZE = 5, 4
IMAGES = (jax.random.uniform(jax.random.key(0), (3, SIZE, SIZE)) > 0.5).astype(jnp.float32)
KEY = jax.random.key(1)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ranks_of_a_user")]


def linear_autoencoder():
    """Compiles fastest."""
    encoder, decoder = (nnx.Linear(*s, rngs=nnx.Rngs(0)) for s in ((4, CODES), (CODES, 4)))
    return DiscreteAutoencoder(encoder, decoder, mj.nn.Patches(2), CODES)


def test_certain_weights_make_the_plain_network():
    """With relaxed codes; the next test has hard ones."""
    plain = linear_autoencoder()
    certain = plain.bayesian(family=mj.posterior.Point, structure=mj.Diagonal)
    bound = nnx.jit(
        lambda model: model.negative_elbo(IMAGES, KEY, 0.5, dataset_size=3, kl_weight=0)
    )
    mine, theirs = bound(certain), bound(plain)
    assert float(theirs.weight_kl) == 0
    assert_close(mine.code_kl, theirs.code_kl, 1e-4)
    assert_close(mine.total, theirs.total, 1e-4)


def test_parts_are_what_they_are_called_and_have_gradients():
    """Each part from its definition: draws of codes, the likelihood spelled out, both divergences."""
    options = {"structure": mj.Diagonal, "relative_scale": 0.3, "learn_prior": True}
    model = linear_autoencoder().bayesian(**options)
    options = {"dataset_size": 10, "kl_weight": 0.5, "straight_through": True}

    @nnx.jit
    def parts(model):
        def loss(model):
            bound = model.negative_elbo(IMAGES, KEY, 1.0, **options)
            return bound.total.mean(), bound

        log_probs = model.code_log_probs(IMAGES)
        z = jax.nn.one_hot(mj.discrete.gumbel_max(KEY, log_probs), CODES)
        decoded, (slopes, bound) = model.decoder(z), nnx.grad(loss, has_aux=True)(model)
        return bound, log_probs, decoded.mean, decoded.sd, model.kl(), slopes

    bound, log_probs, mean, sd, kl, slopes = parts(model)
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    logits = np.asarray(mean)[..., None] + np.asarray(sd)[..., None] * nodes
    softplus = np.logaddexp(0, logits) @ (weights / weights.sum())
    fit = np.asarray(model.patches(IMAGES)) * mean - softplus
    assert_close(bound.reconstruction, -np.sum(fit, axis=(1, 2)), 1e-4)
    code_kl = jnp.sum(jnp.exp(log_probs) * (log_probs + jnp.log(CODES)), axis=(1, 2))
    assert_close(bound.code_kl, code_kl, 1e-4)
    assert_close(bound.weight_kl, 0.5 * kl / 10, 1e-5)
    assert all(np.isfinite(x).all() and np.any(x != 0) for x in jax.tree.leaves(slopes))
