"""The evidence: linear regression, a joint belief of all weights, averages, the default, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats
from sklearn.linear_model import BayesianRidge

import moment_jax as mj
from moment_jax.inference.evidence import Evidence, Setting
from moment_jax.nn.modules import Raveled

GAUSSIAN, CATEGORICAL = mj.Gaussian(), mj.Categorical()
NOISY = mj.HeteroscedasticGaussian()
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3))
Y = X @ [[1.0, 0.3], [-2.0, 0.0], [0.5, 1.0]] + 0.3 * RNG.normal(size=(40, 2))
LABELS = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)

pytestmark = [
    pytest.mark.usefixtures("ranks_of_a_user"),
    pytest.mark.filterwarnings("ignore:.*without having converged:UserWarning"),
]


def linear(outputs=1, **options):
    return nnx.Linear(3, outputs, rngs=nnx.Rngs(0), param_dtype=float, **options)


def hidden(outputs=2, rngs=None):
    rngs = rngs or nnx.Rngs(0)
    layers = linear(4), jnp.tanh, nnx.Linear(4, outputs, rngs=rngs, param_dtype=float)
    return nnx.Sequential(*layers)


def outputs(raveled, weights, x):
    own = nnx.clone(raveled)
    own.weights.set_value(weights)
    return own(x)


def fit(network, likelihood=GAUSSIAN, data=(X, Y), **options):
    return mj.fit(
        network, likelihood, data,
        **{"objective": "evidence", "max_steps": 200, "progress": False, "receipt": True, **options},
    )  # fmt: skip


def test_of_a_linear_network_it_is_bayesian_linear_regression():
    units, y = np.array([10.0, 1.0, 0.1]), 50 * Y[:, 0] + 7
    scaled = (X - X.mean(axis=0)) / X.std(axis=0), (y - y.mean()) / y.std()
    flat = dict.fromkeys(("alpha_1", "alpha_2", "lambda_1", "lambda_2"), 0.0)
    known = BayesianRidge(compute_score=True, tol=1e-9, max_iter=1000, **flat).fit(*scaled)
    model, receipt = fit(linear(), data=(X * units, y), max_steps=3000)
    (found,) = receipt.evidence
    assert receipt.converged
    assert (receipt.objective, receipt.reason) == ("evidence", "4 weights, of 1 to 5,000")
    assert found.prior_precision["kernel"] == pytest.approx(known.lambda_, rel=1e-3)
    assert model.likelihood.noise_variance[0] == pytest.approx(y.var() / known.alpha_, rel=1e-3)
    assert found.log_evidence + 40 * np.log(y.std()) == pytest.approx(known.scores_[-1], abs=1e-2)
    mean, sd = known.predict(scaled[0], return_std=True)
    prediction = model.predict(X * units)
    np.testing.assert_allclose(prediction.mean[:, 0], y.mean() + y.std() * mean, atol=0.05)
    np.testing.assert_allclose(prediction.sd[:, 0], y.std() * sd, rtol=1e-3)


@pytest.mark.parametrize("likelihood", [CATEGORICAL, mj.Bernoulli(), mj.Gaussian(1.0)])
def test_the_matrix_of_all_weights_is_the_hessian(likelihood):
    network = Raveled(linear(3))
    targets = LABELS if likelihood is CATEGORICAL else np.eye(3)[LABELS]

    def minus_log_likelihood(weights):
        logits = outputs(network, weights, X)
        if likelihood is CATEGORICAL:
            return -jnp.sum(jax.nn.log_softmax(logits)[np.arange(40), LABELS])
        if isinstance(likelihood, mj.Gaussian):
            return jnp.sum((targets - logits) ** 2) / 2
        return jnp.sum(jnp.logaddexp(0, logits) - targets * logits)

    weights = RNG.normal(size=12)
    mode = Evidence(network, likelihood, (X,), targets, (3,)).mode(weights)
    np.testing.assert_allclose(mode.roots, jax.hessian(minus_log_likelihood)(weights), atol=1e-9)


@pytest.mark.parametrize("rows", [5, 40])  # fewer outputs than the 26 weights, and more
def test_noise_of_the_input_by_dense_formulas(rows):
    network, x, y = Raveled(hidden(2)), X[:rows], Y[:rows, :1]
    weights = RNG.normal(size=26)
    evidence = Evidence(network, NOISY, (x,), y, (2,))
    precision = np.array([0.5, 2.0, 1.0, 3.0])
    mode, each = evidence.mode(weights), precision[evidence.of]
    mean, log_noise = outputs(network, weights, x).T
    jacobian = np.asarray(jax.jacobian(outputs, 1)(network, weights, x))  # (N, 2, P)
    information = np.stack([np.exp(-log_noise), np.full(rows, 0.5)], axis=1)
    matrix = np.einsum("ncp,nc,ncq->pq", jacobian, information, jacobian) + np.diag(each)
    setting = Setting(precision, 1.0, np.zeros(y.shape))
    _, found, receipt, following = evidence.estimate(mode, setting, whole=True)
    cov = np.linalg.inv(matrix)
    np.testing.assert_allclose(found, cov, rtol=1e-9, atol=1e-12)
    used = np.bincount(evidence.of, 1 - each * np.diag(cov))
    np.testing.assert_allclose(receipt.effective_parameters, used.sum(), rtol=1e-9)
    squares = np.bincount(evidence.of, weights**2)
    np.testing.assert_allclose(following.precision, used / (squares + 1e-6), rtol=1e-9)
    doubt = np.einsum("np,pq,nq->n", jacobian[:, 0], cov, jacobian[:, 0])
    np.testing.assert_allclose(following.doubt[:, 0], doubt, rtol=1e-9)
    prior = stats.norm.logpdf(weights, 0, each**-0.5).sum()
    joint = stats.norm.logpdf(y[:, 0], mean, np.exp(log_noise / 2)).sum() + prior
    laplace = joint + 13 * np.log(2 * np.pi) - np.linalg.slogdet(matrix)[1] / 2
    assert receipt.log_evidence == pytest.approx(laplace, rel=1e-9)


class OneNoise(nnx.Module):
    def __init__(self):
        self.mean = nnx.Linear(120, 1, rngs=nnx.Rngs(0), param_dtype=float)
        self.log_noise = nnx.Param(jnp.zeros(1, float))

    def __call__(self, x):
        mean = self.mean(x)
        return jnp.concatenate([mean, jnp.broadcast_to(self.log_noise[...], mean.shape)], axis=-1)


@pytest.mark.slow
def test_a_predicted_noise_that_is_constant_is_that_of_mackay():
    x = RNG.normal(size=(400, 120))  # residuals alone are a quarter too small
    y = x @ RNG.normal(size=120) / 5 + RNG.normal(size=400)
    known = fit(OneNoise().mean, data=(x, y), max_steps=3000)[0].likelihood.noise_variance[0]
    member = fit(OneNoise(), NOISY, (x, y), max_steps=3000)[0]
    np.testing.assert_allclose(jnp.exp(member(x).mean[:, 1]), known, rtol=0.05)


@pytest.mark.slow
def test_noise_of_the_input_in_any_units():
    x = RNG.uniform(-1, 1, size=(300, 1))
    y = 50 + 30 * x[:, 0] + 5 * np.exp(x[:, 0]) * RNG.normal(size=300)
    net = nnx.Linear(1, 2, rngs=nnx.Rngs(0), param_dtype=float)
    model, _ = fit(net, NOISY, (100 * x, y), members=2, max_steps=3000)
    found = model.predict(100 * x)
    np.testing.assert_allclose(found.sd[:, 0], 5 * np.exp(x[:, 0]), rtol=0.15)


@pytest.fixture(scope="module")
def average():
    network = hidden()
    with jax.numpy_rank_promotion("allow"):
        return network, *fit(network, members=2, seed=3)


@pytest.mark.slow
def test_the_belief_is_about_all_weights_together(average):
    network, (model, _), receipt = average[0], average[1].members, average[2]
    now, before = (x.layers[0].kernel[...] for x in (network, hidden()))
    np.testing.assert_array_equal(now, before)
    assert list(receipt.evidence[0].prior_precision) == [
        f"layers/{i}/{name}" for i in (0, 2) for name in ("bias", "kernel")
    ]
    assert 4 < receipt.evidence[0].effective_parameters < 26
    belief = model.beliefs["weights"]
    raveled = Raveled(model.at_means())
    np.testing.assert_array_equal(raveled.weights[...], belief.mean)
    jacobian = jax.jacobian(outputs, 1)(raveled, belief.mean, X[:5])
    moments = model(X[:5])
    np.testing.assert_allclose(moments.mean, raveled(X[:5]), rtol=1e-6)
    expected = jnp.einsum("ncp,pq,ndq->ncd", jacobian, belief.cov, jacobian)
    np.testing.assert_allclose(moments.features, expected, rtol=1e-6, atol=1e-9)
    own = dict(nnx.to_flat_state(nnx.state(model.sample(jax.random.key(0)), nnx.Param)))
    assert own[("network", "layers", 0, "kernel")].shape == (3, 4)
    restored = nnx.merge(*nnx.split(model))
    np.testing.assert_array_equal(restored.predict(X).sd, model.predict(X).sd)
    assert np.isfinite(model.scaled(0.5).kl())
    with pytest.raises(mj.PropagationError, match="linearised"):
        model.replace(linearised=False)(X)


@pytest.mark.slow
def test_moments_of_weights_that_go_together_are_those_of_small_noise():
    last = nnx.Linear(4, 1, use_bias=False, rngs=nnx.Rngs(1), param_dtype=float)
    network = Raveled(nnx.Sequential(linear(4, use_bias=False), jnp.tanh, last))
    root = RNG.normal(size=(16, 16))
    belief = mj.posterior.FullNormal(network.weights[...], jnp.asarray(1e-8 * root @ root.T))
    model = mj.Bayesian(network, beliefs={"weights": belief}, structure=mj.Full)
    found, expected = model(X).variance, model.replace(linearised=True)(X).variance
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    assert type(model.at_means()) is nnx.Sequential


@pytest.mark.slow
def test_members_are_averaged(average):
    _, model, receipt = average
    assert isinstance(model, mj.nn.Mixture)
    assert len(receipt.evidence) == len(model.members) == 2
    parts, found = [member.predict(X) for member in model.members], model.predict(X, batch_size=7)
    assert not np.allclose(parts[0].mean, parts[1].mean, rtol=1e-4)
    each = np.stack([part.log_prob(Y) for part in parts])
    np.testing.assert_allclose(found.log_prob(Y), np.logaddexp(*each) - np.log(2), rtol=1e-6)
    np.testing.assert_allclose(found.mean, (parts[0].mean + parts[1].mean) / 2, rtol=1e-6)
    second = np.mean([part.variance + part.mean**2 for part in parts], axis=0)
    np.testing.assert_allclose(found.variance, second - found.mean**2, rtol=1e-5)
    np.testing.assert_allclose(jnp.diagonal(found.cov, axis1=1, axis2=2), found.variance, rtol=1e-5)
    assert found.sample(jax.random.key(0)).shape == (40, 2)
    compiled = nnx.jit(lambda model, x: model.log_prob(x, Y))(model, X)
    np.testing.assert_allclose(compiled, found.log_prob(Y), rtol=1e-5)
    with pytest.raises(TypeError, match=r"mj.Bayesian\. Got an empty one"):
        mj.nn.Mixture([])


@pytest.mark.parametrize("likelihood", [CATEGORICAL, mj.Bernoulli()])
def test_classes(likelihood):
    y = LABELS if likelihood is CATEGORICAL else np.eye(3)[LABELS]
    model, receipt = fit(hidden(3), likelihood, (X, y), members=2)
    parts, found = [member.predict(X) for member in model.members], model.predict(X)
    np.testing.assert_allclose(found.probs, (parts[0].probs + parts[1].probs) / 2, rtol=1e-6)
    assert type(found) is type(parts[0])
    assert (found.epistemic >= np.mean([part.epistemic for part in parts], axis=0) - 1e-6).all()
    assert np.mean(np.log(found.probs[np.arange(40), LABELS])) > -0.7
    assert receipt.evidence[0].noise_variance is None
    assert receipt.history[-1][1] < receipt.history[0][1]


@pytest.mark.slow
def test_a_known_noise_ten_rows_and_constant_inputs():
    x = np.concatenate([X[:10, :2], np.full((10, 1), 7.0)], axis=1)
    model, receipt = fit(linear(2), mj.Gaussian(0.04), (x, Y[:10]))
    assert model.likelihood.noise_variance == 0.04
    assert np.isfinite(receipt.evidence[0].log_evidence)
    assert (model.predict(x + 1).variance > 0.04).all()
    network = nnx.Sequential(linear(50), jax.nn.relu, nnx.Linear(50, 1, rngs=nnx.Rngs(1)))
    model, receipt = fit(network, data=(x, Y[:10, 0]), max_steps=2000)  # 201 weights
    assert receipt.evidence[0].effective_parameters < 10
    near, far = (model.predict(scale * X[10:]).sd.mean() for scale in (1, 100))
    assert 0.1 < near < far / 10


@pytest.mark.parametrize(
    ("change", "objective", "reason"),
    [
        ({}, "evidence", "8 weights, of 1 to 5,000"),
        ({"likelihood": mj.Gaussian(1.0)}, "evidence", "8 weights"),
        ({"likelihood": NOISY}, "evidence", "8 weights"),
        ({"likelihood": CATEGORICAL}, "elbo", "not Gaussian"),
        ({"structure": mj.Full}, "elbo", "structure, for the ELBO"),
        ({"held_out": 0.2}, "elbo", "held_out"),
        ({"objective": "elbo"}, "elbo", "asked for"),
        ({"network": mj.Bayesian(linear(2))}, "elbo", "a Bayesian"),
    ],
)
def test_the_default(change, objective, reason, capsys):
    """It is told before the data are looked at, and here are none: nothing is trained."""
    options = {"network": linear(2), "objective": None, "data": (X[:0], Y[:0]), "progress": True}
    with pytest.raises(ValueError, match=r"at least one. Got \[0, 0\]"):
        fit(**{**options, **change})
    told = capsys.readouterr().err
    assert told.startswith(f"fit: objective={objective!r}, for ")
    assert reason in told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"objective": "map"}, "objective=.*Got 'map'"),
        ({"network": nnx.Linear(3, 2000, rngs=nnx.Rngs(0))}, '5,000 weights.*8,000.*"elbo"'),
        ({"network": mj.Bayesian(linear(2))}, 'plain network.*Got a Bayesian.*"elbo"'),
        ({"random": nnx.PathContains("kernel")}, 'Got random, for the ELBO.*"elbo"'),
        ({"objective": "plain", "kl_weight": 0.5}, 'no belief for plain .* Got kl_weight.*"elbo"'),
        ({"likelihood": NOISY, "network": linear(3)}, "2 D outputs.*Got 3 outputs"),
        ({"members": 1.5}, "whole number of members. Got 1.5"),
        ({"members": 0}, "positive number as members"),
        ({"data": (X, np.stack([Y[:, 0], np.ones(40)], 1))}, "targets that vary.*one value. Leave"),
        ({"data": (X, np.full((40, 2), np.nan))}, "finite in float64.*missing values"),
        ({"data": (X * np.nan, Y)}, "finite inputs.*Fill or drop"),
        ({"data": (X[:1], Y[:1])}, "targets that vary"),
        ({"learning_rate": 1e200}, "diverged.*learning_rate below"),
    ],
)
def test_bad_input(change, words):
    with pytest.raises(ValueError, match=words):
        fit(**{"network": linear(2), "max_steps": 20, **change})
