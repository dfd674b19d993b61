"""Properties of every transform on drawn inputs: no NaN, positive semidefinite, a batch is a loop.

The suite draws a hundred examples. For 2,000:
`pytest -n 2 tests/laws/test_properties.py --hypothesis-profile=long`.
"""

from __future__ import annotations

import functools
import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moment_jax as mj
from tests.builders import (
    ALL_STRUCTURES,
    KERNEL_FAMILIES,
    decoder_of,
    random_block,
    random_dense,
    random_dense_params,
)

pytestmark = pytest.mark.slow

HIDDEN, HEADS = 3, 2
TOLERANCE = {jnp.dtype("float32"): 2e-4, jnp.dtype("float64"): 1e-9}


class Program(NamedTuple):
    """A transform and the static properties of its inputs."""

    transform: str
    shape: tuple[int, int]
    dtype: type
    structure: type
    family: type
    masked: bool
    order: int
    norm_first: bool


def program(transform: str, index: int) -> Program:
    """Cycles through the structures; everything else is random."""
    choose = random.Random(f"{transform} {index}").choice
    return Program(
        transform,
        choose([(1, 2), (2, 4), (4, 2), (5, 6)]),
        choose([jnp.float32, jnp.float64]),
        ALL_STRUCTURES[index % len(ALL_STRUCTURES)],
        choose(KERNEL_FAMILIES),
        choose([True, False]),
        choose([1, 2]),
        choose([True, False]),
    )


class Parts(NamedTuple):
    """Arguments shared by the transforms."""

    dense: mj.DenseParams
    block: mj.EncoderBlockParams
    other: tuple  # a random matrix (D, HIDDEN)
    memory: tuple  # a random sequence (T, D)


# Each a function (program, mean, cov, parts, mask of T tokens) -> moments.
TRANSFORMS = {
    "dense": lambda p, m, c, parts, mask: mj.dense(m, c, parts.dense),
    "matmul": lambda p, m, c, parts, mask: mj.matmul(m, c, *parts.other),
    "relu": lambda p, m, c, parts, mask: mj.relu(m, c),
    "gelu": lambda p, m, c, parts, mask: mj.gelu(m, c),
    "activation": lambda p, m, c, parts, mask: mj.activation(m, c, jnp.tanh),
    "softmax": lambda p, m, c, parts, mask: mj.softmax(
        m, c, mask=pairs(mask, m.shape[1], across=True), order=p.order
    ),
    "layer_norm": lambda p, m, c, parts, mask: mj.layer_norm(
        m, c, parts.block.norm1, order=p.order
    ),
    "mean_pool": lambda p, m, c, parts, mask: mj.mean_pool(m, c, mask),
    "attention": lambda p, m, c, parts, mask: mj.attention(
        m, c, parts.block.attention, num_heads=HEADS, mask=pairs(mask, len(m)), order=p.order
    ),
    "cross_attention": lambda p, m, c, parts, mask: mj.cross_attention(
        m,
        c,
        *parts.memory,
        parts.block.attention,
        num_heads=HEADS,
        mask=pairs(mask, len(m)),
        order=p.order,
    ),
    "feed_forward": lambda p, m, c, parts, mask: mj.feed_forward(
        m, c, parts.block.feed_forward, activation=mj.gelu
    ),
    "encoder_block": lambda p, m, c, parts, mask: mj.encoder_block(
        m,
        c,
        parts.block,
        num_heads=HEADS,
        mask=pairs(mask, len(m)),
        norm_first=p.norm_first,
        order=p.order,
    ),
    "decoder_block": lambda p, m, c, parts, mask: mj.decoder_block(
        m,
        c,
        *parts.memory,
        decoder_of(parts.block),
        num_heads=HEADS,
        memory_mask=pairs(mask, len(m)),
        norm_first=p.norm_first,
    ),
}


def pairs(mask, size, across=False):
    """Broadcast a mask of tokens to (size, T), or to (T, size)."""
    if mask is None:
        return None
    return jnp.broadcast_to(mask[:, None] if across else mask[None, :], (len(mask), size))


