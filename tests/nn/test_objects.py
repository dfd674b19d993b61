"""Networks with any configuration and output; models as objects: pickled, copied, printed."""

import copy
import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx, struct

import moment_jax as mj
from tests.builders import assert_close

pytestmark = pytest.mark.usefixtures("ranks_of_a_user")

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(20, 3))
LABELS = (X[:, 0] > 0).astype(int)


class Settings:
    """Equal by its contents, and so without a hash, as configurations of other libraries are."""

    def __init__(self, width: int) -> None:
        self.width, self.traced = width, []

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)

    __hash__ = None


@struct.dataclass
class Output:
    """What a network returns."""

    logits: Any
    hidden: Any = None


class Configured(linen.Module):
    """Two layers; counts how often it is traced with three features."""

    settings: Settings
    returns: Any
    options: Any = dataclasses.field(default_factory=lambda: {"scale": [2.0]})

    @linen.compact
    def __call__(self, x):
        self.settings.traced.append(x.shape)
        hidden = jnp.tanh(linen.Dense(self.settings.width)(x))
        return self.returns(self.options["scale"][0] * linen.Dense(2)(hidden), hidden)


class Net(nnx.Module):
    """Returns more than one array, in a way that the tests choose."""

    def __init__(self, returns):
        self.hidden, self.head = (nnx.Linear(3, n, rngs=nnx.Rngs(n)) for n in (3, 2))
        self.returns = returns

    def __call__(self, x, layer=None):
        hidden = nnx.relu(self.hidden(x))
        logits = self.head(hidden) * (2 if layer is True else 1)
        return self.returns(logits, hidden)


def alone(logits, hidden):
    return logits


def both(logits, hidden):
    return logits, hidden


def first(out):
    return out[0]


def configured(settings, returns=alone):
    module = Configured(settings, returns)
    return module.bind(module.init(KEY, X))


def test_a_configuration_without_a_hash_is_one_program_outside_compiled_code():
    settings = Settings(4)
    network = configured(settings)
    options = {"structure": mj.Diagonal}
    model = mj.Bayesian(network, mj.Categorical(), **options)
    moments = model(X)
    assert_close(moments.mean, network(X), 0.3)
    count = len(settings.traced)
    again = mj.Bayesian(network, mj.Categorical(), relative_scale=0.2, **options)
    assert (again(X).sd > moments.sd).all()
    assert (model.scaled(2.0)(X).sd > moments.sd).all()
    assert len(settings.traced) == count
    assert model.predict(X).probs.shape == (20, 2)
    assert model.check(X, samples=50).sd_error < 0.3
    assert len(model.explain(X)) > 3
    bound = nnx.jit(lambda m: m.elbo(X, LABELS, dataset_size=20))
    assert jnp.isfinite(bound(model))
    other = mj.Bayesian(configured(Settings(5)), **options)
    assert other(X).mean.shape == (20, 2)


def test_keyword_arguments_that_are_equal_and_of_other_types_have_other_programs():
    model = mj.Bayesian(Net(alone), structure=mj.Diagonal)
    plain = model(X, layer=1).mean
    for layer, factor in ((True, 2), (1.0, 1), (1, 1)):
        assert_close(model(X, layer=layer).mean, factor * plain, 1e-6)


def test_an_output_is_picked_out_of_what_the_network_returns():
    options = {"structure": mj.Diagonal, "random": nnx.PathContains("head")}
    network, whole = Net(both), mj.Bayesian(Net(alone), mj.Categorical(), **options)
    model = mj.Bayesian(network, mj.Categorical(), output=first, **options)
    assert model.beliefs.keys() == whole.beliefs.keys()

    def calls(m):
        return m(X), m.elbo(X, LABELS, dataset_size=20), m.corrected(X).spread[...]

    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), calls(model), calls(whole))
    for plain in (model.at_means(), model.sample(KEY)):  # they return what the user's network does
        assert type(plain) is Net
        assert isinstance(plain(X), tuple)


