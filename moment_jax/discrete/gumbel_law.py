"""The standard Gumbel law: draws, log density and distribution function."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array


def gumbel(key: Array, shape: Sequence[int], dtype: jnp.dtype | type = jnp.float32) -> Array:
    """Independent draws of Gumbel(0, 1).

    Both tails are exact down to probabilities of about 1e-19, as the underlying uniform variables have
    64 bits. Plain float32 uniforms would cut the tails at 1e-7, and with them every category that is
    rarer. Half-precision draws are rounded from float32.

    Args:
      key: a JAX random key.
      shape: of the result.
      dtype: a floating-point type.

    Raises:
      TypeError: if dtype is not a floating-point type.

    Source: handwritten notes, g_i ~ Gumbel.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"`gumbel` needs a floating-point dtype, such as jnp.float32. Got {jnp.dtype(dtype)}."
        )
    fine = jnp.promote_types(dtype, jnp.float32)
    return jax.random.gumbel(key, tuple(shape), fine, mode="highest").astype(dtype)


@jax.custom_jvp
def gumbel_log_density(g: Array) -> Array:
    """Log p(g) = -(g + exp(-g)), in nats, elementwise.

    It is -inf only where the exact value overflows (g < -88.7 in float32) and at g = +-inf. There the
    derivative exp(-g) - 1 is clipped to the largest number; it is never NaN.

    Source: handwritten notes, p(g) = exp(-(g + exp(-g))).

    >>> import jax.numpy as jnp
    >>> float(gumbel_log_density(jnp.array(0.0)))
    -1.0
    """
    return jnp.where(g == -jnp.inf, -jnp.inf, -(g + jnp.exp(-g)))


@gumbel_log_density.defjvp
def _gumbel_log_density_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (g,), (g_dot,) = primals, tangents
    slope = jnp.minimum(jnp.expm1(-g), jnp.finfo(g.dtype).max)
    return gumbel_log_density(g), slope * g_dot


@jax.custom_jvp
def gumbel_cdf(g: Array) -> Array:
    """P(G <= g) = exp(-exp(-g)), elementwise; its derivative is the density, finite everywhere.

    Source: handwritten notes, F(g) = exp(-exp(-g)).

    >>> import jax.numpy as jnp
    >>> gumbel_cdf(jnp.array([-1e4, 1e4])).tolist()
    [0.0, 1.0]
    """
    return jnp.exp(-jnp.exp(-g))


@gumbel_cdf.defjvp
def _gumbel_cdf_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (g,), (g_dot,) = primals, tangents
    return gumbel_cdf(g), jnp.exp(gumbel_log_density(g)) * g_dot
