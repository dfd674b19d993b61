"""Settings of every test: float64 is available, and ranks are never promoted silently."""

import os
import shutil
import tempfile

import hypothesis
import jax
import pytest

jax.config.update("jax_enable_x64", True)
# The programs here are many and tiny: compiling them is what costs.
jax.config.update("jax_disable_most_optimizations", True)
# jax 0.10, the last for Python 3.11, has two emitters of fused loops; the older one compiles in half the
# time, without which all of `.ci/run` is longer than the time there is. Newer releases, as in its second
# run, have the newer one alone, which is the one that users have.
OLDER_EMITTER = jax.__version_info__[:2] == (0, 10)
if OLDER_EMITTER:
    os.environ["XLA_FLAGS"] = (
        f"--xla_cpu_use_fusion_emitters=false {os.environ.get('XLA_FLAGS', '')}"
    )

_CACHE = "JAX_COMPILATION_CACHE_DIR"


def pytest_configure(config):
    """One folder of compiled programs for all processes of a run, and gone with it.

    Modules, workers and subprocesses compile much that is alike. A folder that the caller names stays.
    """
    if _CACHE not in os.environ:
        folder = os.environ[_CACHE] = tempfile.mkdtemp(prefix="moment_jax_programs_")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.add_cleanup(lambda: os.environ.pop(_CACHE, None))
    # Of the smallest programs too: what they cost is to be compiled at all.
    settings = {"cache_min_compile_time_secs": 0, "cache_min_entry_size_bytes": -1}
    for name, value in settings.items():
        os.environ[f"JAX_PERSISTENT_{name}".upper()] = str(value)
        jax.config.update(f"jax_persistent_{name}", value)
    jax.config.update("jax_compilation_cache_dir", os.environ[_CACHE])


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
