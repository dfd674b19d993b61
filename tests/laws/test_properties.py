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

from tests.builders import ALL_STRUCTURES, KERNEL_FAMILIES, random_block, random_dense
from tests.transforms import TRANSFORMS, Given

pytestmark = pytest.mark.slow

HIDDEN = 3
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


# Drawn without `jit`: tiny programs shared by all examples compile faster than one for each of these.
def draw_moments(key, structure, shape, spread):
    keys = jax.random.split(key)
    mean = jax.random.normal(keys[0], shape)
    return mean, structure.project(random_dense(keys[1], shape, spread))


@functools.cache
def compiled(p: Program):
    """A transform compiled for one sequence, and for a batch."""

    def one(moments, arrays, seen):
        mask = None if seen is None else jnp.broadcast_to(seen[None, :], (len(seen), len(seen)))
        given = Given(*arrays, seen, mask, mask, p.order, p.norm_first)
        return TRANSFORMS[p.transform](*moments, given)

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
    block = random_block(keys[0], p.shape[1], HIDDEN, family=p.family)
    arrays = cast((block, other, memory), p.dtype)
    batch = [cast(draw_moments(key, p.structure, p.shape, spread), p.dtype) for key in keys[2:4]]
    scale = {"random": 1, "zeros": 0, "equal": 0}[centre]
    batch = [(scale * mean + mean.dtype.type(centre == "equal"), cov) for mean, cov in batch]
    chosen = {"random": np.random.default_rng(seed).random(p.shape[0]) < 0.5}
    mask = chosen.get(seen, np.arange(p.shape[0]) < {"one": 1, "all": 99}.get(seen, 0))
    mask = mask if p.masked else None

    with pytest.raises(TypeError, match=r"\.astype\(jnp.float32\)"):
        one((batch[0][0].astype(np.uint8), batch[0][1]), arrays, mask)
    loop = [one(moments, arrays, mask) for moments in batch]
    for result in loop:
        check_moments(p, *result)
    if p.shape[1] == 2 and ("norm" in p.transform or "block" in p.transform):
        return  # two features, normalised, are a sign: rounding decides it where they are equal
    together = many(jax.tree.map(lambda *leaves: np.stack(leaves), *batch), arrays, mask)
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
