"""A Transformer over the ids of characters or words, for the language and intents experiments."""

from typing import Any

from flax import nnx

import moment_jax as mj

NUM_FEATURES = 64
NUM_HEADS = 4
HIDDEN_FEATURES = 128


class PlainTextTransformer(nnx.Module):
    """The deterministic network of one draw of the weights, of Flax's own layers."""

    def __init__(
        self, embed: nnx.Embed, positions: Any, encoder: mj.nn.PlainEncoder, head: nnx.Linear
    ) -> None:
        self.embed = embed
        self.positions = positions
        self.encoder = encoder
        self.head = head


class TextTransformer(mj.nn.Composite):
    """Embedding, learned positions, pre-norm encoder and linear head: all weights random.

    Subclasses name the `plain_type` of a draw, and say by `__call__` what the head sees.
    """

    parts = ("embed", "positions", "encoder", "head")

    def __init__(
        self, num_ids: int, length: int, num_outputs: int, num_blocks: int, *, rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.embed = mj.nn.Embedding(num_ids, NUM_FEATURES, rngs=rngs, **settings)
        self.positions = mj.nn.LearnedPositions(length, NUM_FEATURES, rngs=rngs, **settings)
        blocks = {"hidden_features": HIDDEN_FEATURES, "norm_first": True, "activation": "gelu"}
        self.encoder = mj.nn.Encoder(
            num_blocks, NUM_FEATURES, NUM_HEADS, rngs=rngs, **settings | blocks
        )
        self.head = mj.nn.Dense(NUM_FEATURES, num_outputs, rngs=rngs, **settings)
