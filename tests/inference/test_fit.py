"""`fit`: trained models that predict, early stopping, noise, columns in any unit, loud errors."""

import warnings

import jax
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.inference.elbo import sampled_nll

GAUSSIAN, CATEGORICAL = mj.Gaussian(), mj.Categorical()
RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 3))
LABELS = (X[:, 0] > 0).astype(int)
NOISE = RNG.normal(size=(120, 1))

pytestmark = [
    pytest.mark.usefixtures("ranks_of_a_user"),
    pytest.mark.filterwarnings("ignore:.*without having converged:UserWarning"),
]


def fit(*arguments, **options):
    """In the structure that compiles fastest."""
    return mj.fit(*arguments, **{"structure": mj.Diagonal, "progress": False, **options})


def linear(outputs=1):
    return nnx.Linear(3, outputs, rngs=nnx.Rngs(0))


def arrays(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def test_noise_is_learned_and_in_every_prediction():
    y = X[:, :1] - X[:, 1:2] + 0.3 * NOISE
    model = mj.fit(linear(), GAUSSIAN, (X, y), learning_rate=0.02, max_steps=600)
    found, noise = model.predict(X), model.likelihood.noise_variance
    assert found.mean.shape == found.sd.shape == (120, 1)
    assert np.mean(np.abs(found.mean - y)) < 0.3
    assert 0.25 < np.sqrt(noise[0]) < 0.4
    assert (found.sd > np.sqrt(noise)).all()
    density = -0.5 * (np.log(2 * np.pi * found.sd**2) + ((y - found.mean) / found.sd) ** 2)
    assert np.allclose(model.log_prob(X, y), density[:, 0], atol=1e-3)


@pytest.mark.slow
def test_columns_of_any_unit_give_intervals_that_hold_as_many_targets_as_they_say():
    units, rng = np.array([1e3, 1e-3, 1.0]), np.random.default_rng(1)
    x = rng.normal(size=(700, 3))
    y = x @ [[1.0, 0.1], [-2.0, 0.0], [0.5, 0.3]] + 0.5 * rng.normal(size=(700, 2))
    x, y = x * units + [1e4, 0.0, 5.0], y * [1e4, 1e-4] + [0.0, 3.0]
    net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    model = fit(net, GAUSSIAN, (x[:200], y[:200]), learning_rate=0.03, max_steps=600)
    low, high = model.predict(x[200:]).interval(0.9)
    covered = np.mean((low < y[200:]) & (y[200:] < high), axis=0)
    assert (np.abs(covered - 0.9) < 0.05).all()
    np.testing.assert_allclose(model.likelihood.noise_variance, [0.25e8, 0.25e-8], rtol=0.3)
    one = model.predict(np.round(x[:1]).astype(int))  # integers are numbers of the same columns
    np.testing.assert_allclose(one.mean, model.predict(np.round(x[:1])).mean, rtol=1e-6)


def test_a_known_noise_and_constant_columns_are_in_raw_units_too():
    x = np.concatenate([X[:, :2], np.full((120, 1), 7.0)], axis=1)
    model = fit(linear(), mj.Gaussian(50.0), (x, 1e3 * X[:, 0]), max_steps=50)
    assert np.allclose(model.likelihood.noise_variance, 50)
    assert np.isfinite(model.predict(x + 1).sd).all()
    assert (model.predict(x).variance > 50).all()


UNITS = np.array([1e3, 1.0, 1e-3])


def in_raw_units(last):
    """A network for columns of these units, as if it had been trained, and its data."""
    net = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), jax.numpy.tanh, last)
    net.layers[0].kernel.set_value(net.layers[0].kernel[...] / UNITS[:, None])
    net.layers[0].bias.set_value(-(np.ones(3) @ net.layers[0].kernel[...]))
    return net, X * UNITS + 1


@pytest.mark.parametrize("likelihood", [GAUSSIAN, CATEGORICAL])
@pytest.mark.parametrize("objective", ["evidence", "elbo"])
def test_a_trained_network_is_brought_along_in_its_own_units(objective, likelihood):
    last = nnx.Linear(3, 2, rngs=nnx.Rngs(1))
    last.kernel.set_value(50 * last.kernel[...])
    net, x = in_raw_units(last)
    own = net(x)
    y = np.argmax(own, axis=1) if likelihood is CATEGORICAL else own + 1000.0
    if likelihood is GAUSSIAN:
        last.bias.set_value(np.full(2, 1000.0))
    options = {"structure": mj.Diagonal} if objective == "elbo" else {}
    options |= {"objective": objective, "max_steps": 1, "learning_rate": 1e-9}
    model = mj.fit(net, likelihood, (x, y), **options)
    np.testing.assert_allclose(model.at_means()(x), net(x), atol=1e-3 * own.std())


