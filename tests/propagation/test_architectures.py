"""Arrangements of public models: group norms, parallel and shared branches, skips, unusual attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.propagation.moments import gather
from moment_jax.propagation.windows import window_places, with_window_variance
from tests.propagation.test_propagate import assert_sampled, relative


def linear(i, o, rngs):
    return nnx.Linear(i, o, rngs=rngs)


class Grouped(nnx.Module):
    """A residual around a convolution of an array normalised over groups of channels."""

    def __init__(self, norm, rngs):
        self.first = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.norm = norm(rngs)
        self.second = nnx.Conv(4, 4, (3, 3), rngs=rngs)
        self.head = linear(4, 3, rngs)

    def __call__(self, x):
        x = self.first(x)
        x = x + self.second(nnx.silu(self.norm(x)))
        return self.head(x.mean((1, 2)))


class Parallel(nnx.Module):
    """Attention of normalised queries, and a feed-forward branch, of one normalised array."""

    def __init__(self, rngs):
        self.first = linear(3, 8, rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, normalize_qk=True, decode=False, rngs=rngs)
        self.up, self.down = linear(8, 16, rngs), linear(16, 8, rngs)

    def __call__(self, x):
        x = self.first(x)
        y = self.norm(x)
        return x + self.attention(y) + self.down(nnx.gelu(self.up(y)))


class Skips(nnx.Module):
    """Down by a padded maximum, up by a transposed convolution, beside what came in."""

    def __init__(self, rngs):
        self.first = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.up = nnx.ConvTranspose(4, 4, (2, 2), strides=(2, 2), rngs=rngs)
        self.last = nnx.Conv(8, 2, (1, 1), rngs=rngs)

    def __call__(self, x):
        x = nnx.silu(self.first(x))
        y = nnx.max_pool(x, (3, 1), strides=(2, 2), padding="SAME")
        return self.last(jnp.concatenate([x, self.up(y)], axis=-1)).mean((1, 2))


class Tied(nnx.Module):
    """An embedding that reads out what it has written."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(5, 8, rngs=rngs)
        self.mix = linear(8, 8, rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.embed.attend(x + nnx.tanh(self.mix(x)))


PADDED = ((0, 0), (1, 1), (1, 1), (0, 0))
IMAGES, TOKENS = (1, 4, 4, 2), (1, 4, 3)
MODELS = {
    "group_norm": (lambda r: Grouped(lambda r: nnx.GroupNorm(4, num_groups=2, rngs=r), r), IMAGES),
    "instance_norm": (lambda r: Grouped(lambda r: nnx.InstanceNorm(4, rngs=r), r), IMAGES),
    "parallel": (Parallel, TOKENS),
    "skips": (Skips, IMAGES),
    "tied": (Tied, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_public_arrangements_against_sampled_networks(name):
    make, shape = MODELS[name]
    model = make(nnx.Rngs(0))
    x = (
        jnp.array([[0, 3, 1]])
        if shape is None
        else jax.random.normal(jax.random.key(1), shape, jnp.float32)
    )
    assert_sampled(model, x, mj.Full)


def test_a_model_that_changes_the_statistics_of_a_batch_is_refused():
    model = nnx.Sequential(linear(3, 3, nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    beliefs = relative(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    with pytest.raises(ValueError, match=r"inference mode.*model.eval"):
        mj.bayesian(model, beliefs)(jnp.ones((2, 3), jnp.float32))


@pytest.mark.parametrize("strides", [1, 2])
def test_variances_of_a_convolved_separable_image_are_those_of_its_dense_covariance(strides):
    keys = jax.random.split(jax.random.key(0), 4)
    root = [jax.random.normal(key, (n, n)) for key, n in zip(keys, (16, 3), strict=False)]
    scale = 0.5 + jax.random.uniform(keys[2], (16, 3))
    token, feature = (
        cov / jnp.sqrt(jnp.outer(jnp.diag(cov), jnp.diag(cov))) for cov in (a @ a.T for a in root)
    )
    image = mj.Separable(scale, token, feature)
    kernel = jax.random.normal(keys[3], (3, 3, 3, 5))
    pixels, steps, ones = np.arange(48).reshape(1, 4, 4, 3), (1, strides, strides, 1), (1,) * 4
    places = window_places(pixels, (1, 3, 3, 3), steps, PADDED, ones, ones).reshape(-1, 27)
    kernel = kernel.reshape(27, 5)

    @jax.jit
    def convolved(image, kernel):
        mapped = gather(image, places).map_features(kernel)
        found = with_window_variance(mapped, image, places, kernel)
        return found.variance(), found.token_gram(), found.feature_gram(), mapped.feature_gram()

    variance, token_gram, *feature_grams = convolved(image, kernel)
    seen = np.where(places[..., None] < 0, 0, np.eye(48)[places])  # (P, 27, 48)
    outputs = np.einsum("pjt,jo->pot", seen, kernel)
    wanted = np.einsum("pot,ts,pos->po", outputs, image.to_dense().reshape(48, 48), outputs)
    assert np.allclose(variance, wanted, rtol=1e-10)
    assert np.allclose(np.diag(token_gram), wanted.sum(1), rtol=1e-10)
    assert np.allclose(*feature_grams, rtol=1e-10)
