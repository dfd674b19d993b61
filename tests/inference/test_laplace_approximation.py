"""Laplace approximations: exact where the model is linear, sensible where it is not, loud otherwise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.inference import laplace
from moment_jax.objectives import Bernoulli, Categorical, Gaussian
from tests.propagation.models import MyMLP, MyViT

X = jax.random.normal(jax.random.key(0), (24, 3))
ZEROS, NEGATIVE = (X, jnp.zeros((24, 1))), -jnp.ones(24, int)


pytestmark = pytest.mark.usefixtures("ranks_of_a_user")


def linear(outputs=1, **options):
    return nnx.Linear(3, outputs, rngs=nnx.Rngs(1), **options)


def evaluated(make, **options):
    """The model in inference mode."""
    model = make(nnx.Rngs(0), **options)
    model.eval()
    return model


def variances(cov):
    return jax.vmap(lambda c: c.variance())(cov)


def dense_cov(belief):
    belief = belief.belief if isinstance(belief, mj.posterior.Reshaped) else belief
    n = belief.mean.size
    return jnp.einsum("ij,op->iojp", belief.in_cov, belief.out_cov).reshape(n, n)


@pytest.mark.parametrize("kind", ["kfac", "last_layer"])
def test_of_a_linear_model_it_is_the_exact_posterior(kind):
    model = linear(use_bias=False, param_dtype=jnp.float64)
    data = X.astype(jnp.float64), jnp.zeros((24, 1))
    tree = laplace(model, Gaussian(0.5), data, kind=kind, prior_precision=2.0)
    x = np.asarray(data[0])
    assert np.allclose(dense_cov(tree["kernel"]), np.linalg.inv(x.T @ x / 0.5 + 2 * np.eye(3)))
    mean, cov = mj.bayesian(model, tree, linearised=True)(data[0])
    assert jnp.allclose(mean, model(data[0]))
    exact = np.einsum("ni,ij,nj->n", x, dense_cov(tree["kernel"]), x)
    assert np.allclose(variances(cov)[:, 0, 0], exact)


def test_the_diagonal_is_that_of_the_hessian():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(1), param_dtype=jnp.float64)
    x, labels = X.astype(jnp.float64), jnp.arange(24) % 4
    tree = laplace(model, Categorical(), (x, labels), kind="diagonal", prior_precision=0.5)
    graph, state = nnx.split(model)

    def loss(kernel):
        filled = jax.tree.map(lambda a: a, state)
        filled["kernel"].set_value(kernel)
        logs = jax.nn.log_softmax(nnx.merge(graph, filled)(x))
        return -jnp.sum(jnp.take_along_axis(logs, labels[:, None], 1))

    hessian = jax.hessian(loss)(model.kernel[...]).reshape(12, 12)
    assert np.allclose(tree["kernel"].variance.ravel(), 1 / (np.diag(hessian) + 0.5))


def test_the_evidence_is_highest_at_the_chosen_precision_and_batches_do_not_matter():
    model = evaluated(MyMLP)
    data = X, jnp.sin(X[:, :2])

    def found(precision=None):
        return laplace(model, Gaussian(0.1), data, prior_precision=precision, receipt=True)[1]

    best = found()
    (precision,) = set(best.prior_precision.values())
    whole, batches = (
        laplace(model, Gaussian(0.1), data, prior_precision=precision, batch_size=b)
        for b in (24, 10)
    )
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(batches), strict=True):
        assert np.allclose(a, b, atol=2e-5)
    assert best.log_evidence > max(found(precision * f).log_evidence for f in (0.8, 1.25))
    assert 0 < best.effective_parameters < 1000


def test_blocks_of_one_example_seen_many_times_are_the_dense_matrix_s_own():
    """Kronecker factors are exact then; counts of examples and the softmax's Hessian show."""
    model = evaluated(MyMLP)
    nnx.update(model, jax.tree.map(lambda w: w.astype(jnp.float64), nnx.state(model, nnx.Param)))
    x = jnp.tile(X[:1].astype(jnp.float64), (5, 1))
    labels = jnp.zeros(5, int)
    receipt = laplace(model, Categorical(), (x, labels), prior_precision=0.3, receipt=True)[1]
    graph, state, rest = nnx.split(model, nnx.Param, ...)
    weights = nnx.to_pure_dict(state)

    def logits(weights):
        filled = jax.tree.map(lambda a: a, state)
        nnx.replace_by_pure_dict(filled, weights)
        return nnx.merge(graph, filled, rest)(x)[0]

    p = jax.nn.softmax(logits(weights))
    hessian = 5 * (jnp.diag(p) - jnp.outer(p, p))
    determined, log_det = 0.0, 0.0
    for jacobian in jax.tree.leaves(jax.jit(jax.jacrev(logits))(weights)):
        j = np.asarray(jacobian).reshape(len(p), -1)
        # The eigenvalues of J^T H J that are not zero.
        values = np.maximum(np.linalg.eigvals(hessian @ (j @ j.T)).real, 0)
        determined += np.sum(values / (values + 0.3))
        log_det += np.sum(np.log1p(values / 0.3))
    square = sum(float(jnp.sum(w**2)) for w in jax.tree.leaves(weights))
    assert abs(receipt.effective_parameters / determined - 1) < 1e-6
    evidence = 5 * float(jnp.log(p[0])) - 0.5 * (0.3 * square + log_det)
    assert abs(receipt.log_evidence / evidence - 1) < 1e-6


