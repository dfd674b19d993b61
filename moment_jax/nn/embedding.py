"""`Embedding` and `LearnedPositions`: tables of random rows."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moment_jax.covariance import Certain, Covariance
from moment_jax.layers import DenseParams, dense, embedding
from moment_jax.layers.embedding import check_known_ids
from moment_jax.nn.base import BayesianModule, Moments, check_sequences
from moment_jax.nn.conversion import check_kind, set_mean
from moment_jax.nn.plain import PlainPositions, plain_embed
from moment_jax.nn.settings import Settings
from moment_jax.posterior import Point


class Embedding(BayesianModule):
    """A table of random rows, one for each token id.

    `attend` returns logits from the transposed table (tied weights). It assumes that its input is
    independent of the table, even though the sequence started from the table's rows.

    Args:
      num_embeddings: V, the size of the vocabulary.
      num_features: D.

    Raises:
      ValueError: if a size is below one.

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> from flax import nnx
    >>> table = mj.nn.Embedding(10, 4, rngs=nnx.Rngs(0))
    >>> mean, cov = table(jnp.array([[1, 2, 1], [0, 9, 3]]))
    >>> logits, logit_cov = table.attend(mean, cov)
    >>> mean.shape, logits.shape
    ((2, 3, 4), (2, 3, 10))
    """

    parts = ("table",)
    params_type = staticmethod(lambda table: table)
    flax_type = nnx.Embed

    def __init__(
        self, num_embeddings: int, num_features: int, *, rngs: nnx.Rngs, **settings: Any
    ) -> None:
        if num_embeddings < 1 or num_features < 1:
            raise ValueError(
                "`Embedding` needs num_embeddings >= 1 and num_features >= 1. Got "
                f"{num_embeddings} and {num_features}."
            )
        self.settings = Settings.of(self, settings)
        self.table = self.settings.table((num_embeddings, num_features), rngs)

    @classmethod
    def options_of(cls, network: nnx.Embed, settings: dict[str, Any]) -> dict[str, Any]:
        return {"num_embeddings": network.num_embeddings, "num_features": network.features}

    def load(self, network: nnx.Embed) -> None:
        check_kind(type(self), network)
        set_mean(self.table, network.embedding[...])

    def network(self, params: Array) -> nnx.Embed:
        return plain_embed(params)

    def __call__(self, ids: Array) -> Moments:
        """Moments of the tokens' rows, (..., T) integers -> (..., T, D).

        Ids out of range raise an error outside `jit`, and give NaN inside.
        """
        ids = jnp.asarray(ids)
        table = self.params
        structure = Certain if isinstance(table, Point) else self.settings.structure
        check_known_ids("Embedding", ids, table.shape[0])

        def look_up(ids: Array) -> Moments:
            if ids.ndim > 1:
                return jax.vmap(look_up)(ids)
            return embedding(ids, table, structure, landmarks=self.settings.landmarks)

        return look_up(ids)

    def attend(self, mean: Array, cov: Covariance | None = None) -> Moments:
        """Moments of `x @ table.T`, (..., T, D) -> (..., T, V); cov None where x is certain."""
        tied = DenseParams(self.params.transpose())
        return self._over_batch(lambda m, c: dense(m, self._begun(c, tied), tied), (mean, cov))


class LearnedPositions(BayesianModule):
    """Adds a random vector to every position of a sequence.

    Args:
      max_length: the longest sequence.
      num_features: D.

    >>> positions = LearnedPositions(16, 4, rngs=nnx.Rngs(0))
    >>> positions(jax.numpy.ones((2, 3, 4)))[0].shape
    (2, 3, 4)
    """

    parts = ("embedding",)
    params_type = staticmethod(lambda table: table)

    def __init__(
        self, max_length: int, num_features: int, *, rngs: nnx.Rngs, **settings: Any
    ) -> None:
        self.embedding = Embedding(max_length, num_features, rngs=rngs, **settings)
        self.settings = self.embedding.settings

    @classmethod
    def options_of(cls, network: PlainPositions, settings: dict[str, Any]) -> dict[str, Any]:
        return {"max_length": network.table.num_embeddings, "num_features": network.table.features}

    def load(self, network: PlainPositions) -> None:
        self.embedding.load(network.table)

    def network(self, params: Array) -> PlainPositions:
        return PlainPositions(plain_embed(params))

    def __call__(self, mean: Array, cov: Covariance | None = None) -> Moments:
        """Moments of the sequence with its positions, (..., T, D); cov None where it is certain.

        Raises:
          ValueError: if the sequence ends beyond the last position.
        """
        check_sequences(mean, cov)
        num_tokens, params = mean.shape[-2], self.params
        if num_tokens > params.shape[0]:
            raise ValueError(
                f"`LearnedPositions` of {params.shape[0]} places needs a sequence within them. Got "
                f"{num_tokens} tokens."
            )

        def add(mean: Array, cov: Covariance) -> Moments:
            cov = self._begun(cov, params)  # whose structure may differ from that of the settings
            ids = jnp.arange(num_tokens)
            position, noise = embedding(ids, params, type(cov), landmarks=num_tokens)
            return mean + position, cov.add(noise)

        return self._over_batch(add, (mean, cov))
