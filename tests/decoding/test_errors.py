"""What the decoders refuse, while tracing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.covariance import Diagonal
from moment_jax.decoding import beam_search, greedy, sample

V, ROWS = 3, 2
LOGITS = jnp.zeros((ROWS, V))
TOKENS, STATE = jnp.zeros(ROWS, int), jnp.zeros((ROWS, 1))


def flat(state, tokens):
    mean = jnp.zeros((len(tokens), V))
    return mean, mean, state


DECODERS = {
    "greedy": partial(greedy, step=flat, state=STATE, first_tokens=TOKENS, length=2),
    "sample": partial(
        sample, jax.random.key(0), step=flat, state=STATE, first_tokens=TOKENS, length=2
    ),
    "beam_search": partial(
        beam_search, step=flat, state=STATE[:1], first_token=0, length=2, num_beams=ROWS
    ),
}


def returns(*results):
    return {"step": lambda state, tokens: results}


BAD = {
    "length": ({"length": 0}, ValueError, "length >= 1"),
    "traced length": ({"length": 1.5}, TypeError, "Python int"),
    "end": ({"end": V}, ValueError, "0 to 2"),
    "negative end": ({"end": -1}, ValueError, "end >= 0"),
    "state": ({"state": {"a": jnp.zeros((3, 1))}}, ValueError, r"state\['a'\]"),
    "scalar state": ({"state": jnp.zeros(())}, ValueError, "leading axis of"),
    "points": ({"num_points": 8}, ValueError, "num_points >= 12"),
    "two results": (returns(STATE, STATE), TypeError, "tuple of 2"),
    "mean": (returns(LOGITS[:1], STATE, STATE), ValueError, r"\(2, V\)"),
    "integers": (returns(LOGITS.astype(int), LOGITS, STATE), TypeError, "floating"),
    "cov": (returns(LOGITS, LOGITS[:, :2], STATE), ValueError, "variances"),
    "structure": (returns(LOGITS, Diagonal(LOGITS), STATE), TypeError, "Diagonal.*variance"),
    "other state": (returns(LOGITS, LOGITS, (STATE, STATE)), ValueError, "same structure"),
    "growing state": (returns(LOGITS, LOGITS, LOGITS), ValueError, "final size"),
}
FIRST_TOKENS = {
    "float tokens": ({"first_tokens": jnp.zeros(2)}, TypeError, "integer tokens"),
    "one token": ({"first_tokens": jnp.int32(0)}, ValueError, r"tokens\[None\]"),
}
ALL = [(decoder, *case) for decoder in DECODERS for case in BAD.values()]
ALL += [(decoder, *case) for decoder in ("greedy", "sample") for case in FIRST_TOKENS.values()]
ALL += [
    ("sample", {"temperature": value}, ValueError, "temperature")
    for value in (0.0, -1.0, np.inf, np.nan, np.ones(2))
]
ALL += [
    ("beam_search", *case)
    for case in (
        ({"first_token": 0.5}, TypeError, "integer tokens"),
        ({"first_token": TOKENS[:1]}, ValueError, r"jax\.vmap"),
        ({"num_beams": 0}, ValueError, "num_beams >= 1"),
        ({"num_beams": 10}, ValueError, r"3\^2 = 9"),
        ({"length_penalty": np.inf}, ValueError, "finite length_penalty"),
        ({"length_penalty": np.ones(2)}, ValueError, "scalar length_penalty"),
    )
]


@pytest.mark.parametrize(("decoder", "changes", "error", "words"), ALL)
def test_bad_input(decoder, changes, error, words):
    with pytest.raises(error, match=words):
        jax.eval_shape(lambda: DECODERS[decoder](**changes))
