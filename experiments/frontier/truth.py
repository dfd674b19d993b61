"""Sampled truth of a problem's output, with standard errors, and what fewer samples would have given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import moment_jax as mj
from experiments.frontier.passes import classify, plain_tokens
from experiments.frontier.problem import Problem
from experiments.progress import Progress

Array = jax.Array

CHUNK_NUMBERS = 2**24  # numbers in the draws of one chunk, 64 MiB
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


class Sums:
    """Sums of the first four powers about the first draw, in double precision."""

    def __init__(self) -> None:
        self.count = 0
        self.centre: np.ndarray | None = None
        self.powers: list[np.ndarray] = []

    def add(self, draws: np.ndarray) -> None:
        """Draws (n, entries)."""
        if self.centre is None:
            self.centre = draws[0].astype(np.float64)
            self.powers = [np.zeros_like(self.centre) for _ in range(4)]
        # A row of draws at a time: float64 copies of a whole chunk would be eight of it.
        for row in draws:
            shifted = row - self.centre
            power = shifted
            for i in range(4):
                self.powers[i] += power
                power = power * shifted
        self.count += len(draws)

    def moments(self, shape: tuple[int, ...], part: slice) -> Sampled:
        """Mean, sd, and their standard errors whatever the distribution."""
        assert self.centre is not None
        n = self.count
        d, second, third, fourth = (power[part] / n for power in self.powers)
        variance = np.maximum(second - d**2, 0)
        kurtosis = fourth - 4 * d * third + 6 * d**2 * second - 3 * d**4
        unbiased = variance * n / (n - 1)
        sd = np.sqrt(unbiased)
        square = np.maximum(kurtosis - variance**2 * (n - 3) / (n - 1), 0) / n
        sd_error = np.sqrt(square) / np.where(sd > 0, 2 * sd, 1)
        parts = (self.centre[part] + d, sd, sd / n**0.5, sd_error)
        return Sampled(*(array.reshape(shape).astype(np.float32) for array in parts))


def sample(problem: Problem, num_samples: int, seed: int) -> Truth:
    """Draw the plain network `num_samples` times, each draw for all inputs.

    Draw i has the key `fold_in(key(seed), i)`, whatever the chunk.
    """
    spec = problem.spec
    tokens = problem.inputs.size
    entries = tokens + len(problem.inputs) * problem.head[1].size
    rng = np.random.default_rng(seed)
    kept = np.sort(rng.choice(tokens, min(KEPT, tokens), replace=False))
    kept = np.concatenate([kept, np.arange(tokens, entries)])
    sums, stored = Sums(), []
    with Progress(f"sampling {spec.name}", num_samples, unit="network") as progress:
        for draws in _chunks(problem, num_samples, max(1, CHUNK_NUMBERS // entries), seed):
            sums.add(draws)
            stored.append(draws[:, kept])
            progress.update(len(draws))
    draws = np.concatenate(stored)
    truths = sums.moments((entries,), slice(None)).sd[kept]
    sizes = 2 ** np.arange(1, max(2, int(np.log2(num_samples / 4)) + 1))
    sizes = sizes[sizes <= num_samples]
    errors = np.stack([_subsampled(draws, truths, int(size)) for size in sizes])
    split = len(kept) - (entries - tokens)
    curves = (np.sqrt(part.mean(axis=1)) for part in (errors[:, :split], errors[:, split:]))
    logits = draws[:, split:].reshape(len(draws), len(problem.inputs), -1)
    centred = logits - logits.mean(axis=0)
    logit_cov = np.einsum("snc,sne->nce", centred, centred) / (len(draws) - 1)
    return Truth(
        sums.moments(problem.inputs.shape, slice(tokens)),
        sums.moments((len(problem.inputs), problem.head[1].size), slice(tokens, None)),
        logit_cov,
        np.asarray(jax.nn.softmax(logits)).mean(axis=0),
        sizes,
        *curves,
    )


def _chunks(problem: Problem, num_samples: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Draws of the flattened tokens followed by the logits, (n, entries), of at most `size` networks."""
    size = min(size, num_samples)

    def chunk(first: Array, blocks: object, head: tuple[Array, Array], x: Array) -> Array:
        def draw(i: Array) -> Array:
            key = jax.random.fold_in(jax.random.key(seed), i)
            tokens = plain_tokens(problem.spec, mj.posterior.sample_params(blocks, key), x)
            return jnp.concatenate([tokens.ravel(), classify(tokens, head).ravel()])

        return jax.lax.map(draw, first + jnp.arange(size))

    head = jnp.asarray(problem.head[0]), jnp.asarray(problem.head[1])
    arguments = problem.blocks, head, jnp.asarray(problem.inputs)
    compiled = jax.jit(chunk).lower(jnp.int32(0), *arguments).compile()
    for first in range(0, num_samples, size):
        draws = np.asarray(compiled(jnp.int32(first), *arguments))
        yield draws[: num_samples - first]


def _subsampled(draws: np.ndarray, truth: np.ndarray, size: int) -> np.ndarray:
    """Mean square of sd / true sd - 1 of all disjoint groups of `size` draws, for each entry."""
    groups = len(draws) // size
    used = draws[: groups * size].reshape(groups, size, -1)
    ratio = used.std(axis=1, ddof=1) / np.maximum(truth, np.finfo(np.float32).tiny)
    # The groups are part of what the truth is made of, so they are closer to it than to the limit.
    return ((ratio - 1) ** 2).mean(axis=0) / max(1 - size / len(draws), 0.25)
