"""Sequences of different lengths in one batch: padding does not change the other tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import assert_close

pytestmark = pytest.mark.slow

FEATURES, HEADS, VOCABULARY = 4, 2, 7
SOURCE_LENGTHS, TARGET_LENGTHS = (5, 3), (4, 2)
IDS = jax.random.randint(jax.random.key(0), (2, 2, 5), 0, VOCABULARY)


class Translator(nnx.Module):
    """Tokens and positions of source and target, a Transformer, tied logits."""

    def __init__(self):
        settings = {"structure": mj.Diagonal, "rngs": nnx.Rngs(0), "relative_scale": 0.3}
        self.tokens = mj.nn.Embedding(VOCABULARY, FEATURES, **settings)
        self.places = mj.nn.LearnedPositions(5, FEATURES, **settings)
        self.transformer = mj.nn.Transformer(
            FEATURES, HEADS, 1, hidden_features=6, norm_first=True, **settings
        )

    def __call__(self, source, target, source_valid=None, target_valid=None):
        (x, x_cov), (y, y_cov) = (self.places(*self.tokens(ids)) for ids in (source, target))
        causal = jnp.tril(jnp.ones((target.shape[-1],) * 2, bool))
        mean, cov = self.transformer(
            x, y, x_cov, y_cov, mask=causal, source_valid=source_valid, target_valid=target_valid
        )
        mean, cov = self.tokens.attend(mean, cov)
        return mean, cov.variances


def test_a_padded_sequence_in_a_batch_is_what_it_is_alone():
    """The single sequence has no batch axis, so this also shows that a batch equals a loop."""
    model, run = Translator(), nnx.jit(Translator.__call__)
    source, target = IDS[0], IDS[1, :, :4]
    valid = [
        jnp.arange(ids.shape[1])[None] < jnp.array(lengths)[:, None]
        for ids, lengths in ((source, SOURCE_LENGTHS), (target, TARGET_LENGTHS))
    ]
    mean, variance = run(model, source, target, *valid)
    # In the batch, other ids stand where the padding is.
    s, t = SOURCE_LENGTHS[1], TARGET_LENGTHS[1]
    single, single_variance = run(model, source[1, :s], target[1, :t])
    assert_close(mean[1, :t], single, 1e-5)
    assert_close(variance[1, :t], single_variance, 1e-5)


def test_padding_of_an_encoder():
    """In `Separable`: padding changes nothing, and an empty sequence has finite moments."""
    encoder = mj.nn.Encoder(1, FEATURES, HEADS, hidden_features=6, rngs=nnx.Rngs(0))
    run = nnx.jit(lambda m, x, v: m(x, valid=v))
    x = jax.random.normal(jax.random.key(1), (2, 3, FEATURES), jnp.float32)
    mean, cov = run(encoder, x, jnp.array([[True, True, False], [False] * 3]))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((mean, cov)))
    single, single_cov = run(encoder, x[0, :2], None)
    assert_close(mean[0, :2], single, 1e-5)
    variances = jax.vmap(lambda c: c.variance())
    assert_close(variances(cov)[0, :2], single_cov.variance(), 1e-5)


def test_weights_of_another_length():
    with pytest.raises(ValueError, match="one weight for each"):
        mj.Separable.zeros((3, FEATURES)).pooled(jnp.ones(2))
