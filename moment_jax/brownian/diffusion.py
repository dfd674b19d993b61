"""Diffusion maps: coordinates whose Euclidean distance is the diffusion distance of a random walk."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.brownian.checks import check_points, check_positive
from moment_jax.brownian.kernels import gaussian_kernel
from moment_jax.brownian.krylov import leading_eigenpairs
from moment_jax.brownian.sphere import squared_distances

NEIGHBORS = 10
"""The default bandwidth is the median distance to the neighbour of this rank."""


class DiffusionMap(NamedTuple):
    """An embedding of T points, or tokens.

    Attributes:
      coordinates: (T, count): eigenvalue^time times the eigenvectors 2, 3, ... (the first is constant).
      eigenvalues: (count,), one per coordinate, by decreasing modulus.
      law: the walk's stationary law, (T,), under which the eigenvectors are orthonormal.
      time: the diffusion time.
      bandwidth: of the Gaussian kernel.
      residuals: (count,), |S v - lambda v| of the eigenvectors.
    """

    coordinates: Array
    eigenvalues: Array
    law: Array
    time: float
    bandwidth: Array
    residuals: Array


def diffusion_map(
    points: Array,
    *,
    count: int = 2,
    time: float = 1.0,
    bandwidth: float | Array | None = None,
    density_power: float = 1.0,
) -> DiffusionMap:
    """The diffusion map of points under the Gaussian kernel.

    Args:
      points: (T, D).
      count: number of coordinates, at most T - 1.
      time: diffusion time, the number of steps of the walk; larger times show coarser structure. 0
        gives the eigenvectors themselves.
      bandwidth: sigma of the kernel, in the units of the points; None for the median distance to the
        tenth neighbour (or the last one).
      density_power: alpha of Coifman and Lafon: the kernel is divided by the density estimate to this
        power on both sides. 1 (Laplace-Beltrami) removes the effect of the sampling density, 0 is the
        plain walk, 1/2 Fokker-Planck.

    Returns:
      `DiffusionMap`. Signs are arbitrary, and so are rotations among equal eigenvalues.

    Raises:
      ValueError: if there is only one point, count is not between 1 and T - 1, the bandwidth is not
        positive, or time is negative.

    Source: Coifman and Lafon, Diffusion maps (2006), cited as [23] in the Brownian motion document.
    """
    check_points("diffusion_map", points)
    size = points.shape[0]
    if size < 2:
        raise ValueError("`diffusion_map` needs at least two points. Got one.")
    if not 1 <= count < size or time < 0:
        raise ValueError(
            "`diffusion_map` needs 1 <= count <= T - 1 and time >= 0. Got "
            f"count={count}, T={size}, time={time}."
        )
    if bandwidth is None:
        rank = min(NEIGHBORS, size - 1)
        distances = -jax.lax.top_k(-squared_distances(points, points), rank + 1)[0]
        bandwidth = jnp.median(jnp.sqrt(distances[:, rank]))
        what = "median distance to near points (many points coincide: pass a bandwidth)"
        check_positive("diffusion_map", what, bandwidth)
    kernel = gaussian_kernel(points, points, bandwidth=bandwidth)
    density = jnp.sum(kernel, axis=1) ** density_power
    kernel = kernel / (density[:, None] * density[None, :])
    # The walk is reversible: its eigenvectors are those of a symmetric matrix over sqrt(law).
    degree = jnp.sum(kernel, axis=1)
    root, law = jnp.sqrt(degree), degree / jnp.sum(degree)
    symmetric = kernel / (root[:, None] * root[None, :])
    pairs = leading_eigenpairs(symmetric, count=count + 1, symmetric=True)
    values = pairs.values[1:]
    # The sign of lambda^time is defined for integer times only.
    scale = jnp.abs(values) ** time
    scale = scale * jnp.sign(values) ** int(time) if float(time).is_integer() else scale
    coordinates = pairs.vectors[:, 1:] * scale[None, :] / jnp.sqrt(law)[:, None]
    residuals = pairs.residuals[1:]
    return DiffusionMap(coordinates, values, law, time, jnp.asarray(bandwidth), residuals)
