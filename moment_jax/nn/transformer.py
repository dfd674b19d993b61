"""`Transformer`, encoder and decoder; `TokenTransformer`, from vectors to a vector at every token."""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.layers.seen import look_at_valid
from moment_jax.nn.base import Composite, Moments, Stage, check_sequences
from moment_jax.nn.conversion import set_mean
from moment_jax.nn.decoder import Decoder
from moment_jax.nn.embedding import LearnedPositions
from moment_jax.nn.encoder import Encoder
from moment_jax.nn.layers import Dense
from moment_jax.nn.plain import PlainTokenTransformer, PlainTransformer


class Transformer(Composite):
    """An encoder of the source and a decoder of the target, between your own embeddings and head.

    The decoder's memory is the encoder's output, mean and covariance. A causal decoder needs a mask,
    `jnp.tril(jnp.ones((T, T), bool))`.

    Assumes that the decoder's sequence and its memory are independent: see `mj.decoder_block`.

    Args:
      num_encoder_blocks: L.
      num_decoder_blocks: blocks of the decoder; as many as the encoder has where None.
      options: these and the other arguments are those of `Encoder` and `Decoder`.

    Source: Transformer derivation, section 1.1.

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> from flax import nnx
    >>> model = mj.nn.Transformer(4, 2, 1, hidden_features=4, structure=mj.Diagonal, rngs=nnx.Rngs(0))
    >>> source, target = jnp.ones((5, 4)), jnp.ones((3, 4))
    >>> mean, cov = model(source, target, mask=jnp.tril(jnp.ones((3, 3), bool)))
    >>> mean.shape, cov.shape
    ((3, 4), (3, 4))
    """

    parts = ("encoder", "decoder")
    plain_type = PlainTransformer

    def __init__(
        self,
        num_features: int,
        num_heads: int,
        num_encoder_blocks: int,
        num_decoder_blocks: int | None = None,
        *,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        if num_decoder_blocks is None:
            num_decoder_blocks = num_encoder_blocks
        size = num_features, num_heads
        self.encoder = Encoder(num_encoder_blocks, *size, rngs=rngs, **options)
        self.decoder = Decoder(num_decoder_blocks, *size, rngs=rngs, **options)
        self.settings = self.encoder.settings

    def __call__(
        self,
        source: Array,
        target: Array,
        source_cov: Covariance | None = None,
        target_cov: Covariance | None = None,
        source_mask: Array | None = None,
        mask: Array | None = None,
        memory_mask: Array | None = None,
        source_valid: Array | None = None,
        target_valid: Array | None = None,
    ) -> Moments:
        """Moments of the decoder's output, (..., T, D).

        Args:
          source: mean of the embedded source, (..., S, D).
          target: mean of the embedded target, (..., T, D).
          source_cov: covariance with the same leading axes; None where the source is certain.
          target_cov: the same for the target.
          source_mask: (S, S) or (H, S, S) boolean, of the encoder's attention, the same for the batch.
          mask: (T, T) or (H, T, T), of the decoder's self-attention.
          memory_mask: (T, S) or (H, T, S), of its attention to the memory.
          source_valid: (..., S) boolean, False for padding; None for no padding.
          target_valid: (..., T), the same for the target.
        """
        encoder, decoder = self.params.values()

        def moments(source: Any, cov: Any, known: Any, mean: Any, own: Any, valid: Any) -> Any:
            memory = self.encoder.moments(source, cov, encoder, source_mask, known)
            masks = look_at_valid(mask, valid), look_at_valid(memory_mask, known)
            return self.decoder.moments((mean, own), memory, decoder, masks)

        given = (source, source_cov, source_valid), (target, target_cov, target_valid)
        return self._over_batch(moments, *given)


class TokenTransformer(Composite):
    """Dense embedding + learned positions -> encoder -> dense head at every token.

    For one-hot inputs the embedding's kernel is a table of random rows. Positions begin as large as
    tokens: with Flax's customary 0.02 a small network is slow to tell positions apart.

    Args:
      num_tokens: T.
      in_features: numbers at every token of the input.
      out_features: numbers at every token of the output.
      options: these and the other arguments are those of `Encoder`.

    Raises:
      ValueError: if a size is below one, the heads do not divide the features, or the activation is
        unknown.
    """

    parts = ("embed", "positions", "encoder", "head")
    plain_type = PlainTokenTransformer

    def __init__(
        self,
        num_tokens: int,
        in_features: int,
        out_features: int,
        *,
        num_blocks: int = 1,
        num_features: int = 32,
        num_heads: int = 4,
        norm_first: bool = True,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        options = {"norm_first": norm_first, **options}
        self.encoder = Encoder(num_blocks, num_features, num_heads, rngs=rngs, **options)
        self.settings = self.encoder.settings
        settings = dataclasses.asdict(self.settings)
        self.embed = Dense(in_features, num_features, rngs=rngs, **settings)
        self.positions = LearnedPositions(num_tokens, num_features, rngs=rngs, **settings)
        start = jax.random.normal(rngs.params(), (num_tokens, num_features), self.settings.dtype)
        set_mean(self.positions.embedding.table, start)
        self.head = Dense(num_features, out_features, rngs=rngs, **settings)

    @property
    def stages(self) -> list[Stage]:
        """Embedding, positions, those of the encoder, and the head."""
        before = self.embed.stage("embedding"), self.positions.stage("positions")
        return [*before, *self.encoder.stages, self.head.stage("head")]

    def __call__(self, mean: Array, cov: Covariance | None = None) -> Moments:
        """Moments of the output: (..., T, in) -> (..., T, out); cov None where x is certain."""
        check_sequences(mean, cov)
        size = (self.positions.params.shape[0], self.embed.params.kernel.shape[0])
        if tuple(mean.shape[-2:]) != size:
            raise ValueError(
                f"`TokenTransformer` needs sequences of shape (..., T, in), (T, in) == {size}. Got "
                f"{tuple(mean.shape)}."
            )
        return self.head(*self.encoder(*self.positions(*self.embed(mean, cov))))