def test_a_trained_network_without_dense_layers_is_told():
    einsum = nnx.Einsum("ni,io->no", (3, 1), rngs=nnx.Rngs(0))  # no bias
    einsum.kernel.set_value(np.array([[1e3], [0.0], [0.0]], np.float32))
    with pytest.warns(UserWarning, match="no dense layers for the units of"):
        fit(einsum, GAUSSIAN, (X, 1e3 * X[:, 0]), max_steps=1)


@pytest.mark.parametrize("likelihood", [CATEGORICAL, mj.Bernoulli()])
def test_classes(likelihood):
    labels = (X[:, 0] > 0).astype(int) + (X[:, 1] > 1)
    y = labels if likelihood is CATEGORICAL else np.eye(3)[labels]
    model = fit(linear(3), likelihood, (X, y), max_steps=250, learning_rate=0.03)
    probs = model.predict(X).probs
    assert probs.shape == (120, 3)
    if likelihood is CATEGORICAL:
        assert np.allclose(probs.sum(1), 1, atol=1e-5)
        own = np.log(probs[np.arange(120), labels])
        assert np.allclose(model.log_prob(X, y), own, atol=1e-5)
    assert np.mean(np.log(probs[np.arange(120), labels])) > -0.5


def test_tokens_have_classes_of_their_own_and_count_for_one_example():
    net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    x = X.reshape(30, 4, 3)
    model, receipt = fit(
        net, CATEGORICAL, (x, (x[..., 0] > 0).astype(int)), held_out=(x, np.zeros((30, 4), int)),
        max_steps=50, receipt=True, relative_scale=1e-4, prior="network", prior_scale=0.5,
    )  # fmt: skip
    assert type(model.at_means()) is nnx.Linear  # sequences are not standardised
    assert np.array_equal(model.owned["kernel",].prior.mean, net.kernel[...])
    nll = -model.log_prob(x, np.zeros((30, 4), int)).sum() / 30
    np.testing.assert_allclose(receipt.history[0][2], nll, rtol=1e-4)


def test_the_model_is_trained_to_the_best_point_and_the_network_is_not_changed():
    network = linear(2)
    before = arrays(network)
    held = X[100:], np.sin(X[100:, :2])
    model, receipt = fit(
        network, GAUSSIAN, (X[:100], np.sin(X[:100, :2])), held_out=held, max_steps=300,
        learning_rate=2e-2, patience=1, receipt=True,
    )  # fmt: skip
    scores = [nll for _, _, nll in receipt.history]
    assert min(scores) < scores[0]
    assert abs(sampled_nll(model, ((held[0],), held[1]), 20) - min(scores)) < 1.1e-3
    assert abs(-model.log_prob(*held).mean() - min(scores)) < 0.05  # of 16 sampled networks
    assert model.structure is mj.Diagonal
    assert jax.tree.all(jax.tree.map(np.array_equal, before, arrays(network)))
    assert all(belief.prior_log_scale is not None for belief in model.owned.values())


def test_training_that_stopped_early_is_told():
    data, options = (X, X[:, 0]), {"learning_rate": 1e-3, "receipt": True}
    with pytest.warns(UserWarning, match="without having converged.*of 100 steps"):
        _, receipt = fit(linear(), GAUSSIAN, data, max_steps=100, **options)
    assert not receipt.converged
    options["learning_rate"] = 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, receipt = fit(linear(), GAUSSIAN, data, max_steps=3000, **options)
    assert receipt.converged
    assert receipt.history[-1][0] < 3000


