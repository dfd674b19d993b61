"""The closure experiment: the best a structure can do, and how close the transforms come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from moment_jax import covariance as structures
from moment_jax.covariance import Covariance
from moment_jax.covariance.numerics import correlation_of
from moment_jax.linalg import psd_sqrt
from moment_jax.posterior import sample_params
from moment_jax.propagation import propagate


class Agreement(NamedTuple):
    """How well means and standard deviations agree with the truth, over all elements that vary."""

    mean_error: float  # root mean square of (mean - true mean) / true sd
    sd_ratio: float  # mean of sd / true sd
    sd_error: float  # mean of |sd / true sd - 1|
    sd_correlation: float  # between sd and true sd; 0 where either is constant

    @classmethod
    def of(
        cls, mean: ArrayLike, sd: ArrayLike, true_mean: ArrayLike, true_sd: ArrayLike
    ) -> Agreement:
        """Compare arrays of one shape, leaving out elements whose true sd is zero (a dead ReLU)."""
        varies, given = np.asarray(true_sd) > 0, (mean, sd, true_mean, true_sd)
        means, sds, true_means, true_sds = (np.asarray(x, np.float64)[varies] for x in given)
        ratio = sds / true_sds
        centred, true_centred = sds - sds.mean(), true_sds - true_sds.mean()
        spread = np.sqrt(np.sum(centred**2) * np.sum(true_centred**2))
        correlation = np.sum(centred * true_centred) / spread if spread > 0 else 0.0
        return cls(
            float(np.sqrt(np.mean(((means - true_means) / true_sds) ** 2))),
            float(ratio.mean()),
            float(np.abs(ratio - 1).mean()),
            float(correlation),
        )


class ClosureRow(NamedTuple):
    """How mean and sd of one stage's output agree with the sampled truth.

    `closure` samples the exact network, but after every stage replaces the draws by Gaussian ones with
    the same mean and the covariance that the structure can hold. No propagation of Gaussian moments in
    this structure can be expected to do better. `library` is the library's pass from the input on.
    `layer` is the library's transform of this stage alone, given the sampled moments of its input; its
    loss beyond `closure` is an error of the transform.
    """

    stage: str
    structure: str
    closure: Agreement
    library: Agreement
    layer: Agreement


class Stage(NamedTuple):
    """One part of a network, whose weights no other part has."""

    name: str
    moments: Callable[[Array, Any], tuple[Array, Any]]  # of one sequence, mean and covariance
    draw: Callable[[Array, Array], Array]  # (key, x) -> the output of one drawn network


def _stage(index: int, given: Any) -> Any:
    """The stage of a function with its beliefs; one of a receipt as it is."""
    if all(hasattr(given, name) for name in Stage._fields):
        return given
    if not (isinstance(given, tuple) and len(given) == 2 and callable(given[0])):
        raise TypeError(
            "`closure_report` needs stages: pairs (fn, params) of a function fn(params, x) and its "
            f"beliefs, or the receipt of mj.propagate. Got {type(given).__name__}."
        )
    fn, params = given

    def moments(mean: Array, cov: Any) -> tuple[Array, Any]:
        found: tuple[Array, Any] = propagate(fn, structure=type(cov))(params, (mean, cov))
        return found

    name = f"{index} {getattr(fn, '__name__', type(fn).__name__)}"
    return Stage(name, moments, lambda key, x: fn(sample_params(params, key), x))


def closure_report(
    stages: Any, x: Array, structures: Sequence[type[Covariance]], key: Array,
    num_samples: int = 2000,
) -> list[ClosureRow]:  # fmt: skip
    """Separate what a structure cannot hold from the errors of a transform, sublayer by sublayer.

    One row per stage and structure, grouped by stage. Relative standard errors are 1 / sqrt(2 n) for an
    sd, and 1 / sqrt(n) sds for a mean, with n draws. The exact network and its closures share sampled
    weights. All draws of a stage are in memory at once: n T D numbers per structure (and for `Full` a
    matrix of (T D)^2).

    Args:
      stages: the parts of a network in their order, which share no weights: pairs (fn, params) of a
        function fn(params, x) of one sequence and its beliefs. Or the receipt of
        `mj.propagate(fn, receipt=True)` at x, which has its own.
      x: one deterministic input, (T, D), else ValueError; of a receipt, that of its function.
      structures: covariance structures to compare.
      key: a JAX random key.
      num_samples: number of networks drawn.
    """
    start = jnp.asarray(stages.sequence(x) if hasattr(stages, "sequence") else x)
    if start.ndim != 2:
        raise ValueError(
            "`closure_report` needs one input, a sequence (T, D). Got "
            f"{tuple(start.shape)}. For a batch, call it once for each input."
        )
    parts = [_stage(i, part) for i, part in enumerate(getattr(stages, "stages", stages))]
    exact = jnp.broadcast_to(start, (num_samples, *start.shape))
    closed = dict.fromkeys(structures, exact)
    shape = start.shape[0], start.shape[1]
    passed = {s: (start, s.zeros(shape, start.dtype)) for s in structures}
    rows = []
    for i, stage in enumerate(parts):
        draw_key, noise_key = jax.random.split(jax.random.fold_in(key, i))
        keys = jax.random.split(draw_key, num_samples)
        draw, moments = jax.jit(jax.vmap(stage.draw)), jax.jit(stage.moments)
        before, exact = exact, draw(keys, exact)
        for structure in structures:
            fed = jnp.mean(before, axis=0), kept_covariance(structure, before)
            drawn = draw(keys, closed[structure])
            passed[structure] = moments(*passed[structure])
            sampled = jnp.mean(drawn, axis=0), jnp.var(drawn, axis=0)
            passes = ((mean, cov.variance()) for mean, cov in (passed[structure], moments(*fed)))
            agreements = (
                Agreement.of(
                    mean, jnp.sqrt(variance), jnp.mean(exact, axis=0), jnp.std(exact, axis=0)
                )
                for mean, variance in (sampled, *passes)
            )
            rows.append(ClosureRow(stage.name, structure.__name__, *agreements))
            noise = gaussian_draws(kept_covariance(structure, drawn), noise_key, num_samples)
            closed[structure] = jnp.mean(drawn, axis=0, keepdims=True) + noise
    return rows


def kept_covariance(structure: type[Covariance], draws: Array) -> Covariance:
    """Project the covariance of draws (N, T, D), without forming it unless the structure needs it."""
    centred = draws - jnp.mean(draws, axis=0, keepdims=True)
    n, t, d = draws.shape
    variance = jnp.mean(centred**2, axis=0)
    if structure is structures.Diagonal:
        return structures.Diagonal(variance)
    if structure is structures.Separable:
        tokens = jnp.einsum("ntd,nsd->ts", centred, centred) / n
        total = jnp.sum(centred, axis=1)
        return structures.Separable(variance, tokens, total.T @ total / n, jnp.ones(t, draws.dtype))
    flat = centred.reshape(n, t * d)
    return structure.project((flat.T @ flat / n).reshape(t, d, t, d))


def gaussian_draws(cov: Covariance, key: Array, num_draws: int) -> Array:
    """Draws (N, T, D) from N(0, cov)."""
    noise = jax.random.normal(key, (num_draws, *cov.shape), cov.dtype)
    if isinstance(cov, structures.Diagonal):
        return jnp.sqrt(cov.variances)[None] * noise
    if isinstance(cov, structures.Separable):
        grams = cov.token_gram(), cov.features
        tokens, features = (psd_sqrt(correlation_of(gram)) for gram in grams)
        return cov.sd()[None] * jnp.einsum("ts,nse,ed->ntd", tokens, noise, features)
    size = noise[0].size
    root = psd_sqrt(cov.to_dense().reshape(size, size))
    return (noise.reshape(num_draws, size) @ root).reshape(noise.shape)
