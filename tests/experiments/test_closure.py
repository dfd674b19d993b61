"""The second table of the closure experiment: what users have without the library."""

import jax
import jax.numpy as jnp

from experiments import closure
from tests.builders import tiny_vision


def test_the_competitors_logits(monkeypatch):
    monkeypatch.setattr(closure, "NETWORKS", (10, 300))
    monkeypatch.setattr(closure, "REPEATS", 1)
    network = tiny_vision(hidden_features=16, activation="gelu")
    images = list(jax.random.normal(jax.random.key(0), (2, 4, 4)))
    keys = list(jax.random.split(jax.random.key(1), 2))
    with jax.numpy_rank_promotion("allow"):  # Flax's layers promote
        rows = closure._logits(network, images, keys, 2000)
    assert list(rows) == ["library", "linearised", *(f"{n} networks" for n in closure.NETWORKS)]
    assert rows["300 networks"]["mean_error"] < 0.2
    assert rows["library"]["sd_error"] < 0.1
    assert 0.5 < rows["linearised"]["sd_ratio"] < 2
    assert all(jnp.isfinite(jnp.asarray(list(row.values()))).all() for row in rows.values())
