"""Settings of every test: float64 is available, and ranks are never promoted silently."""

import jax
import pytest

from experiments.compiler import without_faulty_fusions

without_faulty_fusions()
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
# The programs here are many and tiny: compiling them is what costs.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module", autouse=True)
def _let_go_of_compiled_programs():
    """After some thousand compiled programs in one process its compiler has been seen to crash."""
    yield
    jax.clear_caches()
