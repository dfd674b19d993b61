"""Arrays put together from the entries of others: padding, updates of a cache, selections by a mask."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from moment_jax.propagation.graph import Node, is_random
from moment_jax.propagation.moments import Moments, fresh
from moment_jax.propagation.primitives import evaluate, is_known
from moment_jax.propagation.propagator import Propagator, rule

_DATA = {"pad": (0, 2), "dynamic_update_slice": (0, 2), "select_n": (1, None)}


@rule(*_DATA)
def _assembled(propagator: Propagator, node: Node) -> Moments | None:
    """Every part at its entries, zero elsewhere, and the sum of all."""
    data = range(len(node.operands))[slice(*_DATA[node.op])]
    rest = [x for i, x in enumerate(node.operands) if i not in data]
    if any(is_random(x) or not is_known(x) for x in rest):
        return None
    ids, start = list(node.operands), 1
    for i in data:
        shape = np.shape(node.operands[i])
        size = math.prod(shape)
        ids[i] = np.arange(start, start + size, dtype=np.int32).reshape(shape)
        start += size
    shown = np.asarray(evaluate(node.primitive, ids, node.params)[0])
    random = [i for i in data if is_random(node.operands[i])]
    largest = max((node.operands[i] for i in random), key=lambda x: math.prod(x.shape))
    first = propagator.moments(largest)
    tokens, features = first.natural()
    left = {i for i, n in enumerate(node.shape) if n > 1 and i not in features}
    tokens = tuple(sorted({*tokens, *left}))
    mean, covs = jnp.zeros((), first.mean.dtype), []
    for i in data:
        here = np.isin(shown, ids[i])
        m = propagator.moments(node.operands[i])
        local = np.where(here, shown - ids[i].ravel()[0], 0)
        part = Moments(m.mean, m.cov, np.where(here, m.places.ravel()[local], -1))
        part_mean, cov = part.sequence(tokens, features)
        mean = mean + part_mean
        covs += [cov] if i in random else []
    propagator.note(node, "assembled", "parts independent" if len(covs) > 1 else "")
    return fresh(mean, covs[0].add(*covs[1:]), node.shape, tokens, features)
