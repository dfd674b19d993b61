"""The Bayesian Transformer for intents, and the plain network of one draw."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

import moment_jax as mj
from experiments.bayesian_network import BayesianNetwork
from experiments.intents.words import PADDING
from experiments.text_network import PlainTextTransformer, TextTransformer

Array = jax.Array

RELATIVE_SCALE = 0.05


class PlainTextClassifier(PlainTextTransformer):
    """The deterministic network of one draw of the weights, of Flax's own layers."""

    def __call__(self, ids: Array) -> Array:
        """Ids (N, T) -> logits (N, C)."""
        valid = ids != PADDING
        x = self.encoder(self.positions(self.embed(ids)), valid[:, None, None, :])
        return self.head(jnp.mean(x, axis=1, where=valid[:, :, None]))


class TextClassifier(TextTransformer):
    """Embedding and positions -> pre-norm encoder -> mean over the words -> linear head.

    All weights are random; padding has no influence. The head sees each text's own feature covariance.
    """

    plain_type = PlainTextClassifier

    def __call__(self, ids: Array) -> tuple[Array, Array]:
        """Ids (N, T) -> mean (N, C) and covariance (N, C, C) of the logits."""
        valid = ids != PADDING
        mean, cov = self.encoder(*self.positions(*self.embed(ids)), valid=valid)
        return jax.vmap(self._logits)(mean, cov, valid)

    def _logits(self, mean: Array, cov: mj.Covariance, valid: Array) -> tuple[Array, Array]:
        pooled, pooled_cov = mj.mean_pool(mean, cov, valid)
        features = mj.TokenBlock(pooled_cov.token_blocks())
        logits, logit_cov = mj.dense(pooled, features, self.head.params)
        return logits[0], logit_cov.blocks[0]


@dataclasses.dataclass(frozen=True)
class TextNetwork(BayesianNetwork):
    """A text classifier without its parameters."""

    num_ids: int
    length: int
    num_classes: int

    def build(self, key: Array) -> TextClassifier:
        """A new module."""
        return TextClassifier(
            self.num_ids,
            self.length,
            self.num_classes,
            1,
            structure=mj.STRUCTURES[self.structure],
            relative_scale=RELATIVE_SCALE,
            rngs=nnx.Rngs(key),
        )
