"""Ito's lemma against closed forms and the Hessian, and where the moment transforms use it."""

import jax
import jax.numpy as jnp
import numpy as np

import moment_jax as mj
from tests.builders import assert_close

brownian = mj.brownian

CLOSED_FORMS = {
    "square": (lambda t, x: x**2, 1.0, lambda t, x: 2 * x),
    "exponential": (lambda t, x: jnp.exp(x), np.exp(0.4) / 2, lambda t, x: jnp.exp(x)),
    # A martingale: no drift.
    "exponential martingale": (lambda t, x: jnp.exp(x - t / 2), 0.0, lambda t, x: jnp.exp(x - t / 2)),
    "time": (lambda t, x: t * x**3, 0.4**3 + 3 * 0.7 * 0.4, lambda t, x: 3 * t * x**2),
}  # fmt: skip


def test_closed_forms():
    """The last: d log S = (mu - sigma^2/2) dt + sigma dB for dS = mu S dt + sigma S dB."""
    mu, sigma = 0.3, 0.8
    moved = brownian.ito(
        lambda t, s: jnp.log(s), drift=lambda t, s: mu * s, diffusion=lambda t, s: sigma * s
    )

    @jax.jit
    def found(t, x):
        forms = {name: brownian.ito(form[0])(t, x) for name, form in CLOSED_FORMS.items()}
        return forms, moved(t, x)

    forms, geometric = found(0.7, 0.4)
    for name, (_, drift, diffusion) in CLOSED_FORMS.items():
        assert_close(forms[name][0], drift)
        assert_close(forms[name][1], diffusion(0.7, 0.4))
    assert_close(np.stack(geometric), np.array([mu - sigma**2 / 2, sigma]))


def function_of_vector(t, x):
    return {"a": jnp.sin(x[0]) * x[1] ** 2 + t * x[2], "b": jnp.outer(x, x)}


MATRIX = np.random.default_rng(0).normal(size=(3, 2))
SPREADS = {"standard": None, "scalar": 0.4, "diagonal": np.array([0.1, 2.0, 0.5]), "matrix": MATRIX}


def test_vectors_against_the_hessian():
    """Every kind of diffusion coefficient, as the matrix that it stands for."""
    x, t, a = np.array([0.3, -1.2, 0.7]), 0.5, np.array([1.0, 0.5, -2.0])
    matrices = {"standard": np.eye(3), "scalar": 0.4 * np.eye(3), "matrix": MATRIX}
    matrices["diagonal"] = np.diag(SPREADS["diagonal"])

    def of_kind(spread, t, x):
        diffusion = None if spread is None else lambda t, x: spread
        moved = brownian.ito(function_of_vector, drift=lambda t, x: a, diffusion=diffusion)
        return moved(t, x)

    @jax.jit
    def results(t, x):
        first = jax.jacobian(function_of_vector, argnums=(0, 1))(t, x)
        hessian = jax.jacfwd(jax.jacobian(function_of_vector, argnums=1), argnums=1)(t, x)
        return {k: of_kind(s, t, x) for k, s in SPREADS.items()}, first, hessian

    found, first, hessian = results(t, x)
    for kind, (drifts, diffusions) in found.items():
        b = matrices[kind]
        for name in ("a", "b"):
            by_time, jacobian = (np.asarray(part) for part in (first[name][0], first[name][1]))
            drift = by_time + jacobian @ a
            drift = drift + 0.5 * np.einsum("...ij,ik,jk->...", hessian[name], b, b)
            assert_close(drifts[name], drift)
            assert_close(diffusions[name], jacobian @ b)


def test_matrices_move_entry_by_entry():
    x = np.random.default_rng(1).normal(size=(2, 3))
    drift, diffusion = jax.jit(brownian.ito(lambda t, x: jnp.sum(x**2, axis=1)))(0.0, x)
    assert_close(drift, np.full(2, 3.0))
    assert diffusion.shape == (2, 6)


def test_softmax_drift_is_the_second_order_mean():
    """w/2 (diag R - 2 R w - <w, diag R> + 2 w^T R w), and what the moment transform adds for small R."""
    scores = np.array([0.3, -0.5, 1.2, 0.0])
    factor = np.random.default_rng(2).normal(size=(4, 4)) / 2
    cov, small = factor @ factor.T, 1e-6

    @jax.jit
    def results(scores):
        drift, _ = brownian.ito(lambda t, s: jax.nn.softmax(s), diffusion=lambda t, s: factor)(
            0, scores
        )
        structure = mj.Full(small * cov[None, :, None, :])
        return drift, mj.softmax(scores[None], structure)[0] - jax.nn.softmax(scores)[None]

    drift, correction = results(scores)
    w, diagonal = np.exp(scores) / np.exp(scores).sum(), np.diagonal(cov)
    expected = w / 2 * (diagonal - 2 * cov @ w - w @ diagonal + 2 * w @ cov @ w)
    assert_close(drift, expected)
    assert_close(correction[0] / small, drift, 1e-4)


def test_whole_numbers_are_numbers_too():
    square = jax.jit(brownian.ito(lambda t, x: x**2))
    assert square(0, 3)[0] == 1.0
    assert np.isfinite(square(0.0, np.float32(3))[0])