def test_a_fit_that_sampled_networks_have_not_is_told():
    """Of eight alike tokens `Diagonal` has an eighth of their mean's variance."""
    layer = nnx.Linear(3, 2, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
    net = nnx.Sequential(layer, lambda x: 10 * x.mean(axis=1))
    x = np.repeat(X[:, None], 8, axis=1)
    options = {"relative_scale": 2.0, "max_steps": 1}
    with pytest.warns(UserWarning, match=r"in Diagonal is wrong.* claimed, .* drawn.*Separable"):
        model = fit(net, CATEGORICAL, (x, LABELS), **options)
    found = model.check(x, y=LABELS)
    assert found.claim.claimed > found.claim.drawn + 3 * found.claim.error
    assert "log likelihood is not" in found.verdict
    assert "claimed" in repr(found).splitlines()[-1]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "`fit`: the pass")
        fit(net, CATEGORICAL, (x, LABELS), **{**options, "structure": mj.Separable})


def test_a_bayesian_is_trained_itself_with_its_own_settings():
    options = {"random": nnx.PathContains("kernel"), "structure": mj.Diagonal}
    own = mj.Bayesian(linear(2), CATEGORICAL, **options)
    before = arrays(own)
    model = mj.fit(own, None, (X, LABELS), max_steps=100, learning_rate=0.03)
    assert model is own
    assert list(own.owned) == [("kernel",)]
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, arrays(own))
    assert jax.tree.all(changed)  # certain weights are trained too
    assert np.mean(own.predict(X).label == LABELS) > 0.9
    with pytest.warns(UserWarning, match=r"inputs as they are.*deviation 10\d"):
        mj.fit(own, None, (X * 100, LABELS), max_steps=1)
    without = mj.Bayesian(linear())
    mj.fit(without, GAUSSIAN, (X, 1e3 * X[:, 0]), max_steps=1)
    assert without.likelihood.noise_variance.shape == (1,)
    assert without.likelihood.noise_variance > 1e5


class Doubled(nnx.Module):
    """Would take inputs of one column, or bytes that wrap around, without a word."""

    def __init__(self):
        self.linear = linear(3)

    def __call__(self, x):
        return self.linear((x + x) / np.full(3, 2.0, np.float32))


def test_a_class_in_held_out_data_alone_and_inputs_of_other_types():
    held = np.round(X[:20]).clip(-1, 1).astype(int), np.arange(20) % 3
    options = {"held_out": held, "max_steps": 70, "receipt": True}
    model, receipt = fit(Doubled(), CATEGORICAL, (X, LABELS), **options)
    assert np.isfinite([row[1:] for row in receipt.history]).all()
    assert [row[0] for row in receipt.history] == [50, 70]
    many = model(np.full((1, 3), 200, np.uint8)).mean  # 200 + 200 is no byte
    np.testing.assert_allclose(many, model(np.full((1, 3), 200.0)).mean, rtol=1e-5)


PROBABLE = nnx.Sequential(linear(2), jax.nn.softmax), nnx.Sequential(linear(), jax.nn.sigmoid)
SOFTMAX = {"network": PROBABLE[0], "data": (X, LABELS), "likelihood": CATEGORICAL}
SIGMOID = {"network": PROBABLE[1], "data": (X, LABELS), "likelihood": mj.Bernoulli()}
OWN = {"network": mj.Bayesian(linear(), GAUSSIAN), "likelihood": None}


