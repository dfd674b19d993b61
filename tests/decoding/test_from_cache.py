"""Greedy decoding with cached keys and values chooses what the whole pass would."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moment_jax as mj

VOCABULARY, FEATURES, LENGTH, ROWS = 6, 4, 5, 2
variances = jax.vmap(lambda cov: cov.variance())


class LanguageModel(nnx.Module):
    """Embedding and positions, a causal encoder, tied logits."""

    def __init__(self):
        settings = {"structure": mj.Diagonal, "relative_scale": 0.5, "rngs": nnx.Rngs(3)}
        self.tokens = mj.nn.Embedding(VOCABULARY, FEATURES, **settings)
        self.places = mj.nn.LearnedPositions(LENGTH, FEATURES, **settings)
        self.encoder = mj.nn.Encoder(1, FEATURES, 2, hidden_features=6, norm_first=True, **settings)

    def step(self, cache, tokens):
        """Moments of the next token's logits, (B, V), and the cache with `tokens` (B,) in it."""
        x, cov = self.places(*self.tokens(tokens[:, None]), start=cache.length[:, 0])
        x, cov, cache = self.encoder.step(x, cov, cache)
        logits, cov = self.tokens.attend(x, cov)
        return logits[:, 0], variances(cov)[:, 0], cache

    def whole(self, ids):
        """Moments of the logits after every token, (B, T, V)."""
        causal = jnp.tril(jnp.ones((ids.shape[1],) * 2, bool))
        x, cov = self.encoder(*self.places(*self.tokens(ids)), causal)
        logits, cov = self.tokens.attend(x, cov)
        return logits, variances(cov)


def test_greedy_from_a_cache():
    model, first = LanguageModel(), jnp.array([1, 4])

    @nnx.jit
    def decode(model, first):
        cache = model.encoder.start(LENGTH, batch=(ROWS,))
        return mj.decoding.greedy(model.step, cache, first, LENGTH)

    found = decode(model, first)
    read = jnp.concatenate([first[:, None], found.tokens[:, :-1]], axis=1)
    mean, variance = nnx.jit(LanguageModel.whole)(model, read)
    log_probs = jax.vmap(jax.vmap(mj.objectives.log_class_probabilities))(mean, variance)
    np.testing.assert_array_equal(found.tokens, jnp.argmax(log_probs, axis=2))
    total = jnp.sum(jnp.max(log_probs, axis=2), axis=1)
    np.testing.assert_allclose(found.log_probs, total, rtol=1e-5)
