"""A network whose logits depend on all tokens so far, small enough to list all sequences."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from moment_jax.objectives import log_class_probabilities

V, LENGTH = 3, 4
NUM_NODES = sum(V**depth for depth in range(LENGTH))
POINTS = 16


def logits(seed, scale=1.5):
    """Means and variances of the logits at every node, (NUM_NODES, V)."""
    rng = np.random.default_rng(seed)
    return scale * rng.normal(size=(NUM_NODES, V)), rng.uniform(0, 2, (NUM_NODES, V))


def step_of(mean, cov):
    """A step whose state is the node (B,), -1 before the first token; children are n V + 1 + token."""

    def step(node, tokens):
        node = jnp.where(node < 0, 0, node * V + 1 + tokens)
        return mean[node], cov[node], node

    return step


def root(num_rows):
    return jnp.full(num_rows, -1, jnp.int32)


@jax.jit
def table(mean, cov):
    """Predictive log-probabilities at every node."""
    return jax.vmap(lambda m, c: log_class_probabilities(m, c, num_points=POINTS))(mean, cov)


def log_prob(sequence, log_probs):
    """The log-probability of one sequence, token by token."""
    node, total = 0, 0.0
    for token in sequence:
        total += log_probs[node, token]
        node = node * V + 1 + token
    return total


def all_sequences(end):
    """Every sequence of LENGTH tokens, or shorter ones that end with `end`."""
    for tokens in itertools.product(range(V), repeat=LENGTH):
        if end is None or end not in tokens[:-1]:
            yield tokens
    for short in range(1, LENGTH):
        if end is not None:
            for tokens in itertools.product([t for t in range(V) if t != end], repeat=short - 1):
                yield (*tokens, end)


def padded(sequence):
    return [*sequence, *[-1] * (LENGTH - len(sequence))]
