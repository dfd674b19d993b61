"""Random posteriors: a kernel's sd is a tenth of what would keep the scale of its layer's input."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.frontier.beliefs import factorized, tree_of
from experiments.frontier.problem import Problem, Spec

RELATIVE_SD = 0.1
NUM_CLASSES = 10
# Mean's deviation and sd of what multiplies nothing, and of the gains.
BIAS, BIAS_SD, GAIN, GAIN_SD = 0.02, 0.01, 0.1, 0.1
COMMON, OWN = 0.8, 0.6  # real tokens are alike: a part that they share, and their own


def random_problem(spec: Spec, seed: int) -> Problem:
    """Kernels N(0, 1/fan_in) with sd `RELATIVE_SD / sqrt(fan_in)`; inputs whose tokens are alike."""
    rng = np.random.default_rng([seed, spec.num_blocks, spec.num_tokens, spec.num_features])
    blocks, features = spec.num_blocks, spec.num_features

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def kernel(into: int, out: int) -> Any:
        mean = normal(blocks, into, out) / into**0.5
        return factorized(mean, np.full(mean.shape, RELATIVE_SD / into**0.5))

    def bias(size: int) -> Any:
        return factorized(BIAS * normal(blocks, size), np.full((blocks, size), BIAS_SD))

    def gain(size: int) -> Any:
        return factorized(1 + GAIN * normal(blocks, size), np.full((blocks, size), GAIN_SD))

    params = tree_of(features, spec.hidden_features, kernel, bias, gain)
    common = normal(spec.batch, 1, features)
    inputs = COMMON * common + OWN * normal(spec.batch, spec.num_tokens, features)
    head = normal(features, NUM_CLASSES) / np.float32(features**0.5)
    labels = rng.integers(0, NUM_CLASSES, spec.batch).astype(np.int32)
    return Problem(spec, params, (head, np.zeros(NUM_CLASSES, np.float32)), inputs, labels)
