"""Markov chains over tokens: stationary laws, reversibility, spectra, mixing times; diffusion maps."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.brownian.kernels import check_points, gaussian_kernel
from moment_jax.covariance.fields import need
from moment_jax.xla import inlined

LONGEST = 30  # `mixing_time` gives up after 2^LONGEST steps
# How far a row sum may be from one, by dtype: the rounding error of a sum over thousands.
TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 3e-2, "float16": 3e-3}


class ChainClasses(NamedTuple):
    """The class structure of a chain, from the zeros of its transition matrix."""

    recurrent: np.ndarray  # (T,) booleans: a closed class, which the chain never leaves
    unique: bool  # whether it is the only one; then it carries the unique stationary law
    period: int  # of that class; 1 for aperiodic


def chain_classes(transition: Array) -> ChainClasses:
    """A closed class of a chain (T, T), whether it is the only one, and its period.

    Only exact zeros count as zero. A softmax in float32 has them where scores are 104 below the largest
    of their row. Not for use inside compiled code. ValueError if the rows are not probabilities.

    >>> chain_classes(jnp.array([[0.0, 1.0], [1.0, 0.0]])).period
    2
    """
    from scipy.sparse import csgraph, csr_array  # here, for they take long to import

    _check_stochastic("chain_classes", transition)
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
    """The stationary law p = P^T p, (T,), of a chain (T, T) with one closed class: probabilities.

    Solves (I - P^T + u 1^T) p = u with the uniform law u. States outside the class, as under a causal
    mask, get zero. A periodic chain has a stationary law too, but need not converge to it. ValueError if
    rows are not probabilities, or there are several closed classes; inside compiled code nothing is
    checked, and the result is arbitrary then.

    >>> print([f"{p:.3f}" for p in stationary(jnp.array([[0.5, 0.5], [1.0, 0.0]]))])
    ['0.667', '0.333']
    """
    size = _check_stochastic("stationary", transition)
    if not isinstance(transition, jax.core.Tracer):
        classes = chain_classes(transition)
        rule = "a chain with one closed class; otherwise the law depends on the start"
        came = f"several, one of {classes.recurrent.sum()} of {size} states"
        mend = "Use one class alone (`chain_classes`), or connect the chain: 0.99 P + 0.01 / T."
        need("stationary", classes.unique, rule, came, mend)
    return _stationary(transition)


@inlined
def _stationary(transition: Array) -> Array:
    size = len(transition)
    uniform = jnp.full(size, 1 / size, transition.dtype)
    matrix = jnp.eye(size, dtype=transition.dtype) - transition.T + uniform[:, None]

    def eliminate(j: Array, joined: Array) -> Array:
        row = joined[j] / joined[j, j]
        return (joined - joined[:, j, None] * row[None]).at[j].set(row)

    # By Gauss and Jordan, not by LAPACK (see `linalg`). No pivot is zero: leading minors are positive
    # unless two closed classes are among the first states.
    joined = jnp.concatenate([matrix, uniform[:, None]], axis=1)
    law = jnp.maximum(jax.lax.fori_loop(0, size, eliminate, joined)[:, -1], 0)
    return law / jnp.sum(law)


def detailed_balance_gap(transition: Array, law: Array) -> Array:
    """sum_ij |p_i P_ij - p_j P_ji| / 2, the net flow around the chain: 0 if reversible, below 1.

    Of a chain (T, T) and its stationary law (T,). ValueError if rows are not probabilities or shapes do
    not fit.
    """
    _check_law("detailed_balance_gap", transition, law)
    flow = law[:, None] * transition
    return jnp.sum(jnp.abs(flow - flow.T)) / 2


def entropy_rate(transition: Array, law: Array) -> Array:
    """-sum_i p_i sum_j P_ij log P_ij in nats, from 0 (deterministic) to log T (uniform).

    Arguments and errors are those of `detailed_balance_gap`.
    """
    _check_law("entropy_rate", transition, law)
    return jnp.sum(law * jnp.sum(jax.scipy.special.entr(transition), axis=1))


def _check_law(name: str, transition: Array, law: Array) -> None:
    """Raise unless rows are probabilities and the law is (T,)."""
    size = _check_stochastic(name, transition)
    need(name, law.shape == (size,), f"a law of shape ({size},)", law.shape)


def spectral_gap(transition: Array) -> Array:
    """1 - |lambda_2|, the slowest rate at which the chain forgets its start.

    0 for a periodic or a reducible chain, 1 for T = 1. Its inverse is the relaxation time. It takes
    `jnp.linalg.eigvals`, which some accelerators lack. ValueError if rows are not probabilities.
    """
    if _check_stochastic("spectral_gap", transition) == 1:
        return jnp.ones((), transition.dtype)
    return jnp.maximum(1 - jnp.sort(jnp.abs(jnp.linalg.eigvals(transition)))[-2], 0)


def mixing_time(transition: Array, *, distance: float = 0.25) -> int:
    """The first step at which every start's law is within `distance` of the stationary one.

    The distance is total variation, sum_j |P^t_ij - p_j| / 2, at the worst start i. The step, a Python
    int, is found by doubling and bisection on powers of P; 0 for T = 1. Not for compiled code.
    ValueError if rows are not probabilities, or the chain never mixes (it is periodic, or has several
    closed classes), or has not after 2^LONGEST steps.
    """
    size = _check_stochastic("mixing_time", transition)
    need("mixing_time", 0 < distance < 1, "0 < distance < 1", distance)
    classes = chain_classes(transition)
    right = classes.period == 1 and classes.unique
    rule = "an aperiodic chain with one closed class; others never mix"
    came = f"period {classes.period}{'' if classes.unique else ' and several closed classes'}"
    need("mixing_time", right, rule, came, "(I + P) / 2 is never periodic.")
    target = stationary(transition)

    def far(power: Array) -> bool:
        return bool(jnp.max(jnp.sum(jnp.abs(power - target[None, :]), axis=1)) / 2 > distance)

    current = jnp.eye(size, dtype=transition.dtype)
    if not far(current):
        return 0
    powers = [transition]
    while far(powers[-1]):
        rule, came = f"a distance below {distance} after 2^{LONGEST} steps", "a larger one"
        mend = "See 1 / spectral_gap(transition)."
        need("mixing_time", len(powers) <= LONGEST, rule, came, mend)
        powers.append(powers[-1] @ powers[-1])
    steps = 0  # the last step that is still too far
    for i, power in reversed(list(enumerate(powers[:-1]))):
        further = current @ power
        if far(further):
            current, steps = further, steps + 2**i
    return steps + 1


class DiffusionMap(NamedTuple):
    """An embedding of T points, or tokens."""

    coordinates: Array  # (T, count): eigenvalue^time times the eigenvectors 2, 3, ...
    eigenvalues: Array  # (count,), one per coordinate, by decreasing modulus
    law: Array  # the walk's stationary law, (T,), under which the eigenvectors are orthonormal


def diffusion_map(
    points: Array, *, bandwidth: float | Array, count: int = 2, time: float = 1.0,
    density_power: float = 1.0,
) -> DiffusionMap:  # fmt: skip
    """The diffusion map of points under the Gaussian kernel.

    Signs are arbitrary, and so are rotations among equal eigenvalues.

    Args:
      points: (T, D), T at least 2.
      bandwidth: sigma of the kernel, in the units of the points: some distance to near ones.
      count: number of coordinates, at most T - 1.
      time: diffusion time, the number of steps of the walk, not negative; larger times show coarser
        structure. 0 gives the eigenvectors themselves.
      density_power: alpha of Coifman and Lafon: the kernel is divided by the density estimate to this
        power on both sides. 1 (Laplace-Beltrami) removes the effect of the sampling density, 0 is the
        plain walk, 1/2 Fokker-Planck.

    ValueError if an argument is out of its range. Source: Coifman and Lafon, Diffusion maps (2006).
    """
    check_points("diffusion_map", points)
    size = points.shape[0]
    rule = "two points at least, 1 <= count <= T - 1 and time >= 0"
    came = f"count={count}, T={size}, time={time}"
    need("diffusion_map", 1 <= count < size and time >= 0, rule, came)
    kernel = gaussian_kernel(points, points, bandwidth=bandwidth)
    density = jnp.sum(kernel, axis=1) ** density_power
    kernel = kernel / (density[:, None] * density[None, :])
    # The walk is reversible: its eigenvectors are those of a symmetric matrix over sqrt(law).
    degree = jnp.sum(kernel, axis=1)
    root, law = jnp.sqrt(degree), degree / jnp.sum(degree)
    symmetric = kernel / (root[:, None] * root[None, :])
    values, vectors = jnp.linalg.eigh(symmetric)
    order = jnp.argsort(-jnp.abs(values))[1 : count + 1]
    values, vectors = values[order], vectors[:, order]
    # The kernel is positive definite: only rounding makes an eigenvalue negative.
    coordinates = vectors * (jnp.abs(values) ** time)[None, :] / jnp.sqrt(law)[:, None]
    return DiffusionMap(coordinates, values, law)


def _check_stochastic(name: str, transition: Array) -> int:
    """Return T; raise unless the rows of (T, T) are probabilities (in compiled code, only the shape)."""
    shape = transition.shape
    right = len(shape) == 2 and shape[0] == shape[1] > 0
    need(name, right, "a matrix of shape (T, T)", shape, f"For a batch, use jax.vmap({name}).")
    if isinstance(transition, jax.core.Tracer):
        return shape[0]
    wide = np.asarray(transition, np.float64)
    fine, rule = (wide >= 0) & np.isfinite(wide), "probabilities: finite entries, none negative"
    mend = "Of weights use mj.brownian.row_normalize(kernel); of scores jax.nn.softmax(scores)."
    need(name, fine.all(), rule, f"{wide.min():.3g}", mend)
    sums = wide.sum(axis=1)
    row = np.argmax(np.abs(sums - 1))
    right = abs(sums[row] - 1) <= TOLERANCE.get(str(transition.dtype), 1e-4)
    mend = "Use mj.brownian.row_normalize, or transpose: entry (i, j) is of the step i -> j."
    need(name, right, "rows that sum to one", f"{sums[row]:.6g} for row {row}", mend)
    return shape[0]
