"""Sampled truth of a problem's outputs, with standard errors."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

import moment_jax as mj
from experiments import draws
from experiments.frontier.passes import classify, plain_tokens
from experiments.frontier.problem import Problem, Spec


class Sampled(NamedTuple):
    """Moments of one output, and the standard errors of both, in its shape."""

    mean: np.ndarray
    std: np.ndarray
    mean_error: np.ndarray
    std_error: np.ndarray


class Truth(NamedTuple):
    """Moments of the last block's output and of the logits."""

    tokens: Sampled  # (N, T, D)
    logits: Sampled  # (N, C)
    logit_cov: np.ndarray  # (N, C, C)
    probabilities: np.ndarray  # E[softmax], (N, C)
    samples: np.ndarray  # number of networks drawn, a scalar


def sample(problem: Problem, num_samples: int, seed: int) -> Truth:
    """Draw the plain network `num_samples` times, each draw for all inputs."""
    given = problem.blocks, problem.head, problem.inputs
    moments = _sampled(problem.spec, num_samples, jax.random.key(seed), *given)
    (tokens, logits, probabilities, squares), off = jax.tree.map(np.asarray, moments)
    cov = (squares.mean - off[:, :, None] * off[:, None, :]) * (num_samples / (num_samples - 1))
    return Truth(tokens, logits, cov, probabilities.mean, np.array(num_samples))


@partial(jax.jit, static_argnums=(0, 1))
def _sampled(
    spec: Spec, num_samples: int, key: Array, blocks: Any, head: tuple[Array, Array], x: Array
) -> Any:
    """Moments of four outputs, and how far the logits' mean is from the centre of their squares."""

    def outputs(arrays: Any, centre: Array) -> tuple[Array, ...]:
        tokens = plain_tokens(spec, arrays, x)
        logits = classify(tokens, head)
        off = logits - centre
        return tokens, logits, jax.nn.softmax(logits), jnp.einsum("nc,nd->ncd", off, off)

    # Squares about the mean network's logits, so that no covariance is lost to rounding.
    at_means = outputs(draws.means(blocks), jnp.zeros(()))
    centre, (_, unravel) = at_means[1], ravel_pytree(at_means)
    found = mj.monte_carlo(
        lambda arrays: ravel_pytree(outputs(arrays, centre))[0], blocks, key, num_samples,
        batch_size=1,
    )  # fmt: skip
    figures = found.mean, found.standard_deviation, found.mean_error, found.sd_error
    sampled = [Sampled(*parts) for parts in zip(*map(unravel, figures), strict=True)]
    return sampled, sampled[1].mean - centre