BAD = [
    ({"likelihood": "mse"}, TypeError, r"Categorical\(\), .*Got 'mse'"),
    ({"likelihood": mj.Gaussian}, TypeError, r"Got <class .*Gaussian.*Give an object"),
    ({"likelihood": mj.Gaussian(-1.0)}, ValueError, "positive noise variance"),
    ({"likelihood": mj.Gaussian(np.nan)}, ValueError, "positive noise variance"),
    ({"data": (X, np.ones(3))}, ValueError, r"as many inputs as targets, .*Got \[120, 3\]"),
    ({"data": X}, TypeError, "inputs, targets"),
    ({"data": (X[:0], X[:0])}, ValueError, r"at least one. Got \[0, 0\]"),
    ({"data": (X, np.full(120, np.nan))}, ValueError, "finite in float32"),
    ({"data": (X * np.inf, np.ones(120))}, ValueError, "finite inputs, in float32"),
    ({"data": (X * 1e300, np.ones(120))}, ValueError, "finite inputs, in float32"),
    ({"data": (X, 1e300 * X[:, 0])}, ValueError, "finite in float32"),
    ({"data": (X + 1e9, X[:, 0])}, ValueError, "inputs that float32 holds.*0 of mean 1e.09"),
    ({"data": ((60 * X + 1.7e9).astype(int), X[:, 0])}, ValueError, "holds.*Subtract its mean"),
    ({"data": (X, X[:, 0] + 2.5e6)}, ValueError, "targets that float32 holds.*Got a column 0"),
    ({"data": (X.astype(str), X)}, TypeError, "inputs of numbers"),
    ({"data": (2**40 + np.arange(120), X[:, 0])}, ValueError, "integers of 32 bits"),
    ({"likelihood": CATEGORICAL}, ValueError, r"integer targets of shape \(120,\) from 0.*uniq"),
    ({"data": (X, LABELS[:, None]), "likelihood": CATEGORICAL}, ValueError, r"\[..., 0\]"),
    ({"data": (X, np.eye(3)[LABELS]), "likelihood": CATEGORICAL}, ValueError, "argmax"),
    ({"data": (X, LABELS), "likelihood": CATEGORICAL}, ValueError, "to 0. Got .* to 1. .*class"),
    ({"data": (X, 2 * LABELS), "likelihood": mj.Bernoulli()}, ValueError, "from 0 to 1. Got"),
    (SOFTMAX, ValueError, r"logits for Categorical.*Got probabilities, such as \[.*softmax"),
    (SIGMOID, ValueError, "logits for Bernoulli.*Got probabilities"),
    ({"data": (X, X)}, ValueError, r"shape \(120, 1\).*Got float64 of shape \(120, 3\)"),
    ({"held_out": 1.5}, ValueError, "a share from 0"),
    ({"held_out": [X, X]}, TypeError, "inputs, targets"),
    ({"held_out": (X[:, :1], X[:, 0])}, ValueError, r"the others, .*\(3,\).*Got .*\(1,\)"),
    ({"held_out": ((X, X), X[:, 0])}, ValueError, r"\(3,\).*Got .*\(3,\).*\(3,\)"),
    ({"held_out": (X, X)}, ValueError, r"shape \(120, 1\)"),
    ({"max_steps": 0}, ValueError, "positive number as max_steps. Got 0"),
    ({"patience": 0}, ValueError, "positive number as patience"),
    ({"learning_rate": -0.1}, ValueError, "number as learning_rate. Got -0.1"),
    ({"kl_weight": -1.0}, ValueError, "positive number as kl_weight"),
    ({"prior": {}}, ValueError, "where it standardises columns. Got a prior in other units"),
    ({"prior": "network", "objective": "evidence"}, ValueError, "prior, for the ELBO alone"),
    ({"relative_scale": 0.0}, ValueError, "relative_scale > 0. Got 0"),
    ({"learning_rate": 1e30, "max_steps": 50}, ValueError, "diverged.*learning_rate below"),
    ({"network": np.tanh}, TypeError, "Flax module"),
    ({"network": None}, TypeError, "Flax module. Got NoneType"),
    ({"network": nnx.Dropout(0, deterministic=True), "data": (X, X)}, ValueError, "with parameters"),
    ({**OWN, "structure": mj.Full}, ValueError, "as it is. Got structure"),
    ({**OWN, "likelihood": GAUSSIAN}, ValueError, "None as the likelihood"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_bad_input(change, error, words):
    arguments = {"network": linear(), "data": (X, X[:, 0]), "likelihood": GAUSSIAN}
    with pytest.raises(error, match=words):
        mj.fit(**{**arguments, **change})


def test_several_members_are_plain_networks_with_starts_of_their_own():
    options = {"members": 2, "max_steps": 100, "learning_rate": 0.1}
    options |= {"progress": False, "receipt": True}
    model, receipt = mj.fit(linear(2), CATEGORICAL, (100 * X, LABELS), **options)
    assert receipt.objective == "plain"
    assert len(receipt.history) == 4
    parts, found = [member.predict(100 * X) for member in model.members], model.predict(100 * X)
    assert not any(member.owned or member.kl() for member in model.members)
    assert abs(parts[0].probs - parts[1].probs).max() > 0.01
    np.testing.assert_allclose(found.probs, (parts[0].probs + parts[1].probs) / 2, rtol=1e-5)
    assert (found.label == LABELS).mean() > 0.6
    again, _ = mj.fit(linear(2), CATEGORICAL, (100 * X, LABELS), **options | {"seed": 1})
    random, _ = fit(linear(2), CATEGORICAL, (100 * X, LABELS), objective="elbo", **options)
    assert random.members[1].owned  # an average of beliefs, when it is asked for
    assert abs(again.members[0].predict(100 * X).probs - parts[1].probs).max() > 1e-4