# Drawn without `jit`: tiny programs shared by all examples compile faster than one for each of these.
def draw_params(key, family, features):
    keys = jax.random.split(key)
    dense = random_dense_params(keys[0], family, (features, HIDDEN))
    return dense, random_block(keys[1], features, HIDDEN, family=family)


def draw_moments(key, structure, shape, spread):
    keys = jax.random.split(key)
    mean = jax.random.normal(keys[0], shape)
    return mean, structure.project(random_dense(keys[1], shape, spread))


@functools.cache
def compiled(p: Program):
    """A transform compiled for one sequence, and for a batch."""

    def one(moments, parts, mask):
        return TRANSFORMS[p.transform](p, *moments, parts, mask)

    one = jax.jit(one)  # traced once for both
    return one, jax.jit(jax.vmap(one, in_axes=(0, None, None)))


def cast(tree, dtype):
    return jax.tree.map(lambda leaf: np.asarray(leaf, dtype), tree)


EXAMPLES = -(-settings.default.max_examples // len(TRANSFORMS))


@pytest.fixture(autouse=True)
def _drop_programs():
    """Two thousand examples compile more programs than a process can hold."""
    yield
    compiled.cache_clear()
    if EXAMPLES > 10:
        jax.clear_caches()


@pytest.mark.parametrize("transform", TRANSFORMS)
@settings(max_examples=EXAMPLES)
@given(
    index=st.integers(0, EXAMPLES // 6),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    centre=st.sampled_from(["random", "zeros", "equal"]),
    seen=st.sampled_from(["random", "one", "all", "none"]),
)
def test_any_transform(transform, index, seed, spread, centre, seen):
    p = program(transform, index)
    one, many = compiled(p)
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 5)  # compiles faster than the default
    other = draw_moments(keys[4], p.structure, (p.shape[1], HIDDEN), 1.0)
    memory = draw_moments(keys[1], p.structure, p.shape, 1.0)
    params = draw_params(keys[0], p.family, p.shape[1])
    parts = cast(Parts(*params, other, memory), p.dtype)
    batch = [cast(draw_moments(key, p.structure, p.shape, spread), p.dtype) for key in keys[2:4]]
    scale = {"random": 1, "zeros": 0, "equal": 0}[centre]
    batch = [(scale * mean + mean.dtype.type(centre == "equal"), cov) for mean, cov in batch]
    chosen = {"random": np.random.default_rng(seed).random(p.shape[0]) < 0.5}
    mask = chosen.get(seen, np.arange(p.shape[0]) < {"one": 1, "all": 99}.get(seen, 0))
    mask = mask if p.masked else None

    with pytest.raises(TypeError, match=r"\.astype\(jnp.float32\)"):
        one((batch[0][0].astype(np.uint8), batch[0][1]), parts, mask)
    loop = [one(moments, parts, mask) for moments in batch]
    for result in loop:
        check_moments(p, *result)
    if p.shape[1] == 2 and ("norm" in p.transform or "block" in p.transform):
        return  # two features, normalised, are a sign: rounding decides it where they are equal
    together = many(jax.tree.map(lambda *leaves: np.stack(leaves), *batch), parts, mask)
    for row, result in enumerate(loop):
        for single, stacked in zip(*map(jax.tree.leaves, (result, together)), strict=True):
            size = max(1.0, float(np.max(np.abs(single))))
            tolerance = 10 * TOLERANCE[single.dtype] * size
            np.testing.assert_allclose(stacked[row], single, atol=tolerance)


def check_moments(p: Program, mean, cov) -> None:
    """Finite, dtype and structure of the input, positive semidefinite."""
    assert isinstance(cov, p.structure)
    assert cov.shape == mean.shape
    for leaf in jax.tree.leaves((mean, cov)):
        assert leaf.dtype == p.dtype
        assert np.isfinite(leaf).all()
    assert np.min(cov.variance()) >= 0
    entries = mean.size
    dense = np.asarray(to_dense(cov), np.float64).reshape(entries, entries)
    tolerance = TOLERANCE[mean.dtype] * np.max(np.abs(dense))
    np.testing.assert_allclose(dense, dense.T, atol=tolerance)
    assert np.linalg.eigvalsh(dense).min() >= -entries * tolerance


to_dense = jax.jit(lambda cov: cov.to_dense())
