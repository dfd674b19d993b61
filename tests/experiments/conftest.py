"""What tests of experiments share."""

import jax
import pytest


@pytest.fixture
def settings_of_a_user():
    """Float32 and free broadcasting, where the tests of the library have neither."""
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        yield
