"""Greedy decoding with cached keys and values chooses what the whole pass would."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moment_jax as mj

VOCABULARY, FEATURES, LENGTH, ROWS, POINTS = 6, 4, 5, 2, 32
variances = jax.vmap(lambda cov: cov.variance())


class LanguageModel(nnx.Module):
    """Embedding and positions, a causal encoder, tied logits."""

    def __init__(self):
        settings = {"structure": mj.Diagonal, "relative_scale": 0.5, "rngs": nnx.Rngs(3)}
        self.tokens = mj.nn.Embedding(VOCABULARY, FEATURES, **settings)
        self.places = mj.nn.LearnedPositions(LENGTH, FEATURES, **settings)
        settings |= {"hidden_features": 6, "norm_first": True, "activation": "relu"}
        self.encoder = mj.nn.Encoder(1, FEATURES, 2, **settings)

    def step(self, cache, tokens):
        """Moments of the next token's logits, (B, V), and the cache with `tokens` (B,) in it."""
        x, cov = self.places(*self.tokens(tokens[:, None]), start=cache.length[:, 0])
        x, cov, cache = self.encoder.step(x, cov, cache)
        logits, cov = self.tokens.attend(x, cov)
        return logits[:, 0], variances(cov)[:, 0], cache

    def whole(self, ids):
        """Log-probabilities after every token, (B, T, V)."""
        causal = jnp.tril(jnp.ones((ids.shape[1],) * 2, bool))
        x, cov = self.encoder(*self.places(*self.tokens(ids)), causal)
        logits, cov = self.tokens.attend(x, cov)
        predict = partial(mj.objectives.log_class_probabilities, num_points=POINTS)
        return jax.vmap(jax.vmap(predict))(logits, variances(cov))


def test_greedy_from_a_cache():
    model, first = LanguageModel(), jnp.array([1, 4])

    @nnx.jit
    def decode(model, first):
        cache = model.encoder.start(LENGTH, batch=(ROWS,))
        return mj.decoding.greedy(model.step, cache, first, LENGTH, num_points=POINTS)

    found = decode(model, first)
    read = np.concatenate([first[:, None], found.tokens[:, :-1]], axis=1)
    log_probs = np.asarray(nnx.jit(LanguageModel.whole)(model, read))
    np.testing.assert_array_equal(found.tokens, log_probs.argmax(axis=2))
    np.testing.assert_allclose(found.log_probs, log_probs.max(axis=2).sum(axis=1), rtol=1e-5)
