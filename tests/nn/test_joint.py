"""Outputs of several inputs together: sampled truth, every family, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import KERNEL_FAMILIES, assert_close

pytestmark = pytest.mark.usefixtures("ranks_of_a_user")

NET = mj.nn.MLP([3, 8, 2], rngs=nnx.Rngs(0))
X = np.random.default_rng(0).normal(size=(6, 3))


def off_blocks(matrix, size=2):
    """Only what different inputs share."""
    n = len(matrix) // size
    return matrix * (1 - np.kron(np.eye(n), np.ones((size, size))))


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_inputs_covary_as_in_sampled_networks():
    """20,000 networks give what inputs share to .06 themselves."""
    model = mj.Bayesian(NET, relative_scale=0.1)
    graph, state = nnx.split(model)
    keys = jax.random.split(jax.random.key(1), 20_000)

    @jax.jit
    def drawn(state, x):
        run = lambda key: nnx.merge(graph, state).sample(key)(x).ravel()  # noqa: E731
        return jax.lax.map(run, keys, batch_size=500)

    truth = np.cov(np.asarray(drawn(state, X)).T)
    mean, cov, cross = mj.joint(model, X[:4], X[4:])
    assert distance(off_blocks(cov), off_blocks(truth[:8, :8])) < 0.1
    assert distance(cross, truth[:8, 8:]) < 0.1
    assert_close(mean, NET(X[:4]).ravel(), 1e-6)


@pytest.mark.parametrize("family", KERNEL_FAMILIES[1:])
def test_each_inputs_own_block_is_that_of_the_linearised_model(family):
    model = mj.Bayesian(NET, family=family, random=nnx.PathContains("kernel"))
    known = model.replace(structure=mj.Full, linearised=True)(X)
    cov = mj.joint(model, X).cov.reshape(6, 2, 6, 2)
    assert_close(cov[np.arange(6), :, np.arange(6)], known.features, 1e-6)
    assert mj.joint(model, X, X).cross.shape == (12, 12)


def test_random_sums_keep_variances_and_are_right_on_average():
    net = mj.nn.MLP([3, 200, 2], rngs=nnx.Rngs(0))
    exact, fewer = (mj.joint(mj.Bayesian(net), X, rank=rank).cov for rank in (None, 300))
    assert_close(jnp.diag(fewer), jnp.diag(exact), 1e-6)
    assert 0.001 < distance(fewer, exact) < 0.1
    assert_close(mj.joint(mj.Bayesian(net), X, rank=5000).cov, exact, 1e-12)


class Stopped(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jax.lax.stop_gradient(self.layer(x))


MODEL = mj.Bayesian(NET)
WRONG = [
    (lambda: mj.joint(NET, X), "a mj.Bayesian. Got MLP"),
    (lambda: mj.joint(MODEL, X, rank=0), "rank >= 1. Got 0"),
    (lambda: mj.joint(MODEL, np.zeros((9000, 3))), "at most 2.28 numbers.* 18000 outputs"),
    (lambda: mj.joint(MODEL, (X, mj.Separable.zeros((1, 3)))), "Got the moments of a random"),
    (lambda: mj.joint(mj.Bayesian(Stopped()), X), "stop_gradient"),
    (lambda: mj.joint(mj.Bayesian(NET, relative_scale=1.0), X), "% of their squares nonlinear"),
]


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
