"""`VisionTransformer`: images in, moments of the logits out."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moment_jax.covariance import BATCH_AXIS, Covariance, TokenBlock
from moment_jax.covariance.fields import register_fields
from moment_jax.layers import dense, mean_pool
from moment_jax.layers.params import DenseParams
from moment_jax.nn.base import BayesianModule, Moments, Stage
from moment_jax.nn.conversion import check_same, set_mean
from moment_jax.nn.encoder import Encoder
from moment_jax.nn.freezing import over_statistics
from moment_jax.nn.layers import Dense
from moment_jax.nn.plain import PlainVisionTransformer, plain_linear
from moment_jax.nn.settings import Settings
from moment_jax.nn.stack import block_options
from moment_jax.posterior import Point, Posterior, sample_params


@dataclasses.dataclass(frozen=True)
class Patches:
    """Cuts images into the tokens of a sequence, patch by patch in rows.

    Integers become float32 without scaling: divide uint8 by 255 for numbers up to one.

    Args:
      size: height and width of a patch.
      channels: number of channels; images of one channel may omit the axis.
    """

    size: int
    channels: int = 1

    def count(self, name: str, image_size: int) -> int:
        """The number of tokens of a square image; ValueError unless patches divide it."""
        if self.size < 1 or image_size < 1 or image_size % self.size:
            raise ValueError(
                f"`{name}` needs patch_size to divide image_size. Got {self.size} and {image_size}."
            )
        return (image_size // self.size) ** 2

    def __call__(self, images: Array) -> Array:
        """(..., height, width[, channels]) -> (..., tokens, size * size * channels)."""
        if not hasattr(images, "ndim") or images.ndim < 2:
            raise ValueError(
                "Patches need images (..., height, width[, channels]) as an array. Got "
                f"{getattr(images, 'shape', type(images).__name__)}. Use jnp.asarray(images)."
            )
        if not jnp.issubdtype(images.dtype, jnp.floating):
            images = images.astype(jnp.float32)
        if self.channels == 1 and (images.ndim < 3 or images.shape[-1] != 1):
            images = images[..., None]
        *batch, height, width, channels = images.shape
        if height % self.size or width % self.size or channels != self.channels:
            raise ValueError(
                f"Patches of {self.size} x {self.size} need images (..., height, width, "
                f"{self.channels}) with sides divisible by {self.size}. Got {tuple(images.shape)}."
            )
        rows, columns = height // self.size, width // self.size
        cut = images.reshape(*batch, rows, self.size, columns, self.size, channels)
        cut = jnp.moveaxis(cut, -4, -3)
        return cut.reshape(*batch, rows * columns, self.size * self.size * channels)


@register_fields
@dataclasses.dataclass(frozen=True)
class VisionTransformerParams:
    """Beliefs about a vision Transformer."""

    embed: DenseParams
    position: Posterior
    encoder: Any
    head: DenseParams


class VisionTransformer(BayesianModule):
    """Patches -> dense embedding + learned positions -> encoder -> mean over tokens -> linear head.

    All weights are random, including the positions. The head sees each image's own feature covariance,
    so the logits' covariance between classes is kept, whatever the structure of the encoder.

    Args:
      image_size: height and width of the images.
      patch_size: height and width of a patch, a divisor of image_size.
      num_classes: C.
      channels: channels of the images.
      settings: these and the other arguments are those of `Encoder`.

    Raises:
      ValueError: if patches do not divide the image or heads do not divide the features.
    """

    parts = ("embed", "encoder", "head")

    def __init__(
        self,
        *,
        image_size: int,
        patch_size: int,
        num_classes: int,
        channels: int = 1,
        num_features: int = 64,
        num_heads: int = 4,
        num_blocks: int = 2,
        norm_first: bool = True,
        hidden_features: int | None = None,
        activation: str = "gelu",
        epsilon: float = 1e-6,
        remat: bool = False,
        rngs: nnx.Rngs,
        **settings: Any,
    ) -> None:
        self.settings = Settings.of(self, settings)
        self.patches = Patches(patch_size, channels)
        num_tokens = self.patches.count("VisionTransformer", image_size)
        self.embed = Dense(patch_size**2 * channels, num_features, rngs=rngs, **settings)
        shape = (num_tokens, num_features)
        start = 0.02 * jax.random.normal(rngs.params(), shape, self.settings.dtype)
        self.position = self.settings.entries(start, num_features)
        self.encoder = Encoder(
            num_blocks,
            num_features,
            num_heads,
            norm_first=norm_first,
            hidden_features=hidden_features,
            activation=activation,
            epsilon=epsilon,
            remat=remat,
            rngs=rngs,
            **settings,
        )
        self.head = Dense(num_features, num_classes, rngs=rngs, **settings)

    @classmethod
    def options_of(
        cls, network: PlainVisionTransformer, settings: dict[str, Any]
    ) -> dict[str, Any]:
        """See `BayesianModule`."""
        patches = network.patches
        if not isinstance(patches, Patches):
            raise TypeError(
                "`VisionTransformer.from_deterministic` needs a network whose `patches` is a "
                f"`mj.nn.Patches`. Got {type(patches).__name__}."
            )
        side = round(network.position.shape[0] ** 0.5)
        return {
            "image_size": side * patches.size,
            "patch_size": patches.size,
            "num_classes": network.head.out_features,
            "channels": patches.channels,
            "num_blocks": len(network.encoder.blocks),
            "rngs": nnx.Rngs(0),
            **block_options(cls, network.encoder.blocks[0], settings),
        }

    def load(self, network: PlainVisionTransformer) -> None:
        """Take the weights of a plain network of the same sizes as means."""
        check_same("VisionTransformer.load", network, patches=self.patches)
        set_mean(self.position, network.position[...])
        super().load(network)

    @property
    def params(self) -> VisionTransformerParams:
        """Beliefs about all weights."""
        return VisionTransformerParams(
            self.embed.params, self.position.posterior, self.encoder.params, self.head.params
        )

    def network(self, params: Any) -> PlainVisionTransformer:
        """The plain network with these arrays."""
        return PlainVisionTransformer(
            plain_linear(params.embed),
            params.position,
            self.encoder.network(params.encoder),
            plain_linear(params.head),
            self.patches,
        )

    def __call__(self, images: Array) -> tuple[Array, Array]:
        """Mean (..., C) and covariance (..., C, C) of the logits of images, which are certain.

        Images are (..., height, width), or (..., height, width, channels).
        """
        params = self.params
        tokens = self.patches(images)
        batch = tokens.shape[:-2]
        flat = tokens.reshape(math.prod(batch), *tokens.shape[-2:])

        def run(layer: Callable[..., Any]) -> Any:
            return jax.vmap(layer, axis_name=BATCH_AXIS)(flat)

        mean, cov = over_statistics(self, lambda x: self._moments(x, params), run, num_axes=1)
        return mean.reshape(*batch, *mean.shape[1:]), cov.reshape(*batch, *cov.shape[1:])

    @property
    def stages(self) -> list[Stage]:
        """Embedding, the encoder's stages, and the head on the mean over the tokens."""
        params = self.params

        def embed(key: Array, x: Array) -> Array:
            layer, position = sample_params((params.embed, params.position), key)
            return plain_linear(layer)(x) + position

        def classify(key: Array, x: Array) -> Array:
            return plain_linear(sample_params(params.head, key))(x.mean(axis=0, keepdims=True))

        return [
            Stage("embedding", lambda mean, cov: self._embedded(mean, cov, params), embed),
            *self.encoder.stages,
            Stage("head", lambda mean, cov: self._logits(mean, cov, params), classify),
        ]

    def sequence(self, x: Array) -> Array:
        """The patches of one image."""
        return self.patches(x)

    def _moments(self, tokens: Array, params: VisionTransformerParams) -> tuple[Array, Array]:
        start = self.settings.structure.zeros((tokens.shape[0], tokens.shape[1]), tokens.dtype)
        mean, cov = self._embedded(tokens, start, params)
        mean, cov = self.encoder.moments(mean, cov, params.encoder, None)
        logits, logit_cov = self._logits(mean, cov, params)
        return logits[0], logit_cov.blocks[0]

    def _embedded(self, mean: Array, cov: Covariance, params: VisionTransformerParams) -> Moments:
        mean, cov = dense(mean, cov, params.embed)
        mean = mean + params.position.mean
        if not isinstance(params.position, Point):
            cov = cov.add(type(cov).independent(params.position.marginal_variance()))
        return mean, cov

    def _logits(
        self, mean: Array, cov: Covariance, params: VisionTransformerParams
    ) -> tuple[Array, TokenBlock]:
        pooled, pooled_cov = mean_pool(mean, cov)
        return dense(pooled, TokenBlock(pooled_cov.token_blocks()), params.head)
