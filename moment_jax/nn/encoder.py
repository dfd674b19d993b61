"""`EncoderBlock`, attention and feed-forward layer with random weights; `Encoder`, a stack."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.layers import EncoderBlockParams, NormParams, encoder_block
from moment_jax.layers.attention import attended
from moment_jax.layers.blocks import Normalization, sublayer
from moment_jax.layers.feed_forward import fed_forward
from moment_jax.layers.seen import look_at_valid
from moment_jax.nn.activations import find_activation
from moment_jax.nn.base import Moments, Stage
from moment_jax.nn.plain import PlainEncoder, PlainEncoderBlock
from moment_jax.nn.stack import Block, Stack
from moment_jax.posterior import sample_params


class EncoderBlock(Block):
    """A Transformer encoder block with beliefs about all its weights.

    Args:
      num_features: D.
      num_heads: H, a divisor of D.
      hidden_features: width of the feed-forward layer; 4 D where None.
      norm_first: pre-norm if True, post-norm (the derivation's) if False.
      activation: "relu", "gelu", "tanh" or "silu".
      epsilon: added to the variance in the normalisations.

    Raises:
      ValueError: if the heads do not divide the features, or the activation is unknown.
    """

    parts = (*PlainEncoderBlock.attentions, *PlainEncoderBlock.norms, "hidden", "output")
    plain_type = PlainEncoderBlock
    params_type = EncoderBlockParams

    @property
    def stages(self) -> list[Stage]:
        """Attention and feed-forward, each with its residual and its normalisation."""
        params, norm = self.params, Normalization(self.norm_first, self.epsilon)
        activation = find_activation(self.activation).moments
        options: Any = {"num_heads": self.num_heads, "mask": None, "order": norm.order}
        look = partial(attended, params=params.attention, **options)
        feed = partial(fed_forward, params=params.feed_forward, activation=activation)

        def stage(name: str, branch: Any, own: NormParams, drawn: Callable[..., Array]) -> Stage:
            def draw(key: Array, x: Array) -> Array:
                return drawn(self.network(sample_params(params, key)), x)

            moments = partial(sublayer, branch=branch, params=own, norm=norm)
            return Stage(name, moments, draw)

        return [
            stage("attention", look, params.norm1, PlainEncoderBlock.attend),
            stage("feed-forward", feed, params.norm2, PlainEncoderBlock.feed_forward),
        ]

    def moments(
        self, mean: Array, cov: Covariance, params: EncoderBlockParams, mask: Array | None
    ) -> Moments:
        """Moments of one sequence (T, D) with these beliefs."""
        cov = self._begun(cov, params)
        return encoder_block(mean, cov, params, mask=mask, **self.options)

    def __call__(
        self, mean: Array, cov: Covariance | None = None, mask: Array | None = None
    ) -> Moments:
        """Moments of the output, (..., T, D); mask (T, T) or (H, T, T), the same for the batch."""
        params = self.params
        return self._over_batch(lambda m, c: self.moments(m, c, params, mask), (mean, cov))


class Encoder(Stack):
    """A stack of encoder blocks; with pre-norm, a final normalisation follows.

    Args:
      num_blocks: L.
      remat: recompute each block's moments in the backward pass instead of storing them. Only the
        blocks' inputs are kept, and a training step takes about a third longer.
      options: these and the other arguments are those of `EncoderBlock`.
    """

    block_type = EncoderBlock
    plain_type = PlainEncoder

    @property
    def stages(self) -> list[Stage]:
        """The stages of all blocks, and the final normalisation."""
        each = ((i, stage) for i, block in enumerate(self.blocks) for stage in block.stages)
        stages = [stage._replace(name=f"block {i} {stage.name}") for i, stage in each]
        return stages if self.final_norm is None else [*stages, self.final_norm.stage("final norm")]

    def moments(
        self,
        mean: Array,
        cov: Covariance,
        params: Any,
        mask: Array | None,
        valid: Array | None = None,
    ) -> Moments:
        """Moments of one sequence (T, D) with these beliefs."""
        mask = look_at_valid(mask, valid)

        def one(block: EncoderBlock, mean: Array, cov: Covariance, own: Any) -> Moments:
            return block.moments(mean, cov, own, mask)

        return self._through(one, mean, cov, params)

    def __call__(
        self,
        mean: Array,
        cov: Covariance | None = None,
        mask: Array | None = None,
        valid: Array | None = None,
    ) -> Moments:
        """Moments of the output, (..., T, D).

        Args:
          mean: of the input, (..., T, D).
          cov: covariance with the same leading axes; None where the input is certain.
          mask: (T, T) or (H, T, T) boolean, True where a query may look, the same for the batch.
          valid: (..., T) boolean, False for padding; None for no padding. Padding does not change the
            moments of the other tokens.
        """
        params, given = self.params, (mean, cov, valid)
        return self._over_batch(lambda m, c, v: self.moments(m, c, params, mask, v), given)
