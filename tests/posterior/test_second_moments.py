"""`from_second_moments` refuses the state of another optimiser, or of other parameters."""

import jax.numpy as jnp
import optax
import pytest

from moment_jax.posterior import from_second_moments

PARAMS = {"w": jnp.ones(2)}


@pytest.mark.parametrize(
    ("state", "size", "words"),
    [
        ((), 1, r"one Adam.*shapes \[{'w': \(2,\)}\]"),
        (optax.adam(1.0).init({"w": jnp.ones(3)}), 1, r"\(2,\).*\(3,\)"),
        (optax.adam(1.0).init(PARAMS), 0, "positive sizes"),
    ],
)
def test_bad_input(state, size, words):
    """Its docstring has the variance."""
    with pytest.raises(ValueError, match=words):
        from_second_moments(PARAMS, state, dataset_size=size, batch_size=1)
