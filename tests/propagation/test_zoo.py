"""Public architectures: without noise the network itself, with noise the sampled networks'; those that
Hugging Face has are in `test_clients.py`.

`python -m tests.propagation.test_zoo [NAME...]` prints the table, of 2,000 draws.
"""

import sys

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


if __name__ == "__main__":
    for name in sys.argv[1:] or ZOO:
        case = ZOO[name]
        try:
            found = beside_sampled(case.model(), case.network(), case.inputs, 2000, case.output)
        except mj.PropagationError as error:
            found = f"refused: {' '.join(str(error).split())}"
        print(name, found, flush=True)
