"""Public architectures: without noise the network itself, with noise the sampled networks'.

`python -m tests.propagation.test_zoo [NAME...]` prints the table, of 2,000 draws.
"""

from __future__ import annotations

import sys
import time

import jax
import pytest

import moment_jax as mj
from tests.propagation.sampled import assert_refused, beside_sampled
from tests.propagation.zoo import ZOO


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_of_a_user")
@pytest.mark.parametrize("name", ZOO)
def test_a_public_network(name):
    case = ZOO[name]
    model = case.model()
    if case.refused is not None:
        assert_refused(model, case.inputs, case.refused)
        return
    figures = beside_sampled(model, case.network(), case.inputs, 1000, case.output)
    assert figures.off < 1e-5
    assert abs(figures.ratio - 1) < 0.08
    assert figures.error < 0.08


def seconds(fn, *inputs):
    """CPU seconds of a call."""
    start = time.process_time()
    fn(*inputs)
    return time.process_time() - start


def table(names) -> None:
    print("network | no noise | sd ratio | error | mean off, sd | trace, compile | plain, CPU s")
    for name in names or ZOO:
        case = ZOO[name]
        model, network = case.model(), case.network()
        try:
            trace = seconds(jax.eval_shape, model, *case.inputs)
        except mj.PropagationError as error:
            print(f"{name} | refused: {' '.join(str(error).split())}", flush=True)
            continue
        compile = seconds(model, *case.inputs) - trace
        plain = seconds(jax.jit(lambda *x, network=network: network(*x)), *case.inputs)
        off, *others = beside_sampled(model, network, case.inputs, 2000, case.output)
        figures = " | ".join(f"{x:.3f}" for x in others)
        print(
            f"{name} | {off:.0e} | {figures} | {trace:.1f}, {compile:.1f} | {plain:.1f}", flush=True
        )


if __name__ == "__main__":
    table(sys.argv[1:])
