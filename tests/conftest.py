"""Settings of every test: float64 is available, and ranks are never promoted silently."""

import hypothesis
import jax
import pytest

jax.config.update("jax_enable_x64", True)
# The programs here are many and tiny: compiling them is what costs.
jax.config.update("jax_disable_most_optimizations", True)

# The same examples in every run. `--hypothesis-profile=long` draws more.
drawn = {"derandomize": True, "deadline": None, "database": None}
hypothesis.settings.register_profile("suite", max_examples=100, **drawn)
hypothesis.settings.register_profile("long", max_examples=2000, **drawn)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="module", autouse=True)
def _strict_ranks():
    """Below tests only: the guides run as a user's code does."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def ranks_of_a_user():
    """Free broadcasting, which Flax's layers and users' models need."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module", autouse=True)
def _let_go_of_compiled_programs():
    """After some thousand compiled programs in one process its compiler has been seen to crash."""
    yield
    jax.clear_caches()
