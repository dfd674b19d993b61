"""The closure experiment: what a structure can keep at best, and what the transforms make of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moment_jax.covariance import Covariance
from moment_jax.reference.agreement import Agreement
from moment_jax.reference.gaussian import gaussian_draws, kept_covariance

Array = jax.Array


class ClosureRow(NamedTuple):
    """How mean and sd of one stage's output agree with the sampled truth.

    `closure`: the exact network is sampled, but after every stage the draws are replaced by Gaussian
    ones with the same mean and the covariance that the structure keeps. No propagation of Gaussian
    moments in this structure can be expected to do better. `library`: the library's own pass, from the
    input on. `layer`: its transform of this one stage, fed with the sampled moments of the stage's
    input; what it loses beyond `closure` is the transform's fault.
    """

    stage: str
    structure: str
    closure: Agreement
    library: Agreement
    layer: Agreement


def closure_report(
    module: Any,
    x: Array,
    structures: Sequence[type[Covariance]],
    key: Array,
    num_samples: int = 2000,
) -> list[ClosureRow]:
    """Tell apart what a structure cannot hold and what a transform gets wrong, sublayer by sublayer.

    The standard errors are those of `num_samples` draws: 1 / sqrt(2 n) of a sd, 1 / sqrt(n) sd of a
    mean. The exact network and its closures see the same weights. All draws of a stage are held at a
    time: n T D numbers for each structure (and for `Full` a matrix of (T D)^2).

    Args:
      module: a Bayesian module, or the receipt of `mj.propagate(fn, receipt=True)` at x (anything with
        `sequence(x)` and `stages`, each with `name`, `moments` and `draw`).
      x: one input, certain: (T, D), or one image for a `VisionTransformer`.
      structures: covariance structures to compare.
      key: a JAX random key.
      num_samples: number of networks drawn.

    Returns:
      A row for every stage and structure, stages outermost.

    Raises:
      ValueError: if x is a batch.
    """
    start = jnp.asarray(module.sequence(x))
    if start.ndim != 2:
        raise ValueError(
            "`closure_report` needs one input, a sequence (T, D) once the module has cut it into "
            f"tokens. Got {tuple(start.shape)}. For a batch, call it for each."
        )
    exact = jnp.broadcast_to(start, (num_samples, *start.shape))
    closed = dict.fromkeys(structures, exact)
    passed = {
        s: (start, s.zeros((start.shape[0], start.shape[1]), start.dtype)) for s in structures
    }
    rows = []
    for i, stage in enumerate(module.stages):
        draw_key, noise_key = jax.random.split(jax.random.fold_in(key, i))
        keys = jax.random.split(draw_key, num_samples)
        draw, moments = jax.jit(jax.vmap(stage.draw)), jax.jit(stage.moments)
        before, exact = exact, draw(keys, exact)
        for structure in structures:
            fed = jnp.mean(before, axis=0), kept_covariance(structure, before)
            drawn = draw(keys, closed[structure])
            passed[structure] = moments(*passed[structure])
            agreements = (
                _agreement((jnp.mean(drawn, axis=0), jnp.var(drawn, axis=0)), exact),
                _agreement(_variances(passed[structure]), exact),
                _agreement(_variances(moments(*fed)), exact),
            )
            rows.append(ClosureRow(stage.name, structure.__name__, *agreements))
            noise = gaussian_draws(kept_covariance(structure, drawn), noise_key, num_samples)
            closed[structure] = jnp.mean(drawn, axis=0, keepdims=True) + noise
    return rows


def _variances(moments: tuple[Array, Covariance]) -> tuple[Array, Array]:
    return moments[0], moments[1].variance()


def _agreement(moments: tuple[Array, Array], draws: Array) -> Agreement:
    mean, variance = moments
    return Agreement.of(mean, jnp.sqrt(variance), jnp.mean(draws, axis=0), jnp.std(draws, axis=0))
