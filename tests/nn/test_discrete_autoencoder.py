"""The discrete autoencoder against sampled networks, its plain counterpart and the ELBO's definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.reference.closure import Agreement
from tests.builders import assert_close

CODES, TOKENS, SIZE = 5, 4, 4
IMAGES = (jax.random.uniform(jax.random.key(0), (3, SIZE, SIZE)) > 0.5).astype(jnp.float32)
KEY = jax.random.key(1)


SIZES = {"image_size": SIZE, "patch_size": 2, "num_codes": CODES, "num_features": 4, "num_heads": 2}


def autoencoder(**options):
    """Diagonal compiles fastest."""
    defaults = {**SIZES, "hidden_features": 6, "structure": mj.Diagonal, "rngs": nnx.Rngs(0)}
    return mj.nn.DiscreteAutoencoder(**{**defaults, **options})


def traced_bound(**options):
    """The shapes of a bound."""
    return jax.eval_shape(lambda: autoencoder().negative_elbo(IMAGES, KEY, **options))


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ranks_of_a_user")]


def test_certain_weights_make_the_plain_network():
    """With relaxed codes and `Gaussian`; the next tests have hard ones."""
    likelihood = mj.objectives.Gaussian(0.2)
    certain = autoencoder(posterior=mj.posterior.Point, likelihood=likelihood)
    plain = certain.mean_network()

    @nnx.jit
    def both(certain, plain):
        mine = certain.negative_elbo(IMAGES, KEY, 0.5, dataset_size=3, kl_weight=0.0)
        return mine, plain.negative_elbo(IMAGES, KEY, 0.5)

    mine, theirs = both(certain, plain)
    assert_close(mine.code_kl, theirs.code_kl, 1e-4)
    assert_close(mine.total, theirs.total, 1e-4)


def test_what_is_loaded_is_the_network():
    plain = autoencoder(likelihood=mj.objectives.Gaussian(0.2)).mean_network()
    again = autoencoder(likelihood=mj.objectives.Gaussian(0.5))
    again.load(plain)
    loaded, given = (jax.tree.leaves(nnx.state(n)) for n in (again.mean_network(), plain))
    assert all(np.array_equal(x, y) for x, y in zip(loaded, given, strict=True))


def test_parts_are_what_they_are_called_and_have_gradients():
    """Each part from its definition: draws of codes, the likelihood spelled out, both divergences.

    The experiment's test trains with `Bernoulli`.
    """
    noise = 0.2
    likelihood = mj.objectives.Gaussian(noise)
    model = autoencoder(relative_scale=0.3, learn_prior=True, likelihood=likelihood)

    @nnx.jit
    def parts(model):
        def loss(model):
            options = {"dataset_size": 10, "kl_weight": 0.5, "straight_through": True}
            bound = model.negative_elbo(IMAGES, KEY, 1.0, **options)
            return bound.total.mean(), bound

        log_probs = model.code_log_probs(IMAGES)
        z = jax.nn.one_hot(mj.discrete.gumbel_max(KEY, log_probs), CODES)
        mean, cov = model.decode(z)
        slopes, bound = nnx.grad(loss, has_aux=True)(model)
        return bound, log_probs, model.pixels(mean), model.pixels(cov.variances), model.kl(), slopes

    bound, log_probs, pixels, variance, kl, slopes = parts(model)
    terms = jnp.log(2 * jnp.pi * noise) + ((IMAGES - pixels) ** 2 + variance) / noise
    assert_close(bound.reconstruction, 0.5 * jnp.sum(terms, axis=(1, 2)), 1e-4)
    code_kl = jnp.sum(jnp.exp(log_probs) * (log_probs + jnp.log(CODES)), axis=(1, 2))
    assert_close(bound.code_kl, code_kl, 1e-4)
    assert_close(bound.weight_kl, 0.5 * kl / 10, 1e-5)
    assert_close(bound.total, bound.reconstruction + bound.code_kl + bound.weight_kl, 1e-6)
    leaves = jax.tree.leaves(slopes)
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert all(np.any(leaf != 0) for leaf in leaves)


def test_the_plain_bound_is_the_likelihood_spelled_out():
    """Of `Bernoulli`; of `Gaussian` above."""
    plain = autoencoder().mean_network()

    @nnx.jit
    def bound_and_fit(plain):
        bound = plain.negative_elbo(IMAGES, KEY, 1.0, straight_through=True)
        codes = mj.discrete.gumbel_max(KEY, plain.code_log_probs(IMAGES))
        pixels = plain.pixels(plain.decode(jax.nn.one_hot(codes, CODES)))
        fit = IMAGES * jax.nn.log_sigmoid(pixels) + (1 - IMAGES) * jax.nn.log_sigmoid(-pixels)
        return bound, fit

    bound, fit = bound_and_fit(plain)
    assert_close(bound.reconstruction, -jnp.sum(fit, axis=(1, 2)), 1e-4)
    assert float(bound.weight_kl) == 0


def test_moments_of_both_halves_against_sampled_networks():
    """2,000 draws: 1.6 % is noise in a sd, 0.02 sd in a mean."""
    model = autoencoder(
        num_features=16, hidden_features=16, relative_scale=0.1, structure=mj.Separable
    )
    z = jax.nn.one_hot(jnp.asarray([0, 3, 3, 1]), CODES)

    @nnx.jit
    def moments(model):
        both = model.probabilities(IMAGES[0]), model.decode(z)
        return [(mean, jnp.sqrt(cov.variance())) for mean, cov in both]

    @nnx.jit
    def draws(model):
        def one(key):
            network = model.sample(key)
            logits = network.encoder(network.patches(IMAGES[0]))
            return jax.nn.softmax(logits), network.decode(z)

        return jax.lax.map(one, jax.random.split(KEY, 2000), batch_size=200)

    for (mean, sd), sampled in zip(moments(model), draws(model), strict=True):
        agreement = Agreement.of(mean, sd, sampled.mean(0), sampled.std(0))
        assert agreement.mean_error < 0.1
        assert 0.95 < agreement.sd_ratio < 1.05


def test_shapes():
    """Any batch axes; only traced."""
    model = autoencoder()
    images = jnp.zeros((2, 3, SIZE, SIZE, 1))
    mean, cov = jax.eval_shape(model.probabilities, images)
    assert mean.shape == cov.variances.shape == (2, 3, TOKENS, CODES)
    mean, _ = jax.eval_shape(lambda x: model(x, KEY, 0.5), images)
    assert mean.shape == (2, 3, TOKENS, 4)
    bound = jax.eval_shape(lambda x: model.negative_elbo(x, KEY, 0.5, dataset_size=9), images[0, 0])
    assert bound.reconstruction.shape == bound.code_kl.shape == ()
    codes, mean, cov = jax.eval_shape(lambda: model.sample_images(KEY, 6))
    assert codes.shape == (6, TOKENS)
    assert mean.shape == cov.variances.shape == (6, TOKENS, 4)
    _, patches = jax.eval_shape(lambda: model.mean_network().sample_images(KEY, 6))
    assert patches.shape == mean.shape
    assert int(model.prior_codes(KEY, 50).max()) == CODES - 1


def test_colours_come_back_where_they_were():
    images = jax.random.normal(KEY, (2, 6, 6, 3))
    model = autoencoder(image_size=6, channels=3)
    assert (model.pixels(model.patches(images)) == images).all()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: autoencoder(patch_size=3), ValueError, "patch_size to divide"),
        (lambda: autoencoder(image_size=0), ValueError, "patch_size to divide"),
        (lambda: autoencoder(channels=0), ValueError, "channels >= 1"),
        (lambda: autoencoder(num_codes=1), ValueError, "num_codes >= 2"),
        (lambda: autoencoder(num_heads=3), ValueError, "divide"),
        (lambda: autoencoder(likelihood=mj.objectives.Categorical()), TypeError, "Bernoulli"),
        (lambda: autoencoder(likelihood=mj.objectives.Gaussian(0.0)), ValueError, "positive noise"),
        (lambda: autoencoder(likelihood=mj.objectives.Gaussian(jnp.ones(3))), ValueError, "one"),
        (lambda: autoencoder().encode(jnp.ones((1, 8, 8))), ValueError, "4 x 4 pixels"),
        (lambda: autoencoder().decode(jnp.ones((3, CODES))), ValueError, r"\(T, in\) == \(4, 5\)"),
        (lambda: traced_bound(temperature=1.0, dataset_size=0), ValueError, "dataset_size >= 1"),
        (lambda: traced_bound(temperature=0.0, dataset_size=3), ValueError, "temperature > 0"),
        (lambda: autoencoder().sample_images(KEY, 0), ValueError, "num_images >= 1"),
    ],
)
def test_messages(call, error, words):
    with pytest.raises(error, match=words):
        call()
