"""Diagonals as JAX's own functions give them, of one matrix or of many."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from moment_jax.xla import diagonal_matrix, diagonal_of


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
@pytest.mark.parametrize("shape", [(3, 3), (2, 1, 1), (2, 5, 4, 4)])
def test_diagonals(shape, backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    matrix = jax.random.normal(jax.random.key(0), shape)
    entries = diagonal_of(matrix)
    assert jnp.array_equal(entries, jnp.diagonal(matrix, axis1=-2, axis2=-1))
    whole = diagonal_matrix(entries)
    assert jnp.array_equal(
        whole, matrix * jnp.eye(shape[-1]).reshape((1,) * (len(shape) - 2) + shape[-2:])
    )
    assert jnp.isfinite(diagonal_matrix(jnp.inf * entries)).sum() == matrix.size - entries.size
