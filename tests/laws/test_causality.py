"""With a causal mask, the moments of a token do not depend on later tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.covariance import Covariance
from tests.builders import ALL_STRUCTURES, assert_close, decoder_of, random_block

TOKENS, HEADS, SEEN = 6, 2, 3
CAUSAL = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
LEFT_PADDED = CAUSAL & (jnp.arange(TOKENS) > 0)
KEYS = jax.random.split(jax.random.key(4), 6)
MEMORY = {d: jax.random.normal(KEYS[4], (5, d)) for d in (4, 14)}  # few features, and many


def twice(mean, cov, layer):
    """Two layers, of which only one is compiled."""
    return jax.lax.scan(lambda carry, _: (layer(*carry), None), (mean, cov), None, 2)[0]


PARAMS = {d: [random_block(key, d, 8, 0.5) for key in KEYS[:2]] for d in MEMORY}


def block(mask, **options):
    def run(mean, cov):
        params = PARAMS[mean.shape[1]][0]
        return twice(
            mean,
            cov,
            lambda m, c: mj.encoder_block(m, c, params, num_heads=HEADS, mask=mask, **options),
        )

    return run


def decoder(mean, cov):
    params = decoder_of(*PARAMS[mean.shape[1]])
    memory = MEMORY[mean.shape[1]]
    memory_cov = type(cov).independent(0.1 + 0 * memory)

    def layer(mean, cov):
        return mj.decoder_block(mean, cov, memory, memory_cov, params, num_heads=HEADS, mask=CAUSAL)

    return twice(mean, cov, layer)


def module(mean, cov):
    encoder = mj.nn.Encoder(
        2,
        mean.shape[1],
        HEADS,
        structure=type(cov),
        norm_first=True,
        relative_scale=0.5,
        dtype=jnp.float64,
        rngs=nnx.Rngs(0),
    )
    return encoder(mean, cov, mask=CAUSAL)


NETWORKS = {
    "pre-norm": block(CAUSAL, norm_first=True),
    "post-norm": block(CAUSAL),
    "order 1": block(CAUSAL, norm_first=True, order=1),
    "left padding": block(LEFT_PADDED, norm_first=True),
    "decoder": decoder,
    "module": module,
}


# Only `Separable` keeps a statistic of all tokens.
CASES = [(structure, "pre-norm", 4) for structure in ALL_STRUCTURES]
CASES += [(mj.Separable, name, 4) for name in ("post-norm", "left padding", "decoder")]
CASES += [(mj.Separable, name, 14) for name in ("pre-norm", "order 1", "decoder", "module")]


@pytest.mark.parametrize(("structure", "name", "features"), CASES)
def test_later_tokens_change_nothing(structure: type[Covariance], name: str, features: int):
    mean = jax.random.normal(KEYS[2], (TOKENS, features))
    noise = jax.random.uniform(KEYS[3], (TOKENS, features))
    later = jnp.arange(TOKENS)[:, None] >= SEEN

    @jax.jit
    def run(mean, noise):
        mean, cov = NETWORKS[name](mean, structure.independent(noise))
        return mean, cov.variance(), cov.token_gram()[:, :SEEN]

    first = run(mean, noise)
    second = run(jnp.where(later, 5 - 3 * mean, mean), jnp.where(later, 30 * noise, noise))
    for one, other in zip(first, second, strict=True):
        assert_close(other[:SEEN], one[:SEEN], 1e-10)
    assert not jnp.allclose(second[1][SEEN:], first[1][SEEN:])


def test_a_certain_first_token_hides_no_noise():
    """Its zero covariance is not used for the other tokens."""
    mean = jax.random.normal(KEYS[2], (TOKENS, 14))
    noise = jnp.full((TOKENS, 14), 0.5).at[0].set(0)
    params = random_block(KEYS[0], 14, 8, family=mj.posterior.Point).attention
    run = jax.jit(
        lambda cov: mj.attention(mean, cov, params, num_heads=HEADS, mask=CAUSAL)[1].variance()[1:]
    )
    separable, correlated = (run(s.independent(noise)) for s in (mj.Separable, mj.TokenCorrelated))
    assert 0.5 < jnp.mean(separable) / jnp.mean(correlated) < 2
