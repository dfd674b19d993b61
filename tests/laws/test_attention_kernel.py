"""The Pallas kernel of `Diagonal`'s attention, interpreted, agrees with the program without it."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import moment_jax as mj
from moment_jax.layers.attention import squared_products as sizes
from moment_jax.layers.attention.diagonal_heads import Heads, mix_by_compiler
from moment_jax.layers.attention.diagonal_kernel import Plan, find_plan, mix_by_kernel
from moment_jax.layers.attention.diagonal_rows import Part, Shared
from moment_jax.layers.attention.row_kernel import Grid
from moment_jax.xla import inside_a_kernel, kernels
from tests.builders import assert_close, random_block, random_cov

HEADS = 2


class Case(NamedTuple):
    queries: int
    keys: int
    width: int
    rows: int  # of a program
    own: bool  # self-attention
    mask: str | None
    order: int


CASES = [
    Case(1, 1, 4, 1, True, None, 2),
    Case(7, 7, 8, 7, True, "causal", 2),
    Case(33, 33, 4, 8, True, "padding", 2),
    Case(33, 33, 4, 16, True, "padding", 1),
    Case(16, 33, 8, 8, False, "padding", 2),
]


def mask_of(case: Case) -> jax.Array | None:
    """A mask per head; with padding, the third query has no key."""
    key, query = jnp.arange(case.keys)[None, :], jnp.arange(case.queries)[:, None]
    if case.mask is None:
        return None
    mask = key <= query if case.mask == "causal" else (key < case.keys - 3) & (query != 2)
    return jnp.broadcast_to(mask, (HEADS, case.queries, case.keys))


def heads_of(case: Case, key: jax.Array, dtype: type = jnp.float64, noise: float = 0.3) -> Heads:
    keys = iter(jax.random.split(key, 10))

    def part(tokens: int) -> Part:
        shape = (HEADS, tokens, case.width)
        mean, variance = (jax.random.normal(next(keys), shape, dtype) for _ in range(2))
        return Part(mean, noise * variance**2)

    def noise_of(*shape: int) -> jax.Array:
        return noise * jax.random.normal(next(keys), shape, dtype)

    link = jax.random.normal(next(keys), (HEADS, case.width, case.width), dtype)
    return Heads(
        part(case.queries),
        part(case.keys),
        part(case.keys),
        Shared(noise_of(1, case.keys) ** 2, link),
        noise_of(HEADS, case.queries, 1) if case.own else None,
        mask_of(case),
    )


def plan_of(case: Case) -> Plan:
    grid = Grid(HEADS, -(-case.queries // case.rows), case.rows, interpret=True)
    return Plan(case.order, case.own, case.keys, grid)


def with_gradient(mix, heads: Heads):
    """The results, and the gradient of a sum of them with respect to all arrays of floats."""
    mask = heads.mask

    def total(numbers: Heads):
        found = mix(numbers._replace(mask=mask))
        return sum(jnp.sum(jnp.sin(3 * part)) for part in found if part is not None), found

    return jax.jit(jax.value_and_grad(total, has_aux=True))(heads._replace(mask=None))


def assert_same(found, expected, rtol: float = 1e-10):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.all(jnp.isfinite(one))
        assert_close(one, other, rtol)


@pytest.fixture(scope="module")
def heads_and_expected():
    """The arguments of a case, and their result without the kernel."""

    @functools.cache
    def of(case: Case):
        heads = heads_of(case, jax.random.key(1))
        return heads, with_gradient(lambda h: mix_by_compiler(h, None, case.order), heads)

    return of


@pytest.mark.parametrize("case", CASES)
def test_moments_and_gradients(case: Case, heads_and_expected):
    heads, expected = heads_and_expected(case)
    found = with_gradient(lambda heads: mix_by_kernel(plan_of(case), heads), heads)
    assert_same(found, expected)
    if case.mask == "padding":
        mean, variance, _ = found[0][1]
        assert not mean[:, 2].any()
        assert not variance[:, 2].any()


def test_a_batch_in_float32_and_without_noise():
    case = Case(12, 12, 4, 8, True, "causal", 2)
    quiet = heads_of(case, jax.random.key(1), jnp.float32, noise=0.0)
    noisy = heads_of(case, jax.random.key(2), jnp.float32)
    batch = jax.tree.map(lambda *x: jnp.stack(x), quiet, noisy)
    # Links are shared by the batch: only their derivatives have a batch axis.
    axes = jax.tree.map(lambda _: 0, batch)._replace(shared=Shared(0, None), mask=None)
    shared = batch.shared._replace(link=quiet.shared.link)
    batch = batch._replace(shared=shared, mask=quiet.mask)

    def each(mix):
        return lambda heads: jax.vmap(mix, in_axes=(axes,))(heads)

    found = with_gradient(each(lambda heads: mix_by_kernel(plan_of(case), heads)), batch)
    assert_same(
        found, with_gradient(each(lambda heads: mix_by_compiler(heads, None, 2)), batch), 1e-4
    )


@pytest.mark.parametrize("size", [sizes._size_by_keys, sizes._size_by_features])
def test_size_of_the_covariance_of_keys_and_values(size, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sizes, "_CHUNK", 4)
    shapes = (5, 11), (11, 3), (11, 3)
    arrays = [jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes)]

    def textbook(weights, k, v):
        return jnp.sum(jnp.einsum("ac,cd,ce->ade", weights, k, v) ** 2, axis=(1, 2))[:, None]

    def both(fn):
        slope = jnp.arange(1.0, 6.0)[:, None]
        gradient = jax.grad(lambda *x: jnp.sum(slope * fn(*x)), (0, 1, 2))
        return jax.jit(lambda *x: (fn(*x), gradient(*x)))(*arrays)

    assert_same(both(size), both(textbook))


def test_blocks_use_the_kernel_on_request():
    """In a scan over blocks with `remat`, as in an encoder; never by default on a CPU."""
    params = random_block(jax.random.key(0), 8, 16, 0.3)
    x = jax.random.normal(jax.random.key(1), (9, 8))
    cov = random_cov(jax.random.key(2), mj.Diagonal, (9, 8), 0.3)
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)

    def total(stack, x):
        @jax.checkpoint
        def block(moments, params):
            return mj.encoder_block(*moments, params, num_heads=2), None

        (mean, variance), _ = jax.lax.scan(block, (x, cov), stack)
        return jnp.sum(mean**2) + jnp.sum(variance.variances)

    def gradient():
        traced = jax.jit(jax.grad(lambda *args: total(*args))).trace(stack, x)
        return "pallas_call" in str(traced.jaxpr), traced.lower().compile()(stack, x)

    plain, expected = gradient()
    with kernels("interpret"):
        by_kernel, found = gradient()
    assert by_kernel
    assert not plain
    assert_same(found, expected, 1e-8)


LENGTHS = {1024: True, 4096: False, 2**15: None}


def plan_for(tokens: int) -> Plan | None:
    long = Case(tokens, tokens, 64, 0, True, None, 2)
    shapes = jax.eval_shape(lambda: heads_of(long, jax.random.key(0), jnp.float32))
    return find_plan(shapes, 2)


def test_derivatives_without_the_kernel_where_it_does_not_fit(heads_and_expected):
    plan = plan_of(CASES[1])._replace(backward=False)
    heads, expected = heads_and_expected(CASES[1])
    assert_same(with_gradient(lambda heads: mix_by_kernel(plan, heads), heads), expected)


def test_which_arguments_get_no_kernel():
    case = CASES[1]
    heads = heads_of(case, jax.random.key(0))
    assert find_plan(heads, 2) is None
    with kernels("tpu"):
        assert find_plan(heads, 2) is None  # float64
        assert find_plan(heads_of(case, jax.random.key(0), jnp.float32), 2) is not None
        backward = {n: plan.backward if (plan := plan_for(n)) else None for n in LENGTHS}
        assert backward == LENGTHS
    with kernels("interpret"), kernels("xla"):
        assert find_plan(heads, 2) is None


def test_forward_mode_needs_the_kernel_off():
    params = random_block(jax.random.key(0), 8, 16, 0.3).attention
    cov = mj.Diagonal.zeros((5, 8))

    def mean(x):
        return mj.attention(x, cov, params, num_heads=2)[0]

    def slope():
        return jax.jit(lambda x: jax.jvp(mean, (x,), (x,))[1])(x)

    x = jax.random.normal(jax.random.key(1), (5, 8))
    expected = slope()
    with kernels("interpret"):
        with pytest.raises(TypeError, match="forward-mode"):
            slope()
        with kernels("xla"):
            assert_close(slope(), expected)


def test_products_in_a_kernel_are_float32_unless_told_otherwise():
    def product():
        with inside_a_kernel():
            return str(jax.make_jaxpr(lambda a: a @ a)(jnp.ones((2, 2))))

    assert "HIGHEST" in product()
    with jax.default_matmul_precision("bfloat16"):
        assert "HIGHEST" not in product()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; pip install 'moment_jax[tpu]' compiles the kernel here",
)
@pytest.mark.parametrize(
    ("structure", "tokens", "batch", "count"),
    [
        ("Diagonal", 196, 16, 2),
        ("Diagonal", 1024, 1, 2),
        ("Diagonal", 4096, 1, 1),
        ("Separable", 5, 1, 2),
        ("Separable", 196, 16, 2),
    ],
)
def test_it_compiles_for_a_tpu(structure: str, tokens: int, batch: int, count: int):
    done = subprocess.run(
        [sys.executable, "-m", "tests.laws.kernel_for_tpu", structure, str(tokens), str(batch)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"kernels {count}" in done.stdout
