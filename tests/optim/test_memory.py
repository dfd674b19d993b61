"""What the compiled programs hold: no Fisher matrix, and no Gram matrix of all rows."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from tests.optim.networks import CLASSES, classify

optim = mj.optim
ARRAY = re.compile(r"[a-z]+[0-9]+\[([0-9,]+)\]")


class Tokens(nnx.Module):
    """A dense layer for every token, and one for their mean."""

    def __init__(self, num_inputs, num_features):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(num_inputs, num_features, rngs=rngs)
        self.out = nnx.Linear(num_features, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)).mean(axis=1))


def largest_array(make, reading, n, tokens, num_inputs, num_features):
    """Entries of the largest array in the compiled update."""
    model = Tokens(num_inputs, num_features)
    optimizer = nnx.Optimizer(model, make(0.1, kl_bound=1e-3), wrt=nnx.Param)
    compute = optim.value_grad_and_factors(classify, reading=reading)

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


@pytest.mark.parametrize(
    ("make", "reading"),
    [
        (optim.kfac, optim.KroneckerExpand()),
        (optim.cg_fac, optim.KroneckerExpand()),
        (partial(optim.cg_fac, decay=None), optim.PerSample()),
        (partial(optim.cg_fac, decay=None), optim.PerToken()),
    ],
    ids=["kfac", "cg_fac", "per sample", "per token"],
)
def test_nothing_is_squared(make, reading):
    wide = {"n": 2, "tokens": 3, "num_inputs": 40, "num_features": 30}
    by_row = 6 if isinstance(reading, optim.PerToken) else 2
    largest = largest_array(make, reading, **wide)
    assert (
        40 * 30 <= largest <= max(41**2, by_row * 41 * 30)
    )  # the kernel is seen, (41 * 30)^2 is not
    many = {"n": 16, "tokens": 24, "num_inputs": 6, "num_features": 4}
    assert largest_array(make, reading, **many) <= 384 * 7 * 4  # not 384^2
