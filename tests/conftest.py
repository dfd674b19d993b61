"""Settings of all tests: float64 is on, and implicit rank promotion is an error."""

import gc
import os
import shutil
import tempfile

import jax
import pytest

jax.config.update("jax_enable_x64", True)
# Most of the time goes into compiling programs. These settings save two thirds of it: in one piece, and
# by XLA's older code generator, which later releases lack. `test_compiler_fault.py` has none of them.
jax.config.update("jax_disable_most_optimizations", True)
_FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]
if jax.__version_info__ < (0, 11):
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])

# Tracing allocates many long-lived objects. Collecting garbage less often saves about a tenth of the CPU
# time.
gc.set_threshold(50_000, 10, 10)

_CACHE = "JAX_COMPILATION_CACHE_DIR"


def pytest_configure(config):
    """Share a temporary cache of compiled programs among modules, workers and subprocesses.

    A folder named by the caller in the environment is kept.
    """
    if _CACHE not in os.environ:
        folder = os.environ[_CACHE] = tempfile.mkdtemp(prefix="moment_jax_programs_")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.add_cleanup(lambda: os.environ.pop(_CACHE, None))
    # Cache the smallest programs too: there are thousands.
    settings = {"cache_min_compile_time_secs": 0, "cache_min_entry_size_bytes": -1}
    for name, value in settings.items():
        os.environ[f"JAX_PERSISTENT_{name}".upper()] = str(value)
        jax.config.update(f"jax_persistent_{name}", value)
    jax.config.update("jax_compilation_cache_dir", os.environ[_CACHE])


def pytest_collection_modifyitems(config, items):
    """Examples of READMEs and docstrings are slow: they compile whole networks."""
    for item in items:
        if config.rootpath / "tests" not in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def _strict_ranks():
    """Applies below `tests` only: doctests and READMEs run with a user's settings."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def ranks_of_a_user():
    """Allow rank promotion, which Flax's layers and users' models need."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module", autouse=True)
def _drop_compiled_programs():
    """XLA has crashed after some thousand compiled programs in one process."""
    yield
    jax.clear_caches()