@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [
        (Categorical(), lambda y: (y[:, 0] > 0).astype(int)),
        (Bernoulli(), lambda y: (y > 0).astype(float)),
        (Gaussian(0.1), lambda y: y),
        (Gaussian, lambda y: y),
    ],
    ids=["categorical", "bernoulli", "gaussian", "noise"],
)
def test_held_out_data_choose_the_precision_that_predicts_them_best(likelihood, targets):
    model = linear(2)
    other = jax.random.normal(jax.random.key(1), (10, 3))
    train, held = ((x, targets(jnp.sin(3 * x[:, :2]))) for x in (X, other))

    @jax.jit
    def score(belief, noise):
        mean, cov = mj.bayesian(model, belief, linearised=True)(held[0])
        cov = jax.vmap(lambda c: c.token_blocks()[0])(cov)
        if isinstance(likelihood, Bernoulli):
            p = mj.objectives.bernoulli_probabilities(mean, jnp.diagonal(cov, axis1=1, axis2=2))
            return jnp.log(jnp.where(held[1] > 0, p, 1 - p)).sum()
        of = likelihood if noise is None else Gaussian(noise)
        return jax.vmap(mj.objectives.log_marginal, (None, 0, 0, 0))(of, held[1], mean, cov).sum()

    def density(**options):
        belief, receipt = laplace(model, likelihood, train, receipt=True, **options)
        (precision,) = set(receipt.prior_precision.values())
        return score(belief, receipt.noise_variance), precision

    best, chosen = density(held_out=held)
    for precision in np.logspace(-2, 6, 17)[::4]:
        assert best >= density(prior_precision=precision)[0] - 1e-3
    assert 1e-2 <= chosen <= 1e6


def test_a_linear_regression_has_its_noise_and_prior_from_the_evidence():
    x = jax.random.normal(jax.random.key(2), (400, 3))
    weights = jnp.array([[1.0], [-2.0], [0.5]])
    y = x @ weights + 0.3 * jax.random.normal(jax.random.key(3), (400, 1))
    model = linear(use_bias=False)
    model.kernel.set_value(jnp.linalg.lstsq(x, y)[0])
    _, receipt = laplace(model, Gaussian, (x, y), receipt=True)
    assert abs(receipt.noise_variance - 0.09) < 0.02
    assert abs(receipt.effective_parameters - 3) < 0.01
    assert abs(receipt.prior_precision["model"] - 3 / float(jnp.sum(weights**2))) < 0.1


@pytest.mark.parametrize("kind", ["kfac", "last_layer"])
def test_a_vision_transformer_as_users_write_it(kind):
    """Convolutional patches, a class token, attention."""
    model = evaluated(MyViT, depth=1, width=8)
    inputs = jax.random.normal(jax.random.key(0), (6, 8, 8, 1))
    logits = nnx.jit(model)(inputs)
    options = {"kind": kind, "receipt": True, "per_layer": kind == "kfac"}
    data = inputs, jnp.argmax(logits, axis=-1)
    tree, receipt = laplace(model, Categorical(), data, **options)
    assert np.isfinite(receipt.log_evidence)

    @jax.jit
    def predicted(tree, x):
        options = [{"linearised": linearised, "structure": mj.Diagonal} for linearised in ways]
        return [mj.bayesian(model, tree, **option)(x) for option in options]

    ways = (True, False) if kind == "kfac" else (True,)
    found = predicted(tree, inputs[:1])
    for mean, cov in found:
        assert jnp.isfinite(mean).all()
        assert (variances(cov) > 0).all()
    assert jnp.allclose(found[0][0], logits[:1], atol=1e-5)


def test_a_prior_may_be_centred_at_given_weights():
    model = linear()
    weights = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    at = laplace(model, Gaussian(1.0), ZEROS, prior_mean=weights, receipt=True)[1]
    assert at.prior_precision["model"] > 1e6


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kind": "full"}, ValueError, "one of kfac, diagonal, last_layer. Got 'full'"),
        ({"likelihood": "mse"}, TypeError, "Categorical.*Got 'mse'"),
        ({"likelihood": Gaussian(0.0)}, ValueError, "positive noise variance"),
        ({"data": (X, jnp.zeros(24))}, ValueError, r"shape \(24, 1\). Got \(24,\)"),
        (
            {"likelihood": Categorical(), "data": (X, NEGATIVE)},
            ValueError,
            "0 to 0. Got int.* from -1",
        ),
        ({"model": jnp.tanh}, TypeError, "NNX module"),
        ({"held_out": (X, jnp.zeros(24))}, ValueError, r"shape \(24, 1\). Got \(24,\)"),
        ({"held_out": ZEROS, "per_layer": True}, ValueError, "one prior precision"),
    ],
)
def test_bad_input(change, error, words):
    arguments = {"model": linear(), "likelihood": Gaussian(1.0), "data": ZEROS}
    with pytest.raises(error, match=words):
        laplace(**{**arguments, **change})
