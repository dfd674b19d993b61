"""Greedy decoding and sampling: against a listed tree, as laws, and by frequencies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from moment_jax.decoding import greedy, sample, token_uncertainty
from tests.decoding.tree import LENGTH, POINTS, V, log_prob, logits, root, step_of, table

ROWS = 40  # the same everywhere: compiling is what costs


@partial(jax.jit, static_argnames=("rows", "length", "end"))
def run_greedy(mean, cov, rows=1, length=LENGTH, end=None):
    return greedy(
        step_of(mean, cov), root(rows), jnp.zeros(rows, int), length, end=end, num_points=POINTS
    )


@partial(jax.jit, static_argnames=("rows", "length", "end"))
def run_sample(key, mean, cov, temperature, rows=1, length=LENGTH, end=None):
    first = jnp.zeros(rows, int)
    options = {"temperature": temperature, "end": end, "num_points": POINTS}
    return sample(key, step_of(mean, cov), root(rows), first, length, **options)


def both(mean, cov):
    """A draw of ROWS sequences at temperature 1, and the greedy ones."""
    drawn = run_sample(jax.random.key(0), mean, cov, 1.0, rows=ROWS)
    return drawn, run_greedy(mean, cov, rows=ROWS)


@jax.jit
def uncertainty(mean, cov):
    return token_uncertainty(mean, cov, num_points=POINTS)


@pytest.mark.parametrize("seed", range(5))
def test_greedy_takes_the_likeliest_token_at_every_node(seed):
    mean, cov = logits(seed)
    log_probs = np.asarray(table(mean, cov))
    node, tokens, parts = 0, [], []
    for _ in range(LENGTH):
        parts.append(uncertainty(mean[node], cov[node]))
        tokens.append(int(log_probs[node].argmax()))
        node = node * V + 1 + tokens[-1]
    result = run_greedy(mean, cov, rows=ROWS)
    assert result.tokens.tolist() == [tokens] * ROWS
    assert result.tokens.dtype == jnp.int32
    np.testing.assert_allclose(result.log_probs, [log_prob(tokens, log_probs)] * ROWS, atol=1e-12)
    for ours, node_by_node in zip(result.uncertainty, zip(*parts, strict=True), strict=True):
        np.testing.assert_allclose(ours, [node_by_node] * ROWS, atol=1e-12)


def test_greedy_integrates_over_the_logits():
    """A token whose logit may be large is likelier than the one of the largest mean."""
    mean, cov = jnp.asarray([[1.0, 0.9, 0.9]]), jnp.asarray([[0.0, 25.0, 0.0]])

    def step(state, tokens):
        return mean, cov, state

    result = jax.jit(lambda: greedy(step, (), jnp.zeros(1, int), 1))()
    assert result.tokens.tolist() == [[1]]
    probabilities = np.exp(table(mean, cov))[0]
    assert probabilities[1] > probabilities[0]


def test_jit_changes_nothing():
    mean, cov = (jnp.asarray(part) for part in logits(3))
    first = jnp.zeros(ROWS, int)
    eager = greedy(step_of(mean, cov), root(ROWS), first, LENGTH, num_points=POINTS)
    compiled = run_greedy(mean, cov, rows=ROWS)
    np.testing.assert_array_equal(eager.tokens, compiled.tokens)
    for ours, theirs in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("pairs", [False, True])
def test_a_batch_is_a_loop(pairs):
    """Rows that begin at different tokens, with kept tokens as a state of several leaves."""
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(LENGTH + 1, V)))
    factor = rng.normal(size=(V, V))
    noise = jnp.asarray(factor @ factor.T if pairs else np.diagonal(factor) ** 2)

    def step(state, tokens):
        count = state["count"] + 1
        kept = state["kept"].at[jnp.arange(len(tokens)), state["count"]].set(tokens)
        mean, cov = jnp.cos((1.0 + kept) @ weights), jnp.stack([noise] * len(tokens))
        return mean, cov, {"kept": kept, "count": count}

    @jax.jit
    def run(first):
        kept = jnp.zeros((len(first), LENGTH + 1), jnp.int32)
        state = {"kept": kept, "count": jnp.zeros(len(first), jnp.int32)}
        return greedy(step, state, first, LENGTH, end=1, num_points=POINTS)

    batch = run(jnp.arange(3))
    loop = [run(jnp.asarray([first])) for first in range(3)]
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *loop)
    np.testing.assert_array_equal(batch.tokens, joined.tokens)
    for ours, theirs in zip(jax.tree.leaves(batch), jax.tree.leaves(joined), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


def test_the_end_token_freezes_a_row():
    """Up to the end token all is as without one; then there is nothing but padding."""
    end, ended_rows = 1, 0
    mean, cov = logits(1, scale=0.5)
    key = jax.random.key(3)
    free = run_sample(key, mean, cov, 1.0, rows=ROWS)
    ended = run_sample(key, mean, cov, 1.0, rows=ROWS, end=end)
    log_probs = np.asarray(table(mean, cov))
    for row in range(ROWS):
        whole = free.tokens[row].tolist()
        stop = whole.index(end) + 1 if end in whole else LENGTH
        ended_rows += stop < LENGTH
        assert ended.tokens[row].tolist() == whole[:stop] + [-1] * (LENGTH - stop)
        np.testing.assert_allclose(
            ended.log_probs[row], log_prob(whole[:stop], log_probs), atol=1e-12
        )
        for ours, theirs in zip(ended.uncertainty, free.uncertainty, strict=True):
            np.testing.assert_array_equal(ours[row, :stop], theirs[row, :stop])
            np.testing.assert_array_equal(ours[row, stop:], 0)
    assert ended_rows


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_sampled_frequencies(temperature):
    """Chi-square of pairs of tokens against p^(1/T), normalised token by token."""
    rows = 30_000
    mean, cov = logits(2, scale=0.7)
    result = run_sample(jax.random.key(7), mean, cov, temperature, rows=rows, length=2)
    sharp = np.exp(np.asarray(table(mean, cov)) / temperature)
    sharp /= sharp.sum(axis=1, keepdims=True)
    expected = rows * sharp[0][:, None] * sharp[1 : V + 1]
    tokens = np.asarray(result.tokens)
    seen = np.zeros((V, V))
    np.add.at(seen, (tokens[:, 0], tokens[:, 1]), 1)
    assert scipy.stats.chisquare(seen.ravel(), expected.ravel()).pvalue > 1e-3
    # What comes with the tokens are log-probabilities of the predictive distribution, not tempered.
    wanted = [log_prob(row, np.asarray(table(mean, cov))) for row in tokens[:20]]
    np.testing.assert_allclose(result.log_probs[:20], wanted, atol=1e-12)


@pytest.mark.parametrize("temperature", [1e-30, 0.0, -1.0, np.nan])
def test_a_temperature_that_is_not_positive_counts_as_the_smallest_in_jit(temperature):
    mean, cov = logits(4)
    cold = run_sample(jax.random.key(0), mean, cov, temperature, rows=ROWS)
    np.testing.assert_array_equal(cold.tokens, run_greedy(mean, cov, rows=ROWS).tokens)
    assert np.isfinite(cold.log_probs).all()


def test_a_longer_sequence_begins_with_the_shorter_one():
    mean, cov = logits(5)
    short = run_sample(jax.random.key(1), mean, cov, 1.0, rows=ROWS, length=2)
    longer = run_sample(jax.random.key(1), mean, cov, 1.0, rows=ROWS)
    np.testing.assert_array_equal(longer.tokens[:, :2], short.tokens)


def test_masked_tokens_do_not_occur():
    mean, cov = logits(6)
    mean[:, 1] = -np.inf
    for result in both(mean, cov):
        assert not (np.asarray(result.tokens) == 1).any()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result))


def test_a_row_of_which_everything_is_masked_finishes():
    mean, cov = logits(7)
    mean[1:] = -np.inf  # after the first token
    for result in both(mean, cov):
        assert (np.asarray(result.tokens)[:, 0] >= 0).all()
        np.testing.assert_array_equal(result.tokens[:, 1:], -1)
        np.testing.assert_array_equal(result.log_probs, -np.inf)
        for part in result.uncertainty:
            np.testing.assert_array_equal(part[:, 1:], 0)


def test_float32():
    mean, cov = (jnp.asarray(part, jnp.float32) for part in logits(0))
    result = run_greedy(mean, cov, rows=ROWS)
    assert {leaf.dtype for leaf in jax.tree.leaves(result)[1:]} == {jnp.dtype("float32")}
    np.testing.assert_allclose(
        result.log_probs, run_greedy(*logits(0), rows=ROWS).log_probs, atol=1e-4
    )
