"""Diffusion maps: coordinates in which Euclidean distance is the distance of random walks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.brownian.checks import check_points, check_positive, check_square, check_stochastic
from moment_jax.brownian.kernels import gaussian_kernel, row_normalize
from moment_jax.brownian.markov import kernel_stationary
from moment_jax.brownian.mixing import reversible_eigenpairs
from moment_jax.brownian.sphere import squared_distances

Array = jax.Array


class DiffusionMap(NamedTuple):
    """An embedding of T points, or tokens.

    Attributes:
      coordinates: (T, count): eigenvalue^time times the eigenvectors 2, 3, ... (the first is constant).
      eigenvalues: (count,), those that belong to the coordinates, of falling modulus.
      law: the walk's stationary law, (T,), with which the eigenvectors are orthonormal.
      time: the diffusion time.
      bandwidth: of the Gaussian kernel; None where a kernel was given.
      residuals: (count,), |S v - lambda v| of the eigenvectors.
    """

    coordinates: Array
    eigenvalues: Array
    law: Array
    time: float
    bandwidth: Array | None
    residuals: Array


def median_bandwidth(points: Array, *, neighbors: int = 10) -> Array:
    """The median distance (scalar) of the points to their `neighbors`-th neighbour: a local bandwidth.

    Raises:
      ValueError: if there are not more points than neighbours.
    """
    check_points("median_bandwidth", points)
    if not 1 <= neighbors < points.shape[0]:
        raise ValueError(
            f"`median_bandwidth` needs 1 <= neighbors < T. Got {neighbors} for T = {points.shape[0]}."
        )
    distances = -jax.lax.top_k(-squared_distances(points, points), neighbors + 1)[0]
    return jnp.median(jnp.sqrt(distances[:, neighbors]))


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
      time: diffusion time, the number of steps that the walk runs; larger times show coarser
        structure. 0 leaves the eigenvectors as they are.
      bandwidth: sigma of the kernel, in the units of the points; None for `median_bandwidth` (with as
        many neighbours as there are, if they are below ten).
      density_power: alpha of Coifman and Lafon: the kernel is divided by the density estimate to this
        power on both sides. 1 (Laplace-Beltrami) forgets how densely the points lie, 0 is the plain
        walk, 1/2 Fokker-Planck.

    Returns:
      `DiffusionMap`. Signs are arbitrary, and so is the rotation among equal eigenvalues.

    Raises:
      ValueError: if there is one point only, count is not between 1 and T - 1, the bandwidth is not
        positive, or time is negative.

    Source: Coifman and Lafon, Diffusion maps (2006), cited as [23] in the Brownian motion document.
    """
    check_points("diffusion_map", points)
    if points.shape[0] < 2:
        raise ValueError("`diffusion_map` needs at least two points. Got one.")
    if bandwidth is None:
        bandwidth = median_bandwidth(points, neighbors=min(10, points.shape[0] - 1))
        what = "median distance to near points (many points coincide: name a bandwidth)"
        check_positive("diffusion_map", what, bandwidth)
    kernel = gaussian_kernel(points, points, bandwidth=bandwidth)
    density = jnp.sum(kernel, axis=1) ** density_power
    kernel = kernel / (density[:, None] * density[None, :])
    return kernel_diffusion_map(kernel, count=count, time=time)._replace(
        bandwidth=jnp.asarray(bandwidth)
    )


def kernel_diffusion_map(kernel: Array, *, count: int = 2, time: float = 1.0) -> DiffusionMap:
    """The diffusion map of a symmetric kernel (T, T), such as exp of symmetric attention scores.

    Raises:
      ValueError: as `diffusion_map`, or if the kernel is not symmetric or a row is zero.
    """
    size = check_square("kernel_diffusion_map", kernel)
    if not 1 <= count < size or time < 0:
        raise ValueError(
            "`diffusion_map` needs 1 <= count <= T - 1 and time >= 0. Got "
            f"count={count}, T={size}, time={time}."
        )
    law = kernel_stationary(kernel)
    pairs = reversible_eigenpairs(row_normalize(kernel), law, count + 1)
    values = pairs.values[1:]
    # |lambda|^time with lambda's sign only where the time is a whole number.
    scale = jnp.abs(values) ** time
    scale = scale * jnp.sign(values) ** int(time) if float(time).is_integer() else scale
    return DiffusionMap(
        pairs.vectors[:, 1:] * scale[None, :], values, law, time, None, pairs.residuals[1:]
    )


def diffusion_distances(transition: Array, law: Array, time: int) -> Array:
    """sqrt(sum_k (P^t_ik - P^t_jk)^2 / p_k) for all pairs of states, (T, T), from the powers of P.

    For a reversible chain it is the distance of the points in all T - 1 coordinates of the diffusion
    map with the same time.

    Raises:
      ValueError: if rows are not probabilities, or time is negative.
    """
    size = check_stochastic("diffusion_distances", transition)
    if time < 0 or law.shape != (size,):
        raise ValueError(
            f"`diffusion_distances` needs time >= 0 and a law of shape ({size},). Got {time} and "
            f"{tuple(law.shape)}."
        )
    power = jnp.linalg.matrix_power(transition, time)
    weighted = power * jnp.where(law > 0, jax.lax.rsqrt(jnp.where(law > 0, law, 1)), 0)[None, :]
    return jnp.sqrt(squared_distances(weighted, weighted))
