"""The discrete autoencoder's experiment at a tiny size, and its scores of a known network."""

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


@pytest.mark.slow
def test_the_experiment(tmp_path, monkeypatch):
    """Linear layers are in the place of the Transformers, whose gradients take minutes to compile."""
    encoder, decoder = (nnx.Linear(*s, rngs=nnx.Rngs(0)) for s in ((16, 4), (4, 16)))
    network = DiscreteAutoencoder(encoder, decoder, mj.nn.Patches(4), 4)
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
