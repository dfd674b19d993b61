"""The discrete autoencoder against sampled networks, its plain counterpart and the ELBO's definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.reference.agreement import Agreement
from tests.builders import assert_close

CODES, TOKENS, SIZE = 5, 4, 4
IMAGES = (jax.random.uniform(jax.random.key(0), (3, SIZE, SIZE)) > 0.5).astype(jnp.float32)
KEY = jax.random.key(1)


def autoencoder(**options):
    return mj.nn.DiscreteAutoencoder(
        **{
            "image_size": SIZE,
            "patch_size": 2,
            "num_codes": CODES,
            "num_features": 4,
            "num_heads": 2,
            "hidden_features": 6,
            "structure": mj.Diagonal,  # which compiles fastest
            "rngs": nnx.Rngs(0),
            **options,
        }
    )


@pytest.fixture(autouse=True)
def ranks_of_a_user():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def model():
    return autoencoder(relative_scale=0.3)


def call(method, module, *inputs, **options):
    """A method, compiled: op by op it would take ten times as long."""
    return nnx.jit(lambda m, *x: getattr(m, method)(*x, **options))(module, *inputs)


@pytest.mark.parametrize("likelihood", [mj.objectives.Bernoulli(), mj.objectives.Gaussian(0.2)])
def test_certain_weights_make_the_plain_network(likelihood):
    certain = autoencoder(posterior=mj.posterior.Point, likelihood=likelihood)
    plain = certain.mean_network()
    assert_close(
        call("code_log_probs", certain, IMAGES), call("code_log_probs", plain, IMAGES), 1e-5
    )
    options = {"straight_through": True}
    mine = call(
        "negative_elbo", certain, IMAGES, KEY, 0.5, dataset_size=1, kl_weight=0.0, **options
    )
    theirs = call("negative_elbo", plain, IMAGES, KEY, 0.5, **options)
    assert_close(mine.total, theirs.total, 1e-4)
    again = autoencoder(likelihood=likelihood)
    again.load(plain)
    for left, right in zip(
        jax.tree.leaves(nnx.state(again.mean_network())),
        jax.tree.leaves(nnx.state(plain)),
        strict=True,
    ):
        assert (left == right).all()


def test_parts_are_what_they_are_called(model):
    """Each part from its definition: draws of codes, the likelihood spelled out, both divergences."""
    bound = call(
        "negative_elbo",
        model,
        IMAGES,
        KEY,
        1.0,
        dataset_size=10,
        kl_weight=0.5,
        straight_through=True,
    )
    log_probs = call("code_log_probs", model, IMAGES)
    z = jax.nn.one_hot(mj.discrete.gumbel_max(KEY, log_probs), CODES)
    mean, cov = call("decode", model, z)
    logits, variance = model.pixels(mean), model.pixels(jax.vmap(lambda c: c.variance())(cov))
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    f = logits[..., None] + jnp.sqrt(variance)[..., None] * nodes
    fit = IMAGES[..., None] * f - jnp.logaddexp(0.0, f)
    expected = -jnp.sum(fit @ (weights / weights.sum()), axis=(1, 2))
    assert_close(bound.reconstruction, expected, 1e-4)
    probs = jnp.exp(log_probs)
    kl = jnp.sum(probs * (log_probs + jnp.log(CODES)), axis=(1, 2))
    assert_close(bound.code_kl, kl, 1e-4)
    assert_close(bound.weight_kl, 0.5 * model.kl() / 10, 1e-5)
    assert_close(bound.total, bound.reconstruction + bound.code_kl + bound.weight_kl, 1e-6)


def test_moments_of_both_halves_against_sampled_networks():
    """2,000 draws: 1.6 % is noise in a sd, 0.02 sd in a mean."""
    model = autoencoder(
        num_features=16, hidden_features=16, relative_scale=0.1, structure=mj.Separable
    )
    z = jax.nn.one_hot(jnp.asarray([0, 3, 3, 1]), CODES)

    @nnx.jit
    def moments(model):
        three = model.encode(IMAGES[0]), model.probabilities(IMAGES[0]), model.decode(z)
        return [(mean, jnp.sqrt(cov.variance())) for mean, cov in three]

    @nnx.jit
    def draws(model):
        def one(key):
            network = model.sample(key)
            logits = network.encoder(network.patches(IMAGES[0]))
            return logits, jax.nn.softmax(logits), network.decode(z)

        return jax.lax.map(one, jax.random.split(KEY, 2000), batch_size=200)

    for (mean, sd), sampled in zip(moments(model), draws(model), strict=True):
        agreement = Agreement.of(mean, sd, sampled.mean(0), sampled.std(0))
        assert agreement.mean_error < 0.1
        assert 0.95 < agreement.sd_ratio < 1.05


@pytest.mark.parametrize(
    ("likelihood", "through"),
    [(mj.objectives.Bernoulli(), True), (mj.objectives.Gaussian(0.2), False)],
)
def test_one_step_has_finite_gradients_everywhere(likelihood, through):
    model = autoencoder(likelihood=likelihood, learn_prior=True)

    @nnx.jit
    def slopes(model):
        def loss(model):
            bound = model.negative_elbo(IMAGES, KEY, 0.5, dataset_size=3, straight_through=through)
            return bound.total.mean()

        return nnx.grad(loss)(model)

    leaves = jax.tree.leaves(slopes(model))
    assert all(jnp.isfinite(leaf).all() for leaf in leaves)
    assert sum(bool(jnp.any(leaf != 0)) for leaf in leaves) == len(leaves)


def test_batches_and_single_images(model):
    log_probs = call("code_log_probs", model, IMAGES)
    assert log_probs.shape == (3, TOKENS, CODES)
    assert_close(call("code_log_probs", model, IMAGES[1]), log_probs[1], 1e-5)
    mean, cov = call("encode", model, IMAGES[None, :, :, :, None])
    assert mean.shape == cov.variances.shape == (1, 3, TOKENS, CODES)
    mean, _ = call("__call__", model, IMAGES, KEY, 0.5)
    assert model.pixels(mean).shape == IMAGES.shape
    assert (model.pixels(model.patches(IMAGES)) == IMAGES).all()


def test_images_from_the_prior(model):
    codes, mean, cov = call("sample_images", model, KEY, num_images=6)
    assert codes.shape == (6, TOKENS)
    assert (codes >= 0).all()
    assert (codes < CODES).all()
    assert mean.shape == cov.variances.shape == (6, TOKENS, 4)
    again, patches = model.mean_network().sample_images(KEY, 6)
    assert (again == codes).all()
    assert patches.shape == mean.shape


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
        (
            lambda: autoencoder().negative_elbo(IMAGES, KEY, 1.0, dataset_size=0),
            ValueError,
            "dataset_size >= 1",
        ),
        (
            lambda: autoencoder().negative_elbo(IMAGES, KEY, 0.0, dataset_size=1),
            ValueError,
            "temperature > 0",
        ),
        (lambda: autoencoder().sample_images(KEY, 0), ValueError, "num_images >= 1"),
    ],
)
def test_messages(call, error, words):
    with pytest.raises(error, match=words):
        call()
