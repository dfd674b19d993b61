"""Scores and projections fall into orthogonal parts, of which one makes a chain irreversible."""

import jax
import jax.numpy as jnp
import pytest

import moment_jax as mj
from tests.builders import assert_close

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("orbax.checkpoint")

from experiments.brownian.chains import antisymmetric_share, split_scores

brownian = mj.brownian


def test_scores_split_into_orthogonal_parts():
    scores = jax.random.normal(jax.random.key(4), (6, 6))
    parts = split_scores(scores)
    total = parts.symmetric + parts.gradient + parts.cyclic
    assert_close(total, scores - scores.mean(axis=1, keepdims=True))
    assert_close(parts.symmetric_share + parts.gradient_share + parts.cyclic_share, jnp.ones(()))
    for a, b in [("symmetric", "cyclic"), ("symmetric", "gradient"), ("gradient", "cyclic")]:
        assert abs(jnp.sum(getattr(parts, a) * getattr(parts, b))) < 1e-10
    # Without the cyclic part, and only then, the chain is reversible.
    for kept, reversible in [(parts.symmetric + parts.gradient, True), (total, False)]:
        chain = jax.nn.softmax(kept, axis=1)
        gap = brownian.detailed_balance_gap(chain, brownian.stationary(chain))
        assert (gap < 1e-12) == reversible
    assert split_scores(jnp.ones((3, 3))).symmetric_share == 0


def test_the_antisymmetric_share_of_projections():
    query, key = jax.random.normal(jax.random.key(6), (2, 5, 3))
    form = query @ key.T
    wanted = jnp.linalg.norm((form - form.T) / 2) ** 2 / jnp.linalg.norm(form) ** 2
    assert_close(antisymmetric_share(query, key), wanted)
    assert antisymmetric_share(query, query) < 1e-30


def test_bad_input():
    with pytest.raises(ValueError, match=r"\(T, T\)"):
        split_scores(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="one head"):
        antisymmetric_share(jnp.ones((2, 3)), jnp.ones((3, 3)))
