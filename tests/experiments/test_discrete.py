"""The discrete autoencoder by definitions and known scores; its experiment at a tiny size."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from experiments import discrete
from experiments.__main__ import main
from experiments.autoencoder import DiscreteAutoencoder
from tests.builders import assert_close

CODES, SIZE = 5, 4
IMAGES = (jax.random.uniform(jax.random.key(0), (3, SIZE, SIZE)) > 0.5).astype(jnp.float32)
KEY = jax.random.key(1)


def linear_autoencoder(patch=2, codes=CODES):
    """Transformers, in whose place linear layers are, take minutes to compile."""
    sizes = (patch**2, codes), (codes, patch**2)
    encoder, decoder = (nnx.Linear(*size, rngs=nnx.Rngs(0)) for size in sizes)
    return DiscreteAutoencoder(encoder, decoder, mj.nn.Patches(patch), codes)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_experiment(tmp_path, monkeypatch):
    network = linear_autoencoder(4, 4)
    monkeypatch.setattr(discrete, "autoencoder", lambda seed: network)
    options = "--steps 2 --plain-steps 3 --batch-size 4 --draws 2 --structure Diagonal"
    assert main(["discrete", *options.split(), "--out", str(tmp_path)]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert len(metrics["test"]) == 2
    assert all(np.isfinite(list(row.values())).all() for row in metrics["test"].values())
    assert all(1 <= row["perplexity"] <= 4 for row in metrics["test"].values())


def test_hard_codes_of_a_known_autoencoder():
    """Codes that are certain, and pixels of probability 1/2: 64 log 2 nats, and log K for each code."""
    network = DiscreteAutoencoder(
        lambda tokens: 1e3 * jnp.tile(jnp.eye(4)[2], (*tokens.shape[:-1], 1)),
        lambda z: jnp.zeros((*z.shape[:-1], 4)),
        mj.nn.Patches(2),
        num_codes=4,
    )
    found = discrete.score(network, discrete.load().test, jax.random.key(0), 2)
    np.testing.assert_allclose(found.reconstruction, 64 * np.log(2), rtol=1e-5)
    np.testing.assert_allclose(found.code_kl, 16 * np.log(4), rtol=1e-5)
    assert (found.codes == 2).all()
    assert found.summary()["perplexity"] == pytest.approx(1)
