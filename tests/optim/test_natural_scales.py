"""The natural gradient of a Gaussian's spread against its dense Fisher matrix, family by family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

import moment_jax as mj
from moment_jax.nn import Belief

optim, families = mj.optim, mj.posterior
SHAPE = (3, 2)


def belief(family):
    """A belief whose stored arrays are nowhere near where they start."""
    node = Belief(jnp.zeros(SHAPE), family=family, scale=0.3)
    for name, value in node.raw.items():
        noise = 0.3 * jax.random.normal(jax.random.key(len(name)), value.shape)
        value.set_value((value[...] + noise).astype(jnp.float64))
    node.mean.set_value(node.mean[...].astype(jnp.float64))
    return node


def covariance(node):
    """Of all entries, by the family's own moments."""
    posterior = node.posterior
    if isinstance(posterior, families.MatrixNormal):
        return jnp.kron(posterior.in_cov, posterior.out_cov)
    if isinstance(posterior, families.FullNormal):
        return posterior.cov.reshape(6, 6)
    return jnp.diag(posterior.marginal_variance().ravel())


FAMILIES = [families.Factorized, families.OutputShared, families.MatrixNormal, families.FullNormal]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_natural_gradient_is_that_of_the_dense_fisher(family):
    """Compared by what it does to the covariance, for factors of a product may trade a constant."""
    node = belief(family)
    graph, raw, mean = nnx.split(node, mj.nn.VariationalScale, ...)
    flat, unravel = ravel_pytree(raw)
    tx = optim.natural_scales(1.0, optim.find_scales(node), max_change=1e9)

    @jax.jit
    def compute(flat):
        def of(values):
            return covariance(nnx.merge(graph, unravel(values), mean))

        def loss(values):
            sigma = of(values)
            weights = jnp.sin(jnp.arange(36.0)).reshape(6, 6)
            return jnp.sum(weights * sigma) - jnp.linalg.slogdet(sigma)[1]

        grad, params = jax.grad(loss)(flat), unravel(flat)
        updates, _ = tx.update(unravel(grad), tx.init(params), params)
        return of(flat), jax.jacobian(of)(flat), grad, ravel_pytree(updates)[0]

    sigma, slopes, grad, got = map(np.asarray, compute(flat))
    # 1/2 tr(S^-1 dS S^-1 dS') in the stored arrays: the Fisher matrix of a Gaussian's covariance.
    scaled = np.einsum("ij,jkp->ikp", np.linalg.inv(sigma), slopes)
    fisher = np.einsum("ijp,jiq->pq", scaled, scaled) / 2
    # Entries above the diagonal of a factor are not used: no gradient, no Fisher, no step.
    expected = -np.linalg.pinv(fisher, rcond=1e-10) @ grad
    np.testing.assert_allclose(slopes @ got, slopes @ expected, rtol=1e-7, atol=1e-9)


def test_mean_and_spread_are_separate():
    """The Fisher matrix of N(m, s^2) in (m, log s) is diag(1/s^2, 2): sampled, within four errors."""
    log_s = jnp.log(0.7)

    def score(w):
        log_q = lambda m, r: -((w - m) ** 2) / (2 * jnp.exp(2 * r)) - r  # noqa: E731
        return jnp.stack(jax.grad(log_q, (0, 1))(0.3, log_s))

    w = 0.3 + 0.7 * jax.random.normal(jax.random.key(0), (20_000,))
    scores = np.asarray(jax.jit(jax.vmap(score))(w))
    outer = scores[:, :, None] * scores[:, None, :]
    error = outer.std(axis=0) / len(w) ** 0.5
    assert np.all(np.abs(outer.mean(axis=0) - np.diag([1 / 0.49, 2.0])) < 4 * error)


@pytest.mark.parametrize("kl_weight", [1.0, 0.1])
def test_a_rate_of_one_fits_a_variance_at_once_near_the_optimum(kl_weight):
    """KL(N(0, s^2) || N(0, 1)) from s = 1.01: Newton's step, up to second order."""
    node = Belief(jnp.zeros((4,), jnp.float64), scale=1.01, prior_scale=1.0)
    scales = optim.find_scales(node)
    tx = optim.natural_scales(1.0, scales, dataset_size=50 / kl_weight)
    optimizer = nnx.Optimizer(node, tx, wrt=mj.nn.VariationalScale)
    wrt = nnx.DiffState(0, mj.nn.VariationalScale)
    grads = nnx.grad(lambda node: kl_weight * node.kl() / 50, argnums=wrt)(node)
    optimizer.update(node, grads)
    sd = jnp.sqrt(node.posterior.variance)
    assert np.all(np.abs(sd - 1) < 3e-4)


def test_no_entry_moves_further_than_it_may():
    node = belief(families.Factorized)
    raw = nnx.state(node, mj.nn.VariationalScale)
    tx = optim.natural_scales(1.0, optim.find_scales(node), max_change=0.1)
    grads = jax.tree.map(lambda x: jnp.full_like(x, 1e6).at[0, 0].set(jnp.nan), raw)
    updates, _ = tx.update(grads, tx.init(raw), raw)
    before = jax.nn.softplus(jax.tree.leaves(raw)[0])
    (change,) = jax.tree.leaves(updates)
    after = jax.nn.softplus(jax.tree.leaves(raw)[0] + change)
    assert change[0, 0] == 0
    assert np.all(np.abs(jnp.log(after / before)) < 0.12)


def test_tiny_spreads_are_finite():
    node = Belief(jnp.zeros((2, 2)), scale=1e-12)
    raw = nnx.state(node, mj.nn.VariationalScale)
    tx = optim.natural_scales(0.1, optim.find_scales(node))
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, raw), tx.init(raw), raw)
    assert np.all(np.isfinite(jax.tree.leaves(updates)[0]))