OUTPUTS = [
    (lambda *out: (out[0], {"hidden": out[1]}), r"tuple: out\[0\] = float.*out: out\[0\]"),
    (
        lambda *out: {"hidden": out[1], "logits": out[0]},
        r"'hidden'.*, out\['log.*out: out\['logits'",
    ),
    (lambda *out: Output(out[0]), r"Output: out\.logits.*out: out\.logits"),
    (lambda *out: None, "NoneType: no array in it. Return an array"),
]


@pytest.mark.parametrize(("returns", "message"), OUTPUTS)
def test_more_than_one_output_is_told_by_its_parts(returns, message):
    for options in ({}, {"output": lambda out: out}):
        with pytest.raises(TypeError, match=message):
            mj.Bayesian(Net(returns), **options)(X)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`calibrate`")
def test_the_doors_take_an_output_and_a_configuration_without_a_hash():
    data = X, LABELS
    doors = [
        lambda net, **options: mj.calibrate(net, mj.Categorical(), data, **options),
        lambda net, **options: mj.laplace(net, mj.Categorical(), data, **options),
        lambda net, **options: mj.fit(net, mj.Gaussian(), (X, X[:, :2]), max_steps=20, **options),
    ]
    for door in doors:
        networks = (configured(Settings(4), returns) for returns in (both, alone))
        model, whole = door(next(networks), output=first), door(next(networks))
        if door is not doors[-1]:  # which standardises
            assert isinstance(model.at_means(), Configured)
        predictions = model.predict(X), whole.predict(X)
        jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), *predictions)
        again = pickle.loads(pickle.dumps(model)).predict(X)
        jax.tree.map(np.testing.assert_array_equal, again, predictions[0])


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_models_and_predictions_are_copied_and_pickled(how):
    layers = (nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.relu, jax.nn.silu, jnp.tanh)
    network = nnx.Sequential(*layers)
    model = mj.Bayesian(network, mj.Gaussian(), structure=mj.Diagonal)
    found, prediction = model(X), model.predict(X)
    for known, again in ((found, how(found)), (prediction, how(prediction))):
        assert type(again) is type(known)
        jax.tree.map(np.testing.assert_array_equal, again, known)
    again = how(model)
    assert again.graph == model.graph  # the same program
    assert_close(again(X).sd, found.sd)
    again.owned["layers", 0, "bias"].mean.set_value(jnp.ones(2))
    assert (model.beliefs["layers"][0]["bias"].mean == 0).all()


def test_a_lambda_is_not_pickled_and_the_message_says_what_is():
    with pytest.raises(pickle.PicklingError, match=r"stand in a module.*lambda.*nnx\.state"):
        pickle.dumps(mj.Bayesian(Net(both), output=lambda out: out[0]))


def test_a_repr_has_at_most_ten_lines():
    model = mj.Bayesian(Net(alone), mj.Categorical(), structure=mj.Separable)
    moments = model(X)
    shown = [model, mj.nn.Mixture([model, model]), moments, moments.cov, model.predict(X)]
    shown += [*model.owned.values(), *model.beliefs["head"].values(), model.check(X, samples=2)]
    assert all(len(repr(x).splitlines()) <= 10 and len(repr(x)) < 500 for x in shown)


def test_mistakes_are_named():
    network = Net(alone)
    model = mj.Bayesian(network, mj.Categorical(), structure=mj.Diagonal)
    mistakes = [
        (lambda: mj.calibrate(network, (X, LABELS), mj.Categorical()), r"tuple\. Give an object"),
        (lambda: mj.fit(network, mj.Gaussian(), (X[:, :1], X)), "before their targets. Got inputs"),
        (lambda: model.predict(X.astype(object)), "numbers. Got object. Encode"),
        (lambda: model.explain(X, foo=1), "Got foo, which it does not take"),
        (lambda: model.predict(X, return_std=True), r"Got return_std, which it does not take"),
        (lambda: model(X).mean + model(X).cov.sd(), r"broadcast.*Use moments\.sd"),
        (lambda: model(X).std, r"no std. It has .*sd"),
        (lambda: np.asarray(model(X).cov), r"cov\.to_dense"),
        (lambda: model(X).cov[0], r"not an array.*lambda x: x\[0\]"),
    ]
    for mistake, message in mistakes:
        with pytest.raises((TypeError, ValueError, AttributeError), match=message):
            mistake()
