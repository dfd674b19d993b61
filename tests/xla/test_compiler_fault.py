"""A fault of XLA for CPU that the library works around: sums over a product with one number broadcast.

In jaxlib 0.10.2 to 0.12.0 the result is silently wrong if product and reduction are fused (by XLA's YNN
library) and have at least 4,096 numbers. `unflagged_program` has the smallest examples:

    jax.jit(lambda x: jnp.sum(x @ jnp.full((64, 64), 0.01), axis=0))(x)

Only the right operand matters. The reduction may be over any axis, after elementwise functions or
another product, in `vmap` and derivatives, in float32, bfloat16 and float64. Not affected: left operands
of one number, right operands that vary along one axis, products with vectors, and x.T @ y.
"""

import functools
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

import moment_jax as mj
from tests.builders import KERNEL_FAMILIES, decoder_of, quickly, random_block
from tests.transforms import LAYERS, Given

# The first jaxlib that compiles `plain` wrongly, and the first later one that does not (999: unknown).
BROKEN, MENDED = (0, 10, 2), (999,)
HAS_THE_FAULT = BROKEN <= tuple(map(int, version("jaxlib").split(".")[:3])) < MENDED


@pytest.fixture(scope="module")
def errors():
    """Of a fresh process without any flag."""
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and not k.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.xla.unflagged_program"], text=True, capture_output=True,
        env={**kept, "JAX_PLATFORMS": "cpu"}, cwd=Path(__file__).parents[2], timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_fault_is_there(errors):
    """Once no supported jaxlib has the fault, its workaround can go."""
    if not HAS_THE_FAULT:
        assert max(errors["plain"]) < 1e-5
    else:
        assert min(errors["plain"]) > 1e-3, (
            f"jaxlib {version('jaxlib')} compiles a sum over a product with one number broadcast "
            "correctly: name it in MENDED. Once it is the oldest supported release, "
            "`moment_jax.xla.materialized_inputs` and this file can go."
        )


@pytest.mark.parametrize("name", ["materialized", "model"])
def test_it_is_mended(errors, name):
    """A model's weights are constants of its program."""
    assert max(errors[name]) < 1e-5


# -- what would be compiled wrongly, without compiling ------------------------------------------------


def faulty_products(fn, *args):
    """Where `fn`, for arbitrary arguments, has products whose right operand is one number broadcast."""
    found = []
    walk(jax.make_jaxpr(fn)(*args), [False] * len(jax.tree.leaves(args)), found)
    return found


def walk(program, args, found):
    """Which results are one number, given which arguments are; `found` grows."""
    jaxpr, consts = program, []
    if isinstance(program, ClosedJaxpr):
        jaxpr, consts = program.jaxpr, program.consts
    known = [*map(constant, consts), *args]
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], known, strict=True))

    def is_one(variable):
        if isinstance(variable, Literal):
            return constant(variable.val)
        return known[variable] or variable.aval.shape == ()  # whatever the number is

    for equation in jaxpr.eqns:
        ones = [is_one(variable) for variable in equation.invars]
        if equation.primitive.name == "dot_general" and ones[1] and of_matrices(equation):
            lines = str(equation.source_info.traceback).splitlines()
            found.append(next((line for line in lines if "moment_jax" in line), str(equation)))
        known |= zip(equation.outvars, results(equation, ones, found), strict=True)
    return [is_one(variable) for variable in jaxpr.outvars]


def results(equation, ones, found):
    """Which results of one equation are one number."""
    name, count = equation.primitive.name, len(equation.outvars)
    values = (v if isinstance(v, tuple) else (v,) for v in equation.params.values())
    programs = [p for several in values for p in several if isinstance(p, ClosedJaxpr | Jaxpr)]
    if name == "cond":  # the first operand is the choice
        platforms = equation.params.get("branches_platforms") or ()
        pairs = zip(programs, platforms, strict=False)
        here = [branch for branch, names in pairs if "cpu" in (names or ())]
        each = [walk(branch, ones[1:], found) for branch in here or programs]
        return [any(branches) for branches in zip(*each, strict=True)]
    if name in ("materialize", "scan", "while"):  # operands and results of loops are in memory
        for program in programs:
            walk(program, [False] * len(program.jaxpr.invars), found)
        return [False] * count
    for program in programs:
        jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
        if len(jaxpr.invars) == len(ones):
            return walk(program, ones, found)
    return [bool(ones) and all(ones)] * count


