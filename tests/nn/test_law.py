"""The first law: without noise a pass is the network, and `check` says where it is not."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.propagation import dense, elementwise, normalization

X = jax.random.normal(jax.random.key(0), (3, 4, 6), jnp.float32)


class Block(nnx.Module):
    """A norm, two layers with a function between them, and a residual sum."""

    def __init__(self, dtype):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(6, 8, rngs=rngs, dtype=dtype)
        self.norm = nnx.LayerNorm(8, rngs=rngs, dtype=dtype)
        self.up, self.down = (nnx.Linear(8, 8, rngs=rngs, dtype=dtype) for _ in range(2))

    def __call__(self, x):
        x = self.embed(x)
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


def off(rule):
    """The rule with a factor of 1.01 on its mean."""

    def broken(*args, **options):
        mean, *rest = rule(*args, **options)
        return 1.01 * mean, *rest

    return broken


def bent(recognised):
    """A recogniser of functions whose transforms have a factor of 1.01 on their mean."""

    def found(*args):
        name, transform, assumes = recognised(*args)

        def wrong(mean, variance):
            moments = transform(mean, variance)
            return moments._replace(mean=1.01 * moments.mean)

        return name, wrong, assumes

    return found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_pass_that_is_the_network_passes(dtype):
    model = mj.Bayesian(Block(dtype), structure=mj.Diagonal)
    with jax.numpy_rank_promotion("allow"):
        assert model.check(X, samples=2).sd_ratio > 0


@pytest.mark.parametrize(
    ("module", "rule", "line"),
    [
        (dense, "dense", "self.embed(x)"),
        (normalization, "norm_with_carry", "self.norm(x)"),
        (elementwise, "recognised", "jnp.tanh"),
    ],
)
def test_a_wrong_rule_is_named_by_its_first_operation(module, rule, line, monkeypatch):
    found = getattr(module, rule)
    wrong = bent(found) if rule == "recognised" else off(found)
    monkeypatch.setattr(module, rule, wrong)
    jax.clear_caches()
    model = mj.Bayesian(Block(jnp.float32), structure=mj.Diagonal)
    with (
        jax.numpy_rank_promotion("allow"),
        pytest.raises(mj.PropagationError, match="without noise is the network") as error,
    ):
        model.check(X, samples=2)
    number = int(str(error.value).split("test_law.py:")[1].split()[0])
    with open(__file__) as file:
        assert line in file.read().splitlines()[number - 1]


def network():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), jnp.tanh, nnx.Linear(4, 2, rngs=rngs))


ROWS = jax.random.normal(jax.random.key(1), (120, 3), jnp.float32)
LABELS = jnp.arange(120) % 2
CLASSES = mj.Categorical()


def bayesian(*likelihood, **options):
    return mj.Bayesian(network(), *likelihood, **options)


DOORS = {
    "call": lambda **options: bayesian(**options)(ROWS),
    "predict": lambda **options: bayesian(CLASSES, **options).predict(ROWS),
    "log_prob": lambda **options: bayesian(CLASSES, **options).log_prob(ROWS, LABELS),
    "corrected": lambda **options: bayesian(**options).corrected(ROWS),
    "fit": lambda **options: mj.fit(
        bayesian(CLASSES, **options), None, (ROWS, LABELS), max_steps=1, held_out=0.0
    ),
    "calibrate": lambda **options: mj.calibrate(network(), CLASSES, (ROWS, LABELS), **options),
    "decoding": lambda **options: mj.decoding.greedy(
        mj.Bayesian(nnx.Sequential(nnx.Embed(2, 3, rngs=nnx.Rngs(0)), network()), **options),
        LABELS[:3], 2,
    ),
    "receipt": lambda **options: mj.propagate(lambda w, x: jnp.tanh(x @ w), receipt=True, **options)(
        mj.posterior.Factorized(jnp.ones((3, 2)), jnp.ones((3, 2))), ROWS[0]
    ),
}  # fmt: skip


@pytest.fixture(scope="class")
def wrong_tanh():
    """A rule for tanh that is 1 % off; one for all its tests, for programs are dropped around it."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elementwise, "recognised", bent(elementwise.recognised))
        yield
    jax.clear_caches()


