"""Markov chains over tokens: stationary laws, reversibility, spectra, mixing times; diffusion maps."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.brownian.checks import check_points, check_positive, check_stochastic
from moment_jax.brownian.kernels import gaussian_kernel, squared_distances
from moment_jax.linalg import eigh

LONGEST = 30
"""`mixing_time` gives up after 2^LONGEST steps."""
NEIGHBORS = 10
"""The default bandwidth of a diffusion map is the median distance to the neighbour of this rank."""


class ChainClasses(NamedTuple):
    """The class structure of a chain, from the zeros of its transition matrix.

    Attributes:
      recurrent: (T,) booleans: a closed class, which the chain never leaves.
      unique: whether it is the only one; then it carries the unique stationary law.
      period: of that class; 1 for aperiodic.
    """

    recurrent: np.ndarray
    unique: bool
    period: int


def chain_classes(transition: Array) -> ChainClasses:
    """A closed class of a chain (T, T), whether it is the only one, and its period.

    Only exact zeros count as zero. A softmax in float32 has them where scores are 104 below the largest
    of their row. Not for use inside compiled code.

    Raises:
      ValueError: if the rows are not probabilities.

    >>> import jax.numpy as jnp
    >>> chain_classes(jnp.array([[0.0, 1.0], [1.0, 0.0]])).period
    2
    """
    from scipy.sparse import csgraph, csr_array  # here, for they take long to import

    check_stochastic("chain_classes", transition)
    steps = np.asarray(transition) > 0
    count, label = csgraph.connected_components(csr_array(steps), connection="strong")
    source, target = np.nonzero(steps)
    leaves = np.zeros(count, bool)
    leaves[label[source[label[source] != label[target]]]] = True
    closed = np.flatnonzero(~leaves)
    recurrent = label == closed[0]
    # The period is the greatest common divisor of level_i + 1 - level_j over the class's steps i -> j.
    steps = steps[np.ix_(recurrent, recurrent)]
    level = csgraph.shortest_path(csr_array(steps), unweighted=True, indices=0).astype(int)
    source, target = np.nonzero(steps)
    period = math.gcd(*np.unique(level[source] + 1 - level[target]).tolist())
    return ChainClasses(recurrent, len(closed) == 1, period)


def stationary(transition: Array) -> Array:
    """The stationary law p = P^T p, (T,), of a chain (T, T) with one closed class.

    Solves (I - P^T + u 1^T) p = u with the uniform law u. States outside the class, as under a causal
    mask, get zero. A periodic chain has a stationary law too, but need not converge to it.

    Inside compiled code nothing is checked; the result is arbitrary if there are several closed classes.

    Returns:
      (T,), nonnegative, of sum one.

    Raises:
      ValueError: if rows are not probabilities, or the chain has more than one closed class.

    >>> import jax.numpy as jnp
    >>> print([f"{p:.3f}" for p in stationary(jnp.array([[0.5, 0.5], [1.0, 0.0]]))])
    ['0.667', '0.333']
    """
    size = check_stochastic("stationary", transition)
    if not isinstance(transition, jax.core.Tracer):
        classes = chain_classes(transition)
        if not classes.unique:
            raise ValueError(
                "`stationary` needs a chain with one closed class; otherwise the law depends on the "
                f"start. One class has {int(classes.recurrent.sum())} of {size} states, and some states "
                "never reach it. Use one class alone (`chain_classes`), or connect the chain, for "
                "instance by 0.99 P + 0.01 / T."
            )
    uniform = jnp.full(size, 1 / size, transition.dtype)
    matrix = jnp.eye(size, dtype=transition.dtype) - transition.T + uniform[:, None]
    law = jnp.maximum(jnp.linalg.solve(matrix, uniform), 0)
    return law / jnp.sum(law)


def detailed_balance_gap(transition: Array, law: Array) -> Array:
    """sum_ij |p_i P_ij - p_j P_ji| / 2, the net flow around the chain: 0 if reversible, below 1.

    Args:
      transition: (T, T).
      law: the stationary law, (T,).

    Raises:
      ValueError: if rows are not probabilities or shapes do not fit.
    """
    _check_law("detailed_balance_gap", transition, law)
    flow = law[:, None] * transition
    return jnp.sum(jnp.abs(flow - flow.T)) / 2


def entropy_rate(transition: Array, law: Array) -> Array:
    """-sum_i p_i sum_j P_ij log P_ij in nats, from 0 (deterministic) to log T (uniform).

    Args and errors are those of `detailed_balance_gap`.
    """
    _check_law("entropy_rate", transition, law)
    return jnp.sum(law * jnp.sum(jax.scipy.special.entr(transition), axis=1))


def _check_law(name: str, transition: Array, law: Array) -> None:
    """Raise unless rows are probabilities and the law is (T,)."""
    size = check_stochastic(name, transition)
    if law.shape != (size,):
        raise ValueError(f"`{name}` needs a law of shape ({size},). Got {tuple(law.shape)}.")


class Eigenpairs(NamedTuple):
    """Eigenvalues (k,) by decreasing modulus, and eigenvectors (T, k) in columns."""

    values: Array
    vectors: Array


def eigenpairs(transition: Array, count: int) -> Eigenpairs:
    """The `count` eigenvalues of largest modulus and right eigenvectors (T, count), complex.

    A conjugate pair may be cut at `count`. It takes `jnp.linalg.eig`, which some accelerators lack.

    Raises:
      ValueError: if rows are not probabilities, or count is not between 1 and T.
    """
    size = check_stochastic("eigenpairs", transition)
    if not 1 <= count <= size:
        raise ValueError(f"`eigenpairs` needs 1 <= count <= T. Got {count} for T = {size}.")
    return _leading(jnp.linalg.eig(transition), count)


def _leading(pairs: tuple[Array, Array], count: int) -> Eigenpairs:
    values, vectors = pairs
    order = jnp.argsort(-jnp.abs(values))[:count]
    return Eigenpairs(values[order], vectors[:, order])


def spectral_gap(transition: Array) -> Array:
    """1 - |lambda_2|, the slowest rate at which the chain forgets its start.

    0 for a periodic or a reducible chain, 1 for T = 1. Its inverse is the relaxation time.
    """
    if check_stochastic("spectral_gap", transition) == 1:
        return jnp.ones((), transition.dtype)
    return jnp.maximum(1 - jnp.abs(eigenpairs(transition, 2).values[1]), 0)


def mixing_time(transition: Array, *, distance: float = 0.25) -> int:
    """The first step at which every start's law is within `distance` of the stationary one.

    The distance is total variation, sum_j |P^t_ij - p_j| / 2, at the worst start i. The step is found by
    doubling and bisection on powers of P.

    Returns:
      A Python int; 0 for T = 1. Not for use inside compiled code.

    Raises:
      ValueError: if rows are not probabilities, the chain is periodic or has several closed classes
        (then it never mixes), or it has not mixed after 2^LONGEST steps.
    """
    size = check_stochastic("mixing_time", transition)
    if not 0 < distance < 1:
        raise ValueError(f"`mixing_time` needs 0 < distance < 1. Got {distance}.")
    classes = chain_classes(transition)
    if classes.period > 1 or not classes.unique:
        raise ValueError(
            "`mixing_time` needs an aperiodic chain with one closed class; others never mix. Got "
            f"period {classes.period}{'' if classes.unique else ' and several closed classes'}. "
            "(I + P) / 2 is never periodic."
        )
    target = stationary(transition)

    def far(power: Array) -> bool:
        return bool(jnp.max(jnp.sum(jnp.abs(power - target[None, :]), axis=1)) / 2 > distance)

    current = jnp.eye(size, dtype=transition.dtype)
    if not far(current):
        return 0
    powers = [transition]
    while far(powers[-1]):
        if len(powers) > LONGEST:
            raise ValueError(
                f"`mixing_time` found a distance above {distance} after 2^{LONGEST} steps. See "
                "1 / spectral_gap(transition)."
            )
        powers.append(powers[-1] @ powers[-1])
    steps = 0  # the last step that is still too far
    for i, power in reversed(list(enumerate(powers[:-1]))):
        further = current @ power
        if far(further):
            current, steps = further, steps + 2**i
    return steps + 1


class DiffusionMap(NamedTuple):
    """An embedding of T points, or tokens.

    Attributes:
      coordinates: (T, count): eigenvalue^time times the eigenvectors 2, 3, ... (the first is constant).
      eigenvalues: (count,), one per coordinate, by decreasing modulus.
      law: the walk's stationary law, (T,), under which the eigenvectors are orthonormal.
      time: the diffusion time.
      bandwidth: of the Gaussian kernel.
    """

    coordinates: Array
    eigenvalues: Array
    law: Array
    time: float
    bandwidth: Array


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
    values, vectors = (x[..., 1:] for x in _leading(eigh(symmetric), count + 1))
    # The sign of lambda^time is defined for integer times only.
    scale = jnp.abs(values) ** time
    scale = scale * jnp.sign(values) ** int(time) if float(time).is_integer() else scale
    coordinates = vectors * scale[None, :] / jnp.sqrt(law)[:, None]
    return DiffusionMap(coordinates, values, law, time, jnp.asarray(bandwidth))