def of_matrices(product):
    """Whether no side is a vector, which the faulty fusions exclude."""
    (contracted, own), (batch, own_batch) = product.params["dimension_numbers"]
    left, right = (variable.aval.shape for variable in product.invars)
    rows = [n for i, n in enumerate(left) if i not in (*contracted, *batch)]
    columns = [n for i, n in enumerate(right) if i not in (*own, *own_batch)]
    return all(np.prod(sizes) > 1 for sizes in (rows, columns, [right[i] for i in own]))


def constant(value):
    if jax.dtypes.issubdtype(getattr(value, "dtype", np.float64), jax.dtypes.extended):
        return False
    array = np.asarray(value)
    return array.size > 0 and bool(np.all(array == array.ravel()[0]))


def test_the_search_finds_the_fault():
    x = jnp.ones((4, 4))
    assert faulty_products(lambda x: jnp.sum(x @ jnp.full((4, 4), 0.5) ** 2), x)
    assert faulty_products(lambda x: jnp.sum(x @ jnp.full((4, 4), x[0, 0])), x)
    assert not faulty_products(lambda x: jnp.sum(jnp.full((4, 4), 0.5) @ x), x)


@functools.cache
def example_block(features, family):
    with jax.ensure_compile_time_eval():
        return random_block(jax.random.key(0), features, 2 * features, family=family)


def transforms(of):
    """Every public transform of a sequence x and a block of constant parameters."""

    def layer(name, x, block):
        cov = of.zeros(x.shape)
        noisy = cov if name in ("dense", "cross_attention") else of.independent(0.01 + 0 * x)
        table, square = block.attention.query.kernel, of.zeros((x.shape[1], x.shape[1]))
        return LAYERS[name](x, noisy, Given(block, (table.mean, square), (x, cov)))

    def embedding(x, block):
        return mj.embedding(jnp.arange(len(x)) % x.shape[1], block.attention.query.kernel, of)

    def decoder_block(x, block):
        cov = of.zeros(x.shape)
        return mj.decoder_block(x, cov, x, cov, decoder_of(block), num_heads=2)

    def values_alone(x, block):
        """Attention whose values alone are random, of a batch."""
        point, random = mj.posterior.Point(0.1 + 0 * x.T @ x), block.attention.value.kernel
        params = mj.AttentionParams(*map(mj.DenseParams, (point, point, random, point)))
        return jax.vmap(lambda x: mj.attention(x, of.zeros(x.shape), params, num_heads=2))(x[None])

    def likelihood(x, block):
        kernel = mj.DenseParams(block.attention.query.kernel)
        hidden = mj.Moments(*mj.dense(x, of.zeros(x.shape), kernel))
        given = hidden.mean, hidden.features
        return mj.objectives.expected_log_likelihood(mj.Gaussian(0.5), x, *given)

    def curvature(x, block):
        """Second derivatives by the one mean and the one variance of a kernel."""

        def total(theta):
            kernel = mj.posterior.Factorized(*(jnp.full((x.shape[1],) * 2, y) for y in theta))
            mean, cov = mj.dense(x, of.zeros(x.shape), mj.DenseParams(kernel))
            return jnp.sum(mean) ** 2 + jnp.sum(cov.variance() ** 2)

        return jax.hessian(total)(jnp.full(2, x[0, 0]))

    layers = {n: functools.partial(layer, n) for n in LAYERS if n not in WITHIN_A_DECODER}
    others = embedding, decoder_block, values_alone, likelihood, curvature
    return layers | {f.__name__: f for f in others}


POINT, FACTORIZED, *OTHERS = KERNEL_FAMILIES
WITHIN_A_DECODER = {"cross_attention", "feed_forward"}
CASES = [(name, FACTORIZED) for name in transforms(mj.Diagonal)]
CASES += [(name, family) for name in ("dense", "embedding") for family in (POINT, *OTHERS)]


@quickly(mj.Separable)
@pytest.mark.parametrize(("name", "family"), CASES)
def test_no_right_operand_is_one_number(structure, name, family):
    """In the gradient, which has the forward pass, with parameters made inside `jit`."""

    def total(x):
        block = jax.tree.map(lambda a: jnp.full(a.shape, 0.01), example_block(6, family))
        return sum(map(jnp.sum, jax.tree.leaves(transforms(structure)[name](x, block))))

    assert faulty_products(jax.grad(total), jnp.ones((5, 6))) == []
