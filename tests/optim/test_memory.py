"""What the compiled programs hold: no Fisher matrix, and no Gram matrix of all rows."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from tests.optim.networks import classify

optim = mj.optim
ARRAY = re.compile(r"[a-z]+[0-9]+\[([0-9,]+)\]")


def loss(model, x, labels):
    """Of a dense layer for every token; the mean of the tokens are the logits."""
    return classify(lambda x: model(x).mean(axis=1), x, labels)


def largest_array(make, reading, n, tokens, num_inputs, num_features):
    """Entries of the largest array in the compiled update."""
    model = nnx.Linear(num_inputs, num_features, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, make(0.1, kl_bound=1e-3), wrt=nnx.Param)
    compute = optim.value_grad_and_factors(loss, reading=reading)

    graph, start = nnx.split((model, optimizer))

    @jax.jit
    def update(state, x, labels):
        model, optimizer = nnx.merge(graph, state)
        _, grads, factors = compute(model, x, labels)
        optimizer.update(model, grads, factors=factors)
        return nnx.state((model, optimizer))

    x, labels = jnp.ones((n, tokens, num_inputs), jnp.float32), jnp.zeros(n, int)
    program = update.lower(start, x, labels).compile().as_text()
    return max(math.prod(map(int, found.split(","))) for found in ARRAY.findall(program))


@pytest.mark.parametrize("make", [optim.kfac, optim.cg_fac])
def test_kronecker_factors_are_not_multiplied_out(make):
    """Inputs and their ones are seen, 384 * 21; neither F, 210^2, nor the Gram matrix of rows, 384^2."""
    sizes = {"n": 16, "tokens": 24, "num_inputs": 20, "num_features": 10}
    assert 20 * 10 <= largest_array(make, optim.KroneckerExpand(), **sizes) <= 384 * 21


def test_exact_blocks_are_not_formed():
    """The kernel is seen and (41 * 30)^2 is not; the rows are, and their Gram matrix, 384^2, is not."""
    make = partial(optim.cg_fac, decay=None)
    wide = {"n": 2, "tokens": 3, "num_inputs": 40, "num_features": 30}
    assert 40 * 30 <= largest_array(make, optim.PerSample(), **wide) <= 41**2
    many = {"n": 16, "tokens": 24, "num_inputs": 6, "num_features": 4}
    assert largest_array(make, optim.PerSample(), **many) <= 384 * 7 * 4
