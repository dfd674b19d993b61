"""`VisionTransformer`: images in, moments of the logits out."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moment_jax.covariance import Covariance, Full
from moment_jax.covariance.fields import register_fields
from moment_jax.layers import dense, mean_pool
from moment_jax.layers.params import DenseParams
from moment_jax.nn.base import BayesianModule, Moments, Stage
from moment_jax.nn.encoder import Encoder, EncoderBlock
from moment_jax.nn.layers import Dense
from moment_jax.nn.plain import PlainVisionTransformer, plain_linear
from moment_jax.nn.settings import Settings
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
        return jnp.moveaxis(cut, -4, -3).reshape(*batch, rows * columns, self.size**2 * channels)


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
      options: these and the other arguments are those of `Encoder`.

    Raises:
      ValueError: if patches do not divide the image or heads do not divide the features.
    """

    parts = ("embed", "position", "encoder", "head")
    params_type = VisionTransformerParams

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
        activation: str = "gelu",
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        self.settings = Settings.of(self, options, Encoder, EncoderBlock)
        settings = dataclasses.asdict(self.settings)
        self.patches = Patches(patch_size, channels)
        num_tokens = self.patches.count("VisionTransformer", image_size)
        self.embed = Dense(patch_size**2 * channels, num_features, rngs=rngs, **settings)
        shape = (num_tokens, num_features)
        start = 0.02 * jax.random.normal(rngs.params(), shape, self.settings.dtype)
        self.position = self.settings.entries(start, num_features)
        options = {"norm_first": norm_first, "activation": activation, **options}
        self.encoder = Encoder(num_blocks, num_features, num_heads, rngs=rngs, **options)
        self.head = Dense(num_features, num_classes, rngs=rngs, **settings)

    @classmethod
    def options_of(
        cls, network: PlainVisionTransformer, settings: dict[str, Any]
    ) -> dict[str, Any]:
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
            **Encoder.options_of(network.encoder, settings),
        }

    @property
    def compared(self) -> dict[str, Any]:
        return {"patches": self.patches}

    def network(self, params: Any) -> PlainVisionTransformer:
        embed, head = plain_linear(params.embed), plain_linear(params.head)
        encoder = self.encoder.network(params.encoder)
        return PlainVisionTransformer(embed, params.position, encoder, head, self.patches)

    def __call__(self, images: Array) -> tuple[Array, Array]:
        """Mean (..., C) and covariance (..., C, C) of the logits of images, which are certain.

        Images are (..., height, width), or (..., height, width, channels).
        """
        params = self.params

        def moments(mean: Array, cov: Covariance) -> tuple[Array, Array]:
            mean, cov = self._embedded(mean, cov, params)
            mean, cov = self.encoder.moments(mean, cov, params.encoder, None)
            logits, logit_cov = self._logits(mean, cov, params)
            return logits[0], logit_cov.cov[0, :, 0]

        return self._over_batch(moments, (self.patches(images), None))

    @property
    def stages(self) -> list[Stage]:
        """Embedding, the encoder's stages, and the head on the mean over the tokens."""
        params = self.params

        def embed(key: Array, x: Array) -> Array:
            layer, position = sample_params((params.embed, params.position), key)
            return plain_linear(layer)(x) + position

        def classify(key: Array, x: Array) -> Array:
            return jnp.asarray(self.head.sample(key)(x.mean(axis=0, keepdims=True)))

        first = Stage("embedding", lambda mean, cov: self._embedded(mean, cov, params), embed)
        last = Stage("head", lambda mean, cov: self._logits(mean, cov, params), classify)
        return [first, *self.encoder.stages, last]

    def sequence(self, x: Array) -> Array:
        """The patches of one image."""
        return self.patches(x)

    def _embedded(self, mean: Array, cov: Covariance, params: VisionTransformerParams) -> Moments:
        mean, cov = dense(mean, self._begun(cov, params.embed), params.embed)
        mean, cov = mean + params.position.mean, self._begun(cov, params.position)
        if not isinstance(params.position, Point):
            cov = cov.add(type(cov).independent(params.position.marginal_variance()))
        return mean, cov

    def _logits(
        self, mean: Array, cov: Covariance, params: VisionTransformerParams
    ) -> tuple[Array, Full]:
        pooled, pooled_cov = mean_pool(mean, cov)
        return dense(pooled, Full(pooled_cov.token_blocks()[:, :, None]), params.head)
