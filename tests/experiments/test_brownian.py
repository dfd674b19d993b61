"""Chains, head masks and token motion: what the Brownian experiment's figures are, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from experiments.brownian import antisymmetric_share, split_scores
from experiments.brownian.heads import head_curve, head_importance, head_predictions
from experiments.brownian.motion import independence_test, motion_report
from experiments.brownian.stream import residual_stream
from tests.builders import assert_close, tiny_vision


@pytest.fixture(autouse=True)
def settings_of_a_user():
    """Free broadcasting, but not float32: identities hold to the last digit in float64."""
    with jax.numpy_rank_promotion("allow"):
        yield


KEY = jax.random.key(0)
IMAGES = jax.random.normal(jax.random.key(1), (3, 4, 4))
LABELS = jnp.array([0, 2, 1])


def test_scores_split_into_orthogonal_parts():
    scores = jax.random.normal(jax.random.key(4), (6, 6))
    parts = split_scores(scores)
    total = parts.symmetric + parts.gradient + parts.cyclic
    assert_close(total, scores - scores.mean(axis=1, keepdims=True))
    assert_close(parts.shares.sum(), jnp.ones(()))
    for a, b in [("symmetric", "cyclic"), ("symmetric", "gradient"), ("gradient", "cyclic")]:
        assert abs(jnp.sum(getattr(parts, a) * getattr(parts, b))) < 1e-10
    # Without the cyclic part, and only then, the chain is reversible.
    for kept, reversible in [(parts.symmetric + parts.gradient, True), (total, False)]:
        chain = jax.nn.softmax(kept, axis=1)
        gap = mj.brownian.detailed_balance_gap(chain, mj.brownian.stationary(chain))
        assert (gap < 1e-12) == reversible
    query, key = jax.random.normal(jax.random.key(6), (2, 5, 3))
    form = query @ key.T
    share = jnp.linalg.norm((form - form.T) / 2) ** 2 / jnp.linalg.norm(form) ** 2
    assert_close(antisymmetric_share(query, key), share)


@pytest.fixture(scope="module")
def model():
    network = tiny_vision(num_blocks=2)
    nnx.update(network, jax.tree.map(lambda x: x.astype(jnp.float64), nnx.state(network)))
    return mj.Bayesian(network, relative_scale=0.4, structure=mj.Diagonal)


@nnx.jit
def moments(model, images):
    logits = model(images)
    return logits.mean, logits.features


def without_head(model, block, head):
    """The model with certain zeros in the queries, keys and values of a head of a block."""
    copied = nnx.clone(model)
    for path, belief in copied.owned.items():
        if path[:4] == ("encoder", "blocks", block, "attention") and path[4] != "out":
            belief.mean.set_value(belief.mean[...].at[..., head, :].set(0))
            raw = belief.raw["scale"]
            raw.set_value(raw[...].at[..., head, :].set(-60.0))
    return copied


@pytest.mark.slow
def test_importance_is_the_change_of_the_elbo(model):
    found = head_importance(model, IMAGES, LABELS, dataset_size=6, kl_weight=0.3)
    fit = partial(mj.objectives.expected_log_likelihood, mj.objectives.Categorical())

    def data_term(model):
        return 2 * jnp.sum(jax.vmap(fit)(LABELS, *moments(model, IMAGES)))

    change = data_term(without_head(model, 1, 0)) - data_term(model)
    assert_close(found.fit_change[1][0], change)
    assert_close(found.elbo_change[1][0], change + 0.3 * found.kl_saved[1][0])
    parts = [
        belief
        for path, belief in model.owned.items()
        if path[:4] == ("encoder", "blocks", 1, "attention") and path[4:] != ("out", "bias")
    ]
    assert_close(
        found.kl_saved[1].sum(), sum(belief.posterior.kl(belief.prior) for belief in parts)
    )


@pytest.mark.slow
def test_curve_removes_the_least_worthy_first(model):
    curve = head_curve(model, IMAGES, LABELS, [np.array([2.0, 1.0]), np.array([4.0, 3.0])])
    assert curve.order == [(0, 1), (0, 0), (1, 1), (1, 0)]
    assert curve.kept.tolist() == [4, 3, 2, 1, 0]
    p = jax.vmap(mj.objectives.class_probabilities)(*moments(model, IMAGES))
    assert_close(curve.nll[0], mj.objectives.negative_log_likelihood(p, LABELS))
    assert np.isfinite(curve.nll).all()


def test_distance_correlation_by_its_definition():
    x, y = jax.random.normal(KEY, (2, 12, 1, 3))

    def centred(points):
        d = np.linalg.norm(points[:, None] - points[None], axis=-1)
        n = len(d)
        u = d - d.sum(0) / (n - 2) - d.sum(1)[:, None] / (n - 2) + d.sum() / (n - 1) / (n - 2)
        return u * (1 - np.eye(n))

    a, b = centred(np.asarray(x[:, 0])), centred(np.asarray(y[:, 0]))
    found = independence_test(x, y, KEY, permutations=99)
    assert_close(found.correlation, (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))
    # Dependence without correlation is seen, independence is not refuted.
    assert independence_test(x, x**2, KEY).p_value < 0.05
    assert found.p_value > 0.01


def brownian_stream():
    """3 blocks, 60 inputs, 2 tokens, 4 features."""
    steps = jax.random.normal(KEY, (3, 60, 2, 4))
    start = jax.random.normal(jax.random.key(100), (1, 60, 2, 4))
    return jnp.concatenate([start, start + jnp.cumsum(steps, axis=0)])


def from_steps(x, change):
    """A stream from the same start, with changed steps."""
    return x[:1] + jnp.cumsum(change(jnp.diff(x, axis=0, prepend=x[:1])), axis=0)


DEPTH = jnp.arange(4.0).reshape(-1, 1, 1, 1)
FAULTS = {
    "drift": lambda x: x + 2 * DEPTH,
    "where the token is": lambda x: x * 0.3**DEPTH,
    "the step before": lambda x: jnp.concatenate([x[:1], x[:1] + jnp.cumsum(x[1:], axis=0)]),
    "not normal": lambda x: from_steps(x, lambda steps: steps**3),
    "-fold between blocks": lambda x: from_steps(x, lambda steps: steps * DEPTH),
    "not as depth": lambda x: x[:1] + 2 * DEPTH * (x[1:2] - x[:1]),
}


@pytest.mark.slow
def test_a_brownian_stream_is_not_refuted_and_each_fault_is_named():
    motion = motion_report(brownian_stream(), key=KEY, permutations=1499)
    assert motion.is_brownian, motion.failures
    growth = motion.growth
    assert abs(growth.exponent - 1) < 3 * growth.exponent_error
    np.testing.assert_allclose(growth.brownian_variance, np.arange(4), rtol=0.2)
    assert abs(motion.blocks[1].drift_share) < 0.05
    assert motion.blocks[1].step_length == pytest.approx(1, abs=0.1)
    for fault, change in FAULTS.items():
        motion = motion_report(change(brownian_stream()), key=KEY, permutations=1499)
        assert not motion.is_brownian
        assert fault in motion.sentence


class Foreign(nnx.Module):
    """A network of another library that exposes its blocks, and calls these."""

    def __init__(self, called):
        self.blocks = nnx.List(nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2))
        self.called = called

    def __call__(self, x):
        for block in self.blocks[: self.called]:
            x = block(x - 1)
        return jnp.sum(x)


def test_the_stream_of_any_module_with_blocks():
    module = Foreign(2)
    x = jax.random.normal(KEY, (5, 3, 4), jnp.float32)
    stream = residual_stream(module, x)
    assert_close(stream[0], x - 1, 1e-6)
    assert_close(stream[2], module.blocks[1](stream[1] - 1), 1e-6)
    assert_close(module(x), jnp.sum(stream[2]), 1e-5)  # the module is as it was


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: head_predictions(m, IMAGES, np.ones((1, 3))), ValueError, r"\(M, 4\)"),
        (lambda m: head_predictions(mj.Bayesian(m.at_means().encoder), IMAGES, np.ones((1, 4))),
         TypeError, "logits"),
        (lambda m: head_importance(m, IMAGES, LABELS, dataset_size=2), ValueError, "N=3"),
        (lambda m: residual_stream(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), KEY), TypeError, "blocks"),
        (lambda m: residual_stream(Foreign(0), jnp.ones((2, 3, 4))), ValueError, "no block"),
        (lambda m: motion_report(jnp.ones((2, 5, 3, 4)), key=KEY), ValueError, "N >= 20"),
        (lambda m: motion_report(jnp.ones((2, 20, 3, 4)), key=KEY, permutations=9), ValueError,
         "permutations >= 400"),
    ],
)  # fmt: skip
def test_bad_input(call, error, words, model):
    with pytest.raises(error, match=words):
        call(model)
