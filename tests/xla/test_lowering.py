"""`materialized` changes nothing but the program; diagonals are those of JAX's own functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.xla import diagonal_matrix, diagonal_of, materialized

X = jax.random.normal(jax.random.key(0), (3, 4))
DRESSED = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, row: (c, f(row)), 0, x)[1],
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
}


@pytest.mark.parametrize("dress", DRESSED.values(), ids=DRESSED)
def test_it_is_the_identity(dress):
    """Its value and derivatives, of a formula that is marked inside and out."""

    @jax.jit
    def everything(x):
        def results(mark):
            fn = dress(lambda x: mark(jnp.sin(mark(x))) * x)
            gradient = jax.grad(lambda x: jnp.sum(fn(x) ** 2))
            derivatives = jax.jvp(fn, (x,), (jnp.ones_like(x),))[1], *jax.jvp(gradient, (x,), (x,))
            return fn(x), derivatives

        return results(materialized), results(lambda x: x)

    (value, marked), (expected, bare) = everything(X)
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_allclose(marked, bare, rtol=1e-12)


def test_nothing_happens_outside_of_a_trace():
    assert materialized(X) is X


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other compilers get the identity")
def test_readers_do_not_repeat_a_formula():
    """Two transposed readers of a sine: the compiler would put a copy of it into each."""

    def reads(mark):
        def total(x):
            once = mark(jnp.sin(x) * jnp.cos(x) + x)
            return jnp.sum((once.T * 2) ** 2), jnp.flip(once.T, 0) + 1

        text = jax.jit(jax.vmap(total)).lower(jnp.ones((2, 8, 8))).compile().as_text()
        return text.count(" cosine(")

    assert reads(materialized) == 1 < reads(lambda x: x)


def test_what_no_one_reads_is_not_stored():
    """Transposing a scan whose outputs are stored, one of them for nothing, was an error."""

    def total(x):
        _, (one, two) = jax.lax.scan(lambda carry, row: (carry, (row**2, row**3)), 0.0, x)
        return jnp.sum(materialized((one, two))[0])

    x = jnp.arange(6.0).reshape(2, 3)
    assert jnp.array_equal(jax.jit(jax.grad(total))(x), 2 * x)
    assert jnp.array_equal(jax.grad(jax.checkpoint(total))(x), 2 * x)


def test_other_platforms_get_the_identity():
    exported = jax.export.export(jax.jit(materialized), platforms=["cuda"])(jnp.ones(3))
    module = exported.mlir_module()
    assert "negate" not in module
    assert "optimization_barrier" not in module


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_diagonals_of_one_matrix_or_of_many(backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    for shape in ((3, 3), (2, 1, 1), (2, 5, 4, 4)):
        matrix = np.random.default_rng(0).normal(size=shape)
        entries = diagonal_of(jnp.asarray(matrix))
        np.testing.assert_array_equal(entries, np.diagonal(matrix, axis1=-2, axis2=-1))
        np.testing.assert_array_equal(diagonal_matrix(entries), matrix * np.eye(shape[-1]))
        zeros = jnp.isfinite(diagonal_matrix(jnp.inf * entries))
        assert zeros.sum() == matrix.size - entries.size
