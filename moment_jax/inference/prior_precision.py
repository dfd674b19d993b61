"""The prior precision of a Laplace approximation, and the noise, by the evidence."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

LOG_RANGE = (-14.0, 18.0)  # of the prior precision by the evidence: 1e-6 to 7e7
BISECTIONS = 60
NOISE_UPDATES = 50
PRECISIONS = np.logspace(-2, 6, 17)  # compared on held-out data


class Weights(NamedTuple):
    """Arrays of weights with one prior precision d."""

    eigenvalues: np.ndarray  # l, of the summed curvature at noise variance 1; one for each weight
    square: float  # |w - prior mean|^2

    def optimal_precision(self, noise: float) -> float:
        """The prior precision that maximises the evidence, limited to 1e-6 ... 7e7.

        It is the root of sum l / (l + d) = d |w - prior mean|^2, found by bisection. The root is unique:
        the left side falls in d and the right side rises.

        Source: MacKay, "Bayesian interpolation" (1992), Eq. 4.
        """
        low, high = LOG_RANGE
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            precision = np.exp(middle)
            rising = self.effective_number(precision, noise) > precision * self.square
            low, high = (middle, high) if rising else (low, middle)
        return float(np.exp((low + high) / 2))

    def effective_number(self, precision: float, noise: float) -> float:
        """Sum of l / (l + d): the number of weights that the data determine."""
        return float(np.sum(self.eigenvalues / (self.eigenvalues + noise * precision)))

    def log_evidence(self, precision: float, noise: float) -> float:
        """-1/2 (d |w - prior mean|^2 + sum log(1 + l / d)), their part in log p(y), nats."""
        logs = np.log1p(self.eigenvalues / (noise * precision))
        return float(-0.5 * (precision * self.square + np.sum(logs)))


def joined(parts: Iterable[Weights]) -> Weights:
    """All these weights, with one prior precision."""
    eigenvalues, squares = zip(*parts, strict=True)
    return Weights(np.concatenate(eigenvalues), sum(squares))


def optimised(
    groups: list[Weights],
    given: float | None,
    noise: float | None,
    outputs: np.ndarray,
    targets: np.ndarray,
) -> tuple[list[float], float]:
    """Prior precision of each group, and the noise variance, which is estimated where it is None."""

    def precisions(noise: float) -> list[float]:
        return [group.optimal_precision(noise) if given is None else given for group in groups]

    if noise is not None:
        return precisions(noise), noise
    residual = float(np.sum((targets - outputs) ** 2))
    tiny = 1e-8 * max(float(np.var(targets)), 1e-30)
    value = max(residual / outputs.size, tiny)
    for _ in range(NOISE_UPDATES):
        pairs = zip(groups, precisions(value), strict=True)
        # MacKay's update; the weights use up at most half of the data's degrees of freedom.
        used = sum(group.effective_number(precision, value) for group, precision in pairs)
        new = max(residual / (outputs.size - min(used, outputs.size / 2)), tiny)
        if abs(new / value - 1) < 1e-4:
            break
        value = new
    return precisions(value), value