@pytest.mark.usefixtures("wrong_tanh")
class TestOfAWrongRule:
    @pytest.mark.parametrize("door", DOORS)
    def test_the_first_call_of_every_door_is_held_to_the_network(self, door):
        for _ in range(2):  # a wrong pass is no better at its second call
            with pytest.raises(mj.PropagationError, match="without noise is the network"):
                DOORS[door](structure=mj.Diagonal)

    def test_a_model_may_ask_not_to_be_verified(self):
        assert jnp.isfinite(DOORS["call"](structure=mj.Diagonal, verify=False).mean).all()


def test_a_pass_in_ones_own_jit_says_once_that_it_was_not_compared(caplog):
    model = mj.Bayesian(network(), structure=mj.Full)
    other = mj.Bayesian(nnx.Linear(3, 5, rngs=nnx.Rngs(0)), structure=mj.Full)
    model(ROWS)
    for _ in range(2):
        for each in (model, other):
            jax.jit(lambda x, each=each: each(x).mean)(ROWS)
    assert [record.message.count("model.check(x)") for record in caplog.records] == [1]
    assert "was not compared" in str(other.explain(ROWS))


class Weighted(nnx.Module):
    def __init__(self, value):
        self.kernel = nnx.Param(jnp.full((3, 2), value))

    def __call__(self, x):
        return (x - x.mean(axis=0, keepdims=True)) @ self.kernel


def test_nan_in_weights_and_examples_that_meet_are_named():
    model = mj.Bayesian(Weighted(1.0))
    model.owned[("kernel",)].mean.set_value(jnp.full((3, 2), jnp.nan))
    with pytest.raises(ValueError, match=r"Got NaN in .*kernel"):
        model(ROWS)
    with pytest.raises(mj.PropagationError, match="beside others than alone"):
        mj.Bayesian(Weighted(1.0))(ROWS)


def test_a_check_tells_a_wide_posterior_from_what_a_structure_leaves_out():
    rngs = nnx.Rngs(0)
    net = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), jnp.square, nnx.Linear(4, 2, rngs=rngs))
    narrow, wide = (
        mj.Bayesian(net, structure=mj.Full, relative_scale=scale).check(ROWS, samples=500)
        for scale in (0.05, 1.0)
    )
    assert narrow.linear_error < 0.02
    assert abs(narrow.nonlinearity) < 0.05
    assert wide.linear_error < 0.05
    assert abs(wide.nonlinearity) > 0.1
    assert "nonlinearity" in wide.verdict
    assert "nonlinearity" not in narrow.verdict
    assert len(repr(wide).splitlines()) == 5
    tokens = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), lambda x: x.mean(axis=1))
    loose = mj.Bayesian(tokens, structure=mj.Diagonal).check(jnp.ones((2, 8, 3)), samples=50)
    assert loose.linear_error > 0.5
    assert "structure" in loose.verdict


@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [
        (mj.Gaussian(0.5), jnp.ones((3, 4, 6))),
        (mj.Bernoulli(), jnp.ones((3, 4, 6))),
        (mj.Categorical(), jnp.ones((3, 4), int)),
        (mj.HeteroscedasticGaussian(), jnp.ones((3, 4, 3))),
    ],
)
def test_of_a_linear_network_the_claimed_fit_is_that_of_sampled_networks(likelihood, targets):
    model = mj.Bayesian(nnx.Linear(6, 6, rngs=nnx.Rngs(0)), likelihood, relative_scale=0.5)
    claim = model.check(X, samples=2000, y=targets).claim
    assert 0 < claim.error < 0.01 * abs(claim.drawn)
    assert abs(claim.claimed - claim.drawn) < 3 * claim.error
    assert claim.holds
