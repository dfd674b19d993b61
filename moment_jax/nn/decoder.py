"""`DecoderBlock`, self-attention, attention to a memory and feed-forward layer; `Decoder`, a stack."""

import abc
from typing import Any

from jax import Array

from moment_jax.covariance import Certain, Covariance
from moment_jax.layers import DecoderBlockParams, decoder_block
from moment_jax.layers.seen import look_at_valid
from moment_jax.nn.base import BayesianModule, Moments
from moment_jax.nn.plain import PlainDecoder, PlainDecoderBlock
from moment_jax.nn.stack import Block, Stack

Masks = tuple[Array | None, Array | None]  # of the sequence, and of the memory


class WithMemory(BayesianModule):
    """A module that attends to a memory."""

    @abc.abstractmethod
    def moments(self, x: Moments, memory: Moments, params: Any, masks: Masks) -> Moments:
        """Moments of one sequence (T, D) with one memory (S, D); the masks include padding."""

    def __call__(
        self,
        mean: Array,
        memory_mean: Array,
        cov: Covariance | None = None,
        memory_cov: Covariance | None = None,
        mask: Array | None = None,
        memory_mask: Array | None = None,
        valid: Array | None = None,
        memory_valid: Array | None = None,
    ) -> Moments:
        """Moments of the output, (..., T, D), with a memory (..., S, D).

        Masks are as for `decoder_block`, the same for the batch; `valid` (..., T) and `memory_valid`
        (..., S) are False for padding.
        """
        params = self.params

        def run(m: Array, c: Any, v: Any, memory: Array, memory_cov: Any, w: Any) -> Moments:
            masks = look_at_valid(mask, v), look_at_valid(memory_mask, w)
            return self.moments((m, c), (memory, memory_cov), params, masks)

        return self._over_batch(run, (mean, cov, valid), (memory_mean, memory_cov, memory_valid))


class DecoderBlock(WithMemory, Block):
    """A Transformer decoder block with beliefs about all its weights.

    Arguments and errors are those of `EncoderBlock`; the memory has D features too.
    """

    parts = (*PlainDecoderBlock.attentions, *PlainDecoderBlock.norms, "hidden", "output")
    plain_type = PlainDecoderBlock
    params_type = DecoderBlockParams

    def moments(self, x: Moments, memory: Moments, params: Any, masks: Masks) -> Moments:
        mask, memory_mask = masks
        (mean, cov), (source, source_cov) = x, memory
        cov = self._begun(cov, params)
        if isinstance(cov, Certain):
            cov = self._started(type(source_cov), cov)
        elif isinstance(source_cov, Certain):
            source_cov = self._started(type(cov), source_cov)
        options = {"mask": mask, "memory_mask": memory_mask, **self.options}
        return decoder_block(mean, cov, source, source_cov, params, **options)


class Decoder(WithMemory, Stack):
    """A stack of decoder blocks with one memory; with pre-norm, a final normalisation follows.

    Assumes that the sequence and the memory are independent, in every block: see `mj.decoder_block`.

    Args:
      num_blocks: L.
      remat: as for `Encoder`.
      options: these and the other arguments are those of `DecoderBlock`.
    """

    block_type = DecoderBlock
    plain_type = PlainDecoder

    def moments(self, x: Moments, memory: Moments, params: Any, masks: Masks) -> Moments:
        def one(block: DecoderBlock, mean: Array, cov: Covariance, own: Any) -> Moments:
            return block.moments((mean, cov), memory, own, masks)

        return self._through(one, *x, params)
