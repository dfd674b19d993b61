"""Beam search: exhaustive where it is wide, greedy where it has one beam, and laws in between."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.decoding import beam_search, greedy
from tests.decoding.tree import (
    LENGTH,
    POINTS,
    V,
    all_sequences,
    log_prob,
    logits,
    padded,
    root,
    step_of,
    table,
)

WIDE = V ** (LENGTH - 1)


@partial(jax.jit, static_argnames=("num_beams", "end"))
def search(mean, cov, length_penalty=0.0, *, num_beams, end=None):
    options = {"end": end, "length_penalty": length_penalty, "num_points": POINTS}
    return beam_search(step_of(mean, cov), root(1), 0, LENGTH, num_beams, **options)


def ranked(mean, cov, penalty, end):
    """Every sequence with its score and its log-probability, best first."""
    log_probs = np.asarray(table(mean, cov))
    listed = [(padded(s), len(s), log_prob(s, log_probs)) for s in all_sequences(end)]
    listed = [(tokens, value / size**penalty, value) for tokens, size, value in listed]
    return sorted(listed, key=lambda row: -row[1])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("penalty", [0.0, 0.7, 2.0, -1.0])
@pytest.mark.parametrize("end", [None, 1])
def test_a_wide_beam_is_an_exhaustive_search(seed, penalty, end):
    mean, cov = logits(seed)
    beams = search(mean, cov, penalty, num_beams=WIDE, end=end)
    truth = ranked(mean, cov, penalty, end)[:WIDE]
    np.testing.assert_array_equal(beams.tokens, [tokens for tokens, _, _ in truth])
    np.testing.assert_allclose(beams.scores, [score for _, score, _ in truth], atol=1e-12)
    np.testing.assert_allclose(beams.log_probs, [value for _, _, value in truth], atol=1e-12)


@pytest.mark.parametrize("end", [None, 0])
def test_one_beam_is_greedy(end):
    decode = jax.jit(
        lambda mean, cov: greedy(
            step_of(mean, cov), root(1), jnp.zeros(1, int), LENGTH, end=end, num_points=POINTS
        )
    )
    for seed in range(20):
        mean, cov = logits(seed)
        single, likeliest = search(mean, cov, num_beams=1, end=end), decode(mean, cov)
        np.testing.assert_array_equal(single.tokens, likeliest.tokens)
        np.testing.assert_allclose(single.scores, likeliest.log_probs, atol=1e-12)


def test_what_a_narrow_beam_finds_is_true_sorted_and_distinct():
    num_beams, gaps = 5, []
    for seed in range(10):
        mean, cov = logits(seed, scale=0.5)
        beams = search(mean, cov, 0.5, num_beams=num_beams, end=1)
        truth = {tuple(tokens): score for tokens, score, _ in ranked(mean, cov, 0.5, 1)}
        found = [tuple(row) for row in beams.tokens.tolist()]
        assert len(set(found)) == num_beams
        np.testing.assert_allclose(beams.scores, [truth[row] for row in found], atol=1e-12)
        assert (np.diff(beams.scores) <= 0).all()
        gaps.append(max(truth.values()) - float(beams.scores[0]))
    assert min(gaps) < 1e-12  # it does find the best, most often


def test_an_ended_hypothesis_is_kept_though_others_look_better_for_a_while():
    """After token 0 everything is unlikely; the sequence that ends at once wins in the end."""

    def step(node, tokens):
        start = jnp.log(jnp.asarray([0.5, 0.3, 0.2]))
        mean = jnp.where((node < 0)[:, None], start[None, :], 0.0)
        return mean, jnp.zeros_like(mean), node + 1

    beams = jax.jit(lambda: beam_search(step, root(1), 0, 3, 2, end=1))()
    assert beams.tokens[0].tolist() == [1, -1, -1]
    np.testing.assert_allclose(np.exp(beams.scores[0]), 0.3)


def test_the_state_follows_its_hypothesis():
    """Kept tokens, gathered with their beam, are the tokens of the result less the last one."""
    mean, cov = (jnp.asarray(part) for part in logits(8, scale=0.5))
    tree = step_of(mean, cov)

    def step(state, tokens):
        m, c, node = tree(state["node"], tokens)
        kept = state["kept"].at[jnp.arange(len(tokens)), state["count"]].set(tokens)
        # A hypothesis whose state is not its own would be told from its kept tokens.
        own = kept[:, 1:] @ jnp.asarray([27, 9, 3, 1])
        mean = m + jnp.sin(1.0 * own)[:, None] * jnp.arange(V)[None, :]
        return mean, c, {"node": node, "kept": kept, "count": state["count"] + 1}

    state = {"node": root(1), "kept": jnp.zeros((1, LENGTH + 1), int), "count": jnp.zeros(1, int)}

    @jax.jit
    def search_and_follow(state):
        beams = beam_search(step, state, 0, LENGTH, 5, num_points=POINTS)

        # All hypotheses again, side by side and each with a state of its own.
        def follow(carry, tokens):
            row, last = carry
            m, c, row = step(row, last)
            return (row, tokens), table(m, c)[jnp.arange(5), tokens]

        row = jax.tree.map(lambda leaf: jnp.repeat(leaf, 5, axis=0), state)
        _, gains = jax.lax.scan(follow, (row, jnp.zeros(5, jnp.int32)), beams.tokens.T)
        return beams.log_probs, gains.sum(axis=0)

    np.testing.assert_allclose(*search_and_follow(state), atol=1e-12)


def test_fewer_sequences_than_beams_leave_padding():
    mean, cov = logits(9)
    mean[:, 0] = -np.inf
    beams = search(mean, cov, num_beams=WIDE)
    exist = 2**LENGTH
    assert np.isfinite(beams.scores[:exist]).all()
    np.testing.assert_array_equal(beams.scores[exist:], -np.inf)
    np.testing.assert_array_equal(beams.tokens[exist:], -1)
    assert set(np.unique(beams.tokens[:exist])) == {1, 2}


@pytest.mark.parametrize("penalty", [np.nan, 1e6, -1e6])
def test_no_penalty_gives_nan_in_jit(penalty):
    mean, cov = logits(0)
    beams = search(mean, cov, penalty, num_beams=WIDE, end=1)
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(beams))


def test_vmap_and_float32():
    tables = [logits(seed) for seed in range(3)]
    mean, cov = (jnp.asarray(np.stack(part), jnp.float32) for part in zip(*tables, strict=True))
    batch = jax.vmap(partial(search, num_beams=5, end=1))(mean, cov)
    assert batch.scores.dtype == jnp.float32
    for row in range(3):
        single = search(mean[row], cov[row], num_beams=5, end=1)
        np.testing.assert_array_equal(batch.tokens[row], single.tokens)
        np.testing.assert_allclose(batch.scores[row], single.scores, atol=1e-5)
