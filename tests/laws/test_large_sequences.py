"""Scans over heads change the program but not its result; of blocks, see test_loops.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.layers import rules
from tests.builders import assert_close, random_block, random_cov

KEYS = jax.random.split(jax.random.key(8), 3)
SHAPE = (5, 6)
BLOCK = random_block(KEYS[0], SHAPE[1], 8, 0.3)
MEAN = jax.random.normal(KEYS[1], SHAPE)


@pytest.mark.parametrize(
    "structure", [mj.Diagonal, pytest.param(mj.Separable, marks=pytest.mark.slow)]
)
def test_heads_one_after_another(monkeypatch: pytest.MonkeyPatch, structure):
    mask = np.tril(np.ones((5, 5), bool))
    cov = random_cov(KEYS[2], structure, SHAPE, 0.3)

    def total(mean):
        out, out_cov = mj.attention(mean, cov, BLOCK.attention, num_heads=2, mask=mask)
        return jnp.sum(out**2) + jnp.sum(out_cov.to_dense() ** 2), (out, out_cov.to_dense())

    def traced():
        return jax.jit(jax.value_and_grad(lambda x: total(x), has_aux=True)).trace(MEAN)

    (_, together), gradient = traced().lower().compile()(MEAN)
    monkeypatch.setattr(rules, "_MANY_SCORES", 0)
    by_scan = traced()
    assert "scan" in str(by_scan.jaxpr)
    (_, alone), gradient_alone = by_scan.lower().compile()(MEAN)
    assert_close(alone[0], together[0])
    assert_close(alone[1], together[1])
    assert_close(gradient_alone, gradient, 1e-9)
