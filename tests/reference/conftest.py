"""These tests compile much and run little: XLA need not optimise."""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def _quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
