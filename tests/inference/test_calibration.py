"""`calibrate`: the factor is a maximum of the held-out density; doubt follows the network's errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import moment_jax as mj

pytestmark = pytest.mark.usefixtures("ranks_of_a_user")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(800, 3))
WEIGHTS = np.array([[-4.0, 4.0], [0.0, 1.0], [2.0, 0.0]])


def net(weights=WEIGHTS):
    network = nnx.Linear(3, weights.shape[1], rngs=nnx.Rngs(0))
    network.kernel.set_value(jnp.asarray(weights))
    return network


def outputs(factor, weights=WEIGHTS):
    """Of networks with noise on the weights, one drawn for each example: their doubt is the truth."""
    noise = factor * np.sqrt(np.mean(weights**2)) * RNG.normal(size=(len(X), *weights.shape))
    return np.einsum("nd,ndc->nc", X, weights + noise)


def classes(factor):
    return np.argmax(outputs(factor) + RNG.gumbel(size=(len(X), 2)), axis=-1)


def factor(model):
    belief = model.beliefs["kernel"]
    return float(jnp.sqrt(belief.variance.mean() / jnp.mean(belief.mean**2)))


def calibrated(network, likelihood, held_out, **options):
    """In the structure that compiles fastest."""
    return mj.calibrate(network, likelihood, held_out, structure=mj.Diagonal, **options)


def test_the_factor_is_a_maximum_and_the_network_stays():
    network, labels = net(), classes(0.4)
    model = calibrated(network, mj.Categorical(), (X, labels), batch_size=300)
    assert model.structure is mj.Diagonal
    assert abs(factor(model) / 0.4 - 1) < 0.35

    def density(factor):
        return float(model.scaled(factor).log_prob(X, labels).mean())

    assert density(1) > max(density(0.8), density(1.25))
    assert density(1) > density(0.01) + 0.01
    np.testing.assert_array_equal(model.at_means().kernel[...], WEIGHTS)
    np.testing.assert_array_equal(network.kernel[...], WEIGHTS)
    assert not isinstance(model.beliefs["bias"], mj.posterior.Posterior)  # zeros stay certain


def test_noise_is_estimated_with_the_factor():
    weights = WEIGHTS[:, :1]
    y = outputs(0.3, weights) + 0.8 * RNG.normal(size=(len(X), 1))
    model = mj.calibrate(net(weights), mj.Gaussian(), (X, y))
    assert model.structure is mj.Separable
    assert abs(factor(model) / 0.3 - 1) < 0.15
    assert abs(float(model.likelihood.noise_variance[0]) / 0.64 - 1) < 0.3
    known = calibrated(net(weights), mj.Gaussian(0.64), (X, y))
    assert abs(factor(known) / 0.3 - 1) < 0.15


def test_linen_a_filter_and_an_edge():
    module = linen.Sequential([linen.Dense(4), linen.tanh, linen.Dense(2)])
    bound = module.bind(module.init(jax.random.key(0), X))
    held_out = X, np.asarray(bound(X) > 0, float)  # a network that is always right, and not sure
    with pytest.warns(UserWarning, match="the network is not overconfident"):
        model = calibrated(bound, mj.Bernoulli(), held_out, random=nnx.PathContains("layers_2"))
    assert ["/".join(path) for path in model.owned] == ["params/layers_2/kernel"]
    assert isinstance(model.at_means(), linen.Sequential)


def test_the_receipt_has_the_temperature_to_compare():
    network = net(3 * WEIGHTS)
    labels = np.argmax(X @ WEIGHTS + RNG.gumbel(size=(800, 2)), axis=-1)
    _, found = calibrated(network, mj.Categorical(), (X, labels), receipt=True)
    assert abs(found.temperature / 3 - 1) < 0.3
    logits = network(X) / found.temperature
    known = jax.nn.log_softmax(logits)[np.arange(800), labels].mean()
    np.testing.assert_allclose(found.log_density_temperature, known, rtol=1e-5)
    assert found.log_density_plain < min(found.log_density, found.log_density_temperature)
    own = np.mean(np.argmax(network(X), axis=1) == labels)
    np.testing.assert_allclose(found.accuracy_plain, own, rtol=1e-6)
    assert abs(found.accuracy - found.accuracy_plain) < 0.05


def test_a_factor_that_lowers_accuracy_is_refused(monkeypatch):
    """As passes whose means are wrong do: labels of large noise, or all of them, are turned."""
    predict, limit = mj.Bayesian.predict, 0.0

    def wrong(self, *inputs, **options):
        found = predict(self, *inputs, **options)
        turned = found.log_probs[:, ::-1] if factor(self) > limit else found.log_probs
        return dataclasses.replace(found, log_probs=turned)

    labels, options = classes(0.4), {"batch_size": 800}
    monkeypatch.setattr(mj.Bayesian, "predict", wrong)
    with pytest.raises(ValueError, match=r"as right as the network's, .*check\(x\). Got accuracy"):
        calibrated(net(), mj.Categorical(), (X, labels), **options)
    limit = 0.2
    model = calibrated(net(), mj.Categorical(), (X, labels), **options)
    assert 0.05 < factor(model) < limit


@pytest.mark.filterwarnings("ignore:.*not overconfident")
def test_few_examples_are_told_and_outputs_in_different_units_refused():
    for rows, units, told in (
        (50, [1.0, 1.0], pytest.warns(UserWarning, match="50 examples choose")),
        (400, [1.0, 1e4], pytest.raises(ValueError, match=r"suits all outputs.*for output 0")),
    ):
        network, noise = net(WEIGHTS * units), RNG.normal(size=(rows, 2)) * units
        y = network(X[:rows]) * (1 + 0.3 * RNG.normal(size=(rows, 2))) + noise
        with told:
            calibrated(network, mj.Gaussian(), (X[:rows], y))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"held_out": (X, np.full(800, 2))}, "targets of shape .* from 0 to 1"),
        ({"random": nnx.PathContains("none")}, "weights that `random` selects"),
        ({"likelihood": mj.Gaussian(-1.0)}, "positive noise variance"),
        ({"batch_size": 0}, "positive number as batch_size"),
        ({"network": net(np.nan * WEIGHTS)}, "finite outputs"),
        ({"network": nnx.BatchNorm(3, rngs=nnx.Rngs(0))}, "inference mode"),
    ],
)
def test_errors(change, message):
    likelihood, held_out = mj.Categorical(), (X, np.zeros(800, int))
    given = {"network": net(), "likelihood": likelihood, "held_out": held_out, **change}
    with pytest.raises(ValueError, match=message):
        mj.calibrate(**given)
