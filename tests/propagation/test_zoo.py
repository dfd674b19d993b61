"""Public architectures: without noise the network itself, with noise the sampled networks'.

`python -m tests.propagation.test_zoo [NAME...]` prints the table, of 2,000 draws.
"""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.propagation.zoo import ZOO


class Row(NamedTuple):
    """A pass beside its network, and beside sampled networks."""

    off: float  # the pass at noise 1e-6 beside the network: largest difference over the mean size
    ratio: float  # of the sds at noise .1, mean over the outputs
    error: float  # mean |ratio - 1|
    shift: float  # |mean - sampled mean| in sds, mean
    trace: float  # seconds, of the pass
    compile: float
    plain: float  # to trace and compile the network


def compiled(fn, *args):
    """The program, and the seconds to trace and to compile it."""
    start = time.perf_counter()
    traced = jax.jit(fn).trace(*args)
    middle = time.perf_counter()
    program = traced.lower().compile()
    return program, middle - start, time.perf_counter() - middle


def measured(case, draws: int) -> Row:
    model, inputs, get = case.model(relative_scale=0.1), case.inputs, case.output or (lambda x: x)
    network, (graph, state) = case.network(), nnx.split(model)
    quiet = nnx.state(model.scaled(1e-5))

    def moments(state, *inputs):
        found = nnx.merge(graph, state)(*inputs)
        return found.mean, found.sd

    def sampled(state, keys, *inputs):
        one = lambda key: get(nnx.merge(graph, state).sample(key)(*inputs))  # noqa: E731
        return jax.lax.map(one, keys, batch_size=100)

    run, trace, compile = compiled(moments, state, *inputs)
    plain, *seconds = compiled(lambda *inputs: get(network(*inputs)), *inputs)
    keys = jax.random.split(jax.random.key(7), draws)
    outputs = np.asarray(jax.jit(sampled)(state, keys, *inputs), float)
    y, (certain, _), (mean, sd) = plain(*inputs), run(quiet, *inputs), run(state, *inputs)
    ratio, shift = sd / outputs.std(0), abs(mean - outputs.mean(0)) / outputs.std(0)
    off = jnp.abs(certain - y).max() / jnp.abs(y).mean()
    figures = off, ratio.mean(), jnp.abs(ratio - 1).mean(), shift.mean()
    return Row(*map(float, figures), trace, compile, sum(seconds))


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_of_a_user")
@pytest.mark.parametrize("name", ZOO)
def test_a_public_network(name):
    case = ZOO[name]
    if case.refused is not None:
        with pytest.raises(mj.PropagationError, match=case.refused):
            case.model().explain(*case.inputs)
        return
    row = measured(case, 600)
    assert row.off < 1e-5
    assert abs(row.ratio - 1) < 0.08
    assert row.error < 0.08


def table(names) -> None:
    print("network | no noise | sd ratio | error | mean | trace | compile | plain")
    for name in names or ZOO:
        try:
            row = measured(ZOO[name], 2000)
        except mj.PropagationError as error:
            print(f"{name} | refused: {' '.join(str(error).split())}", flush=True)
            continue
        a, b = f"{row.off:.0e} | {row.ratio:.3f} | {row.error:.3f} | {row.shift:.2f}", row[4:]
        print(f"{name} | {a} | {' | '.join(f'{x:.1f} s' for x in b)}", flush=True)


if __name__ == "__main__":
    table(sys.argv[1:])
