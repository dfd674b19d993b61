"""Greedy decoding and sampling: against a listed tree, as laws, and by frequencies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx

import moment_jax as mj
from moment_jax.decoding import greedy, sample
from moment_jax.objectives import class_probabilities
from moment_jax.objectives.cubature import probabilities_with_uncertainty

V, LENGTH, POINTS = 3, 4, 16
NUM_NODES = sum(V**depth for depth in range(LENGTH))
PROMPT = jnp.zeros(1, int)
ROWS = 40  # the same everywhere: compiling is what costs


def logits(seed, scale=1.5):
    """Means and variances of the logits at every node of the tree of sequences, (NUM_NODES, V)."""
    rng = np.random.default_rng(seed)
    return scale * rng.normal(size=(NUM_NODES, V)), rng.uniform(0, 2, (NUM_NODES, V))


def network(mean, cov):
    """The logits depend on all tokens after the prompt; the children of node n are n V + 1 + token."""

    def model(ids):
        def follow(node, token):
            node = jnp.where(node < 0, 0, node * V + 1 + token)
            return node, node

        _, nodes = jax.lax.scan(follow, jnp.int32(-1), ids)
        return mean[nodes], cov[nodes]

    return model


def table(mean, cov):
    """Predictive log-probabilities at every node, and the uncertainty of every prediction."""
    log_probs, parts = compiled_table(mean, cov)
    return np.asarray(log_probs), np.stack(parts)


@jax.jit
@jax.vmap
def compiled_table(mean, cov):
    return probabilities_with_uncertainty(mean, cov, num_points=POINTS)


def log_probs_of(sequence, log_probs):
    """The log-probability of every token of a sequence."""
    node, found = 0, []
    for token in sequence:
        found.append(log_probs[node, token])
        node = node * V + 1 + token
    return found


@partial(jax.jit, static_argnames=("end",))
def run_greedy(mean, cov, end=None):
    return greedy(network(mean, cov), PROMPT, LENGTH, end=end, num_points=POINTS)


@partial(jax.jit, static_argnames=("rows", "length", "end"))
def run_sample(key, mean, cov, temperature, rows=ROWS, length=LENGTH, end=None):
    def one(key):
        options = {"temperature": temperature, "end": end, "num_points": POINTS}
        return sample(key, network(mean, cov), PROMPT, length, **options)

    return jax.vmap(one)(jax.random.split(key, rows))


@pytest.mark.parametrize("seed", range(3))
def test_greedy_takes_the_likeliest_token_at_every_node(seed):
    mean, cov = logits(seed)
    log_probs, parts = table(mean, cov)
    nodes, tokens = [0], []
    for _ in range(LENGTH):
        tokens.append(int(log_probs[nodes[-1]].argmax()))
        nodes.append(nodes[-1] * V + 1 + tokens[-1])
    result = run_greedy(mean, cov)
    assert result.tokens.tolist() == tokens
    assert result.tokens.dtype == jnp.int32
    np.testing.assert_allclose(result.log_probs, log_probs_of(tokens, log_probs), atol=1e-12)
    np.testing.assert_allclose(result.uncertainty, parts[:, nodes[:-1]], atol=1e-12)
    if seed == 0:
        whole = run_greedy(mean, jax.vmap(jnp.diag)(cov))
        np.testing.assert_allclose(whole.log_probs, result.log_probs, atol=1e-12)
        narrow = run_greedy(*(part.astype(np.float32) for part in (mean, cov)))
        assert {leaf.dtype for leaf in jax.tree.leaves(narrow)[1:]} == {jnp.dtype("float32")}
        np.testing.assert_allclose(narrow.log_probs, result.log_probs, atol=1e-4)


def test_the_end_token_freezes_a_sequence():
    """Up to the end token all is as without one; then there is nothing but padding."""
    end, ended_rows = 1, 0
    mean, cov = logits(1, scale=0.5)
    key = jax.random.key(3)
    free, ended = (run_sample(key, mean, cov, 1.0, end=stop) for stop in (None, end))
    for row in range(ROWS):
        whole = free.tokens[row].tolist()
        stop = whole.index(end) + 1 if end in whole else LENGTH
        ended_rows += stop < LENGTH
        assert ended.tokens[row].tolist() == whole[:stop] + [-1] * (LENGTH - stop)
        for ours, theirs in zip(*map(jax.tree.leaves, (ended[1:], free[1:])), strict=True):
            np.testing.assert_array_equal(ours[row, :stop], theirs[row, :stop])
            np.testing.assert_array_equal(ours[row, stop:], 0)
    assert ended_rows


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_sampled_frequencies(temperature):
    """Chi-square of pairs of tokens against p^(1/T), normalised token by token."""
    rows = 30_000
    mean, cov = logits(2, scale=0.7)
    result = run_sample(jax.random.key(7), mean, cov, temperature, rows=rows, length=2)
    log_probs, _ = table(mean, cov)
    sharp = np.exp(log_probs / temperature)
    sharp /= sharp.sum(axis=1, keepdims=True)
    expected = rows * sharp[0][:, None] * sharp[1 : V + 1]
    tokens = np.asarray(result.tokens)
    seen = np.zeros((V, V))
    np.add.at(seen, (tokens[:, 0], tokens[:, 1]), 1)
    assert scipy.stats.chisquare(seen.ravel(), expected.ravel()).pvalue > 1e-3
    # What comes with the tokens are log-probabilities of the predictive distribution, not tempered.
    wanted = [log_probs_of(row, log_probs) for row in tokens[:20]]
    np.testing.assert_allclose(result.log_probs[:20], wanted, atol=1e-12)


def test_a_longer_sequence_begins_with_the_shorter_one():
    mean, cov = logits(5)
    short = run_sample(jax.random.key(1), mean, cov, 1.0, length=2)
    longer = run_sample(jax.random.key(1), mean, cov, 1.0)
    np.testing.assert_array_equal(longer.tokens[:, :2], short.tokens)


def test_masked_tokens_do_not_occur_and_a_sequence_without_tokens_finishes():
    mean, cov = logits(6)
    some, none = mean.copy(), mean.copy()
    some[:, 1] = none[1:] = -np.inf  # everything after the first token
    for run in (run_greedy, lambda *given: run_sample(jax.random.key(0), *given, 1.0)):
        result = run(some, cov)
        assert not (np.asarray(result.tokens) == 1).any()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result))
        result = run(none, cov)
        first, *others = np.moveaxis(np.asarray(result.tokens), -1, 0)
        assert (first >= 0).all()
        np.testing.assert_array_equal(others, -1)
        np.testing.assert_array_equal(result.log_probs[..., 1], -np.inf)
        for part in result.uncertainty:
            np.testing.assert_array_equal(part[..., 1:], 0)


class LanguageModel(nnx.Module):
    """Embedding and positions, a causal encoder, logits."""

    def __init__(self):
        rngs = nnx.Rngs(3)
        self.tokens = nnx.Embed(6, 4, rngs=rngs)
        self.places = mj.nn.LearnedPositions(LENGTH + 2, 4, scale=1.0, rngs=rngs)
        self.encoder = mj.nn.Encoder(1, 4, 2, hidden_features=6, norm_first=True, rngs=rngs)
        self.head = nnx.Linear(4, 6, rngs=rngs)

    def __call__(self, ids):
        causal = jnp.tril(jnp.ones((ids.shape[-1],) * 2, bool))
        return self.head(self.encoder(self.places(self.tokens(ids)), causal))


@pytest.mark.usefixtures("ranks_of_a_user")
@pytest.mark.parametrize("random", [False, True])
def test_each_token_follows_its_own_prefix(random):
    """Of prompts of two tokens: one pass over what was decoded says the same; without beliefs too.

    That later tokens change nothing, in any structure, is tested in `tests/laws/test_blocks.py`.
    """
    predictive, model = partial(class_probabilities, num_points=POINTS * 2), LanguageModel()
    if random:
        model = mj.Bayesian(model, relative_scale=0.5, structure=mj.Diagonal)

    @nnx.jit
    @partial(nnx.vmap, in_axes=(None, 0))
    def decode(model, prompt):
        found = greedy(model, prompt, LENGTH, num_points=POINTS * 2)
        ids = jnp.concatenate([prompt, found.tokens[:-1]])
        if not random:
            return found, jax.nn.log_softmax(model(ids))[1:]
        logits = model(ids[None])
        given = logits.mean.reshape(-1, 6), logits.variance.reshape(-1, 6)
        return found, jnp.log(jax.vmap(predictive)(*given)[1:])

    found, log_probs = decode(model, jnp.array([[1, 4], [5, 0]]))
    np.testing.assert_array_equal(found.tokens, np.argmax(log_probs, axis=2))
    np.testing.assert_allclose(found.log_probs, np.max(log_probs, axis=2), rtol=1e-4)


def returns(*result):
    return {"model": lambda ids: result}


FLAT = jnp.zeros((2, V))
BAD = [
    ({"length": 0}, ValueError, "length >= 1"),
    ({"end": -1}, ValueError, "0 to 2. Got -1"),
    ({"num_points": 0}, ValueError, "num_points >= 1"),
    (returns(FLAT[:1], FLAT), ValueError, r"\(T, V\).*T = 2. Got \(1, 3\)"),
    (returns(FLAT, FLAT[:, :2]), ValueError, r"\(T, V, V\).*Got .* and \(2, 2\)"),
    ({"prompt": jnp.zeros(2)}, TypeError, "prompt of integers"),
    ({"prompt": jnp.zeros((2, 1), int)}, ValueError, "jax.vmap"),
]
HOT = [({"temperature": t}, ValueError, "temperature") for t in (0.0, -1.0, np.nan, np.ones(2))]


@pytest.mark.parametrize(
    ("decode", "changes", "error", "words"),
    [(d, *case) for d in (greedy, partial(sample, jax.random.key(0))) for case in BAD]
    + [(partial(sample, jax.random.key(0)), *case) for case in HOT],
)
def test_bad_input(decode, changes, error, words):
    given = {**returns(FLAT, FLAT), "prompt": PROMPT, "length": 2, **changes}
    with pytest.raises(error, match=words):
        jax.eval_shape(lambda: decode(**given))
