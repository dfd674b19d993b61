"""A Transformer over the ids of characters or words: all that precedes its head's use is shared."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from flax import nnx

import moment_jax as mj

NUM_FEATURES = 64
NUM_HEADS = 4
HIDDEN_FEATURES = 128


class TextParams(NamedTuple):
    """Beliefs about all weights, or arrays in their place."""

    embed: Any
    positions: Any
    encoder: Any
    head: Any


class PlainTextTransformer(nnx.Module):
    """The deterministic network of one draw of the weights, of Flax's own layers."""

    def __init__(
        self, embed: nnx.Embed, positions: Any, encoder: mj.nn.PlainEncoder, head: nnx.Linear
    ) -> None:
        self.embed = embed
        self.positions = positions
        self.encoder = encoder
        self.head = head


class TextTransformer(mj.nn.BayesianModule):
    """Embedding, learned positions, pre-norm encoder and linear head: all weights random.

    Subclasses name the `plain_type` of a draw, and say by `__call__` what the head sees.
    """

    plain_type: ClassVar[type[PlainTextTransformer]]

    def __init__(
        self, num_ids: int, length: int, num_outputs: int, num_blocks: int, *, rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.embed = mj.nn.Embedding(num_ids, NUM_FEATURES, rngs=rngs, **settings)
        self.positions = mj.nn.LearnedPositions(length, NUM_FEATURES, rngs=rngs, **settings)
        self.encoder = mj.nn.Encoder(
            num_blocks,
            NUM_FEATURES,
            NUM_HEADS,
            norm_first=True,
            hidden_features=HIDDEN_FEATURES,
            activation="gelu",
            rngs=rngs,
            **settings,
        )
        self.head = mj.nn.Dense(NUM_FEATURES, num_outputs, rngs=rngs, **settings)

    @property
    def params(self) -> TextParams:
        """Beliefs about all weights."""
        return TextParams(*(getattr(self, part).params for part in TextParams._fields))

    def network(self, params: TextParams) -> PlainTextTransformer:
        """The plain network with these arrays."""
        parts = zip(TextParams._fields, params, strict=True)
        return self.plain_type(*(getattr(self, name).network(part) for name, part in parts))
