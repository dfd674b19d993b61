"""With a causal mask, the moments of a token do not depend on later tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.covariance import Covariance
from tests.builders import ALL_STRUCTURES, assert_close, random_block
from tests.transforms import TRANSFORMS, Given

TOKENS, HEADS, SEEN = 6, 2, 3
CAUSAL = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
LEFT_PADDED = CAUSAL & (jnp.arange(TOKENS) > 0)
KEYS = jax.random.split(jax.random.key(4), 6)
MEMORY = {d: jax.random.normal(KEYS[4], (5, d)) for d in (4, 14)}  # few features, and many


@functools.cache
def params_of(features):
    return random_block(KEYS[0], features, 8, 0.5)


def twice(name, **options):
    """Two layers, of which only one is compiled."""

    def run(mean, cov, mask, block):
        memory = MEMORY[mean.shape[1]]
        moments = memory, type(cov).independent(0.1 + 0 * memory)
        given = Given(block, (), moments, mask=mask, **options)

        def layer(carry, _):
            return TRANSFORMS[name](*carry, given), None

        return jax.lax.scan(layer, (mean, cov), None, 2)[0]

    return run


def module(mean, cov, mask, _):
    settings = {"structure": type(cov), "relative_scale": 0.5, "dtype": jnp.float64}
    encoder = mj.nn.Encoder(2, mean.shape[1], HEADS, norm_first=True, rngs=nnx.Rngs(0), **settings)
    return encoder(mean, cov, mask=mask)


NETWORKS = {
    "pre-norm": twice("encoder_block", norm_first=True),
    "post-norm": twice("encoder_block"),
    "order 1": twice("encoder_block", norm_first=True, order=1),
    "decoder": twice("decoder_block"),
    "module": module,
}


# Only `Separable` keeps a statistic of all tokens.
CASES = [(structure, "pre-norm", 4, CAUSAL) for structure in ALL_STRUCTURES]
CASES += [(mj.Separable, "pre-norm", 4, LEFT_PADDED)]  # one program with the case above
CASES += [(mj.Separable, "post-norm", 4, CAUSAL)]
# The module is of pre-norm blocks. tests/laws/test_decoder_blocks.py has a decoder of few features.
CASES += [(mj.Separable, name, 14, CAUSAL) for name in ("order 1", "decoder", "module")]


@functools.partial(jax.jit, static_argnames=("structure", "name"))
def moments(mean, noise, mask, params, *, structure, name):
    mean, cov = NETWORKS[name](mean, structure.independent(noise), mask, params)
    return mean, cov.variance(), cov.token_gram()[:, :SEEN]


@pytest.mark.parametrize(("structure", "name", "features", "mask"), CASES)
def test_later_tokens_change_nothing(structure: type[Covariance], name: str, features: int, mask):
    mean = jax.random.normal(KEYS[2], (TOKENS, features))
    noise = jax.random.uniform(KEYS[3], (TOKENS, features))
    later = jnp.arange(TOKENS)[:, None] >= SEEN
    others = {"mask": mask, "params": params_of(features), "structure": structure, "name": name}
    first = moments(mean, noise, **others)
    second = moments(
        jnp.where(later, 5 - 3 * mean, mean), jnp.where(later, 30 * noise, noise), **others
    )
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
