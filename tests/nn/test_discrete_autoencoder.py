"""The discrete autoencoder against sampled networks, its plain form and the ELBO's definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.reference import Agreement
from tests.builders import assert_close

CODES, TOKENS, SIZE = 5, 4, 4
IMAGES = (jax.random.uniform(jax.random.key(0), (3, SIZE, SIZE)) > 0.5).astype(jnp.float32)
KEY = jax.random.key(1)
SIZES = {"image_size": SIZE, "patch_size": 2, "num_codes": CODES, "num_features": 4, "num_heads": 2}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ranks_of_a_user")]


def plain_autoencoder(**options):
    return mj.nn.DiscreteAutoencoder.transformers(**{**SIZES, "rngs": nnx.Rngs(0), **options})


def linear_autoencoder(**options):
    """Compiles fastest."""
    encoder, decoder = (nnx.Linear(*s, rngs=nnx.Rngs(0)) for s in ((4, CODES), (CODES, 4)))
    sizes = {"patches": mj.nn.Patches(2), "image_size": SIZE, "num_codes": CODES}
    return mj.nn.DiscreteAutoencoder(encoder, decoder, **sizes, **options)


def autoencoder(options=None, **belief):
    return linear_autoencoder(**options or {}).bayesian(**{"structure": mj.Diagonal, **belief})


@pytest.mark.parametrize("likelihood", [mj.Bernoulli(), mj.Gaussian(0.2)])
def test_certain_weights_make_the_plain_network(likelihood):
    """With relaxed codes; the next tests have hard ones. One network may stay plain."""
    plain = linear_autoencoder(likelihood=likelihood)
    certain = plain.bayesian(family=mj.posterior.Point, structure=mj.Diagonal)
    certain.encoder = plain.encoder
    same, given = (certain.at_means(), certain.sample(KEY)), jax.tree.leaves(nnx.state(plain))
    assert all(map(np.array_equal, jax.tree.leaves(nnx.state(same)), [*given, *given]))
    bound = nnx.jit(
        lambda model: model.negative_elbo(IMAGES, KEY, 0.5, dataset_size=3, kl_weight=0)
    )
    mine, theirs = bound(certain), bound(plain)
    assert float(theirs.weight_kl) == 0
    assert_close(mine.code_kl, theirs.code_kl, 1e-4)
    assert_close(mine.total, theirs.total, 1e-4)


def test_parts_are_what_they_are_called_and_have_gradients():
    """Each part from its definition: draws of codes, the likelihood spelled out, both divergences."""
    model = autoencoder({"likelihood": mj.Gaussian()}, relative_scale=0.3, learn_prior=True)
    model.noise.set_value(jnp.log(noise := 0.2))

    options = {"dataset_size": 10, "kl_weight": 0.5, "straight_through": True}

    @nnx.jit
    def parts(model):
        def loss(model):
            bound = model.negative_elbo(IMAGES, KEY, 1.0, **options)
            return bound.total.mean(), bound

        log_probs = model.code_log_probs(IMAGES)
        z = jax.nn.one_hot(mj.discrete.gumbel_max(KEY, log_probs), CODES)
        decoded, (slopes, bound) = model.decode(z), nnx.grad(loss, has_aux=True)(model)
        pixels = map(model.pixels, (decoded.mean, decoded.variance))
        return bound, log_probs, *pixels, model.kl(), slopes

    bound, log_probs, pixels, variance, kl, slopes = parts(model)
    terms = jnp.log(2 * jnp.pi * noise) + ((IMAGES - pixels) ** 2 + variance) / noise
    assert_close(bound.reconstruction, 0.5 * jnp.sum(terms, axis=(1, 2)), 1e-4)
    code_kl = jnp.sum(jnp.exp(log_probs) * (log_probs + jnp.log(CODES)), axis=(1, 2))
    assert_close(bound.code_kl, code_kl, 1e-4)
    assert_close(bound.weight_kl, 0.5 * kl / 10, 1e-5)
    assert all(np.isfinite(x).all() and np.any(x != 0) for x in jax.tree.leaves(slopes))


def test_moments_of_both_halves_against_sampled_networks():
    """2,000 draws: 1.6 % is noise in a sd, 0.02 sd in a mean."""
    plain = plain_autoencoder(num_features=16, hidden_features=16)
    model = plain.bayesian(structure=mj.Separable)
    z = jax.nn.one_hot(jnp.asarray([0, 3, 3, 1]), CODES)

    def halves(model):
        return model.probabilities(IMAGES[0]), model.decode(z)

    keys = jax.random.split(KEY, 2000)
    draws = nnx.jit(lambda m: jax.lax.map(lambda k: halves(m.sample(k)), keys, batch_size=200))
    for moments, sampled in zip(nnx.jit(halves)(model), draws(model), strict=True):
        agreement = Agreement.of(moments.mean, moments.sd, sampled.mean(0), sampled.std(0))
        assert agreement.mean_error < 0.1
        assert 0.95 < agreement.sd_ratio < 1.05


def test_any_batch_axes_and_colours():
    model, images = autoencoder(), jnp.stack([IMAGES, 1 - IMAGES])[..., None]
    probabilities = nnx.jit(lambda model, images: model.probabilities(images))
    found, alone = (probabilities(model, x) for x in (images, images[1, 2]))
    assert found.cov.variances.shape == (2, 3, TOKENS, CODES)
    jax.tree.map(lambda whole, one: assert_close(whole[1, 2], one, 1e-5), found, alone)
    bound = jax.eval_shape(lambda x: model.negative_elbo(x, KEY, 0.5, dataset_size=9), images[0, 0])
    assert bound.reconstruction.shape == bound.code_kl.shape == ()
    model, images = (
        plain_autoencoder(image_size=6, channels=3),
        jax.random.normal(KEY, (2, 6, 6, 3)),
    )
    assert (model.pixels(model.patches(images)) == images).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plain_autoencoder(channels=0), "channels >= 1"),
        (lambda: plain_autoencoder(likelihood=mj.Categorical()), "Bernoulli"),
        (lambda: plain_autoencoder().encode(jnp.ones((1, 8, 8))), "4 x 4 pixels"),
        (lambda: autoencoder(batch_axes=2).encode(IMAGES), "batch_axes=1. Got 2"),
        (lambda: autoencoder().negative_elbo(IMAGES, KEY, 1.0), "dataset_size >= 1"),
    ],
)
def test_messages(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()
