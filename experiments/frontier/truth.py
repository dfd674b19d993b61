"""Sampled truth of a problem's output, with standard errors, and the error of fewer samples."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import moment_jax as mj
from experiments.frontier.passes import certain, classify, plain_tokens
from experiments.frontier.problem import Problem
from experiments.progress import Progress

CHUNK_NUMBERS = 2**24  # numbers in the draws of one compiled call, 64 MiB
COLUMNS = 2**12  # entries whose moments are taken together
KEPT = 1024  # entries of the tokens whose draws are kept, for the subsamples


class Sampled(NamedTuple):
    """Moments of one output, and the standard errors of both, in its shape."""

    mean: np.ndarray
    sd: np.ndarray
    mean_error: np.ndarray
    sd_error: np.ndarray


class Truth(NamedTuple):
    """Of the last block's output and the logits, and the relative sd error of fewer samples.

    `token_curve` and `logit_curve` are root mean squares of sd / true sd - 1 where the sd is that of
    `sizes` of the draws alone.
    """

    tokens: Sampled  # (N, T, D)
    logits: Sampled  # (N, C)
    logit_cov: np.ndarray  # (N, C, C)
    probabilities: np.ndarray  # E[softmax], (N, C)
    sizes: np.ndarray
    token_curve: np.ndarray
    logit_curve: np.ndarray

    def noise(self) -> dict[str, float]:
        """Mean relative standard error of a sd, and mean standard error of a mean in sd."""
        parts = {"tokens": self.tokens, "logits": self.logits}
        figures = {}
        for name, moments in parts.items():
            figures[f"{name}_sd_error"] = float((moments.sd_error / moments.sd).mean())
            figures[f"{name}_mean_error"] = float((moments.mean_error / moments.sd).mean())
        return figures


def moments(draws: np.ndarray, shape: tuple[int, ...]) -> Sampled:
    """Mean and sd of draws (n, entries), in `shape`; their standard errors for any distribution."""
    n, parts = len(draws), []
    for first in range(0, draws.shape[1], COLUMNS):  # in double precision, a part at a time
        part = draws[:, first : first + COLUMNS].astype(np.float64)
        mean, variance = part.mean(axis=0), part.var(axis=0)
        fourth = ((part - mean) ** 4).mean(axis=0)
        sd = np.sqrt(variance * n / (n - 1))
        square = np.maximum(fourth - variance**2 * (n - 3) / (n - 1), 0) / n
        sd_error = np.sqrt(square) / np.where(sd > 0, 2 * sd, 1)
        parts.append((mean, sd, sd / n**0.5, sd_error))
    columns = (np.concatenate(same).astype(np.float32) for same in zip(*parts, strict=True))
    return Sampled(*(column.reshape(shape) for column in columns))


def sample(problem: Problem, num_samples: int, seed: int) -> Truth:
    """Draw the plain network `num_samples` times, each draw for all inputs.

    Draw i has the key `fold_in(key(seed), i)`, whatever the chunk.
    """
    tokens, inputs = problem.inputs.size, len(problem.inputs)
    draws = _draws(problem, num_samples, seed)
    rng = np.random.default_rng(seed)
    kept = np.sort(rng.choice(tokens, min(KEPT, tokens), replace=False))
    sizes = 2 ** np.arange(1, max(2, int(np.log2(num_samples / 4)) + 1))
    sizes = sizes[sizes <= num_samples]
    every = [
        moments(draws[:, :tokens], problem.inputs.shape),
        moments(draws[:, tokens:], (inputs, problem.head[1].size)),
    ]
    curves: list[np.ndarray] = []
    for part, true in zip((draws[:, kept], draws[:, tokens:]), every, strict=True):
        sd = true.sd.ravel()[kept] if len(curves) == 0 else true.sd.ravel()
        errors = [_subsampled(part, sd, int(size)).mean() for size in sizes]
        curves.append(np.sqrt(errors))
    logits = draws[:, tokens:].reshape(num_samples, inputs, -1)
    centred = logits - logits.mean(axis=0)
    logit_cov = np.einsum("snc,sne->nce", centred, centred) / (num_samples - 1)
    probabilities = np.asarray(jax.nn.softmax(logits)).mean(axis=0)
    return Truth(every[0], every[1], logit_cov, probabilities, sizes, *curves)


def _draws(problem: Problem, num_samples: int, seed: int) -> np.ndarray:
    """The flattened tokens followed by the logits of each network, (num_samples, entries)."""
    size = min(num_samples, max(1, CHUNK_NUMBERS // problem.inputs.size))

    def chunk(first: Array, blocks: object, head: tuple[Array, Array], x: Array) -> Array:
        def draw(i: Array) -> Array:
            key = jax.random.fold_in(jax.random.key(seed), i)
            tokens = plain_tokens(problem.spec, mj.posterior.sample_params(blocks, key), x)
            return jnp.concatenate([tokens.ravel(), classify(tokens, head).ravel()])

        return jax.lax.map(draw, first + jnp.arange(size))

    arguments = problem.blocks, *certain(problem)
    compiled = jax.jit(chunk).lower(jnp.int32(0), *arguments).compile()
    parts = []
    name = f"sampling {problem.spec.name}"
    with Progress(name, num_samples, unit="network") as progress:
        for first in range(0, num_samples, size):
            drawn = np.asarray(compiled(jnp.int32(first), *arguments))
            parts.append(drawn[: num_samples - first])
            progress.update(len(parts[-1]))
    return np.concatenate(parts)


def _subsampled(draws: np.ndarray, truth: np.ndarray, size: int) -> np.ndarray:
    """Mean square of sd / true sd - 1 of all disjoint groups of `size` draws, for each entry."""
    groups = len(draws) // size
    used = draws[: groups * size].reshape(groups, size, -1)
    ratio = used.std(axis=1, ddof=1) / np.maximum(truth, np.finfo(np.float32).tiny)
    # The groups are part of what the truth is made of, so they are closer to it than to the limit.
    return ((ratio - 1) ** 2).mean(axis=0) / max(1 - size / len(draws), 0.25)
