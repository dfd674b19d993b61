"""The marginal likelihood (evidence) of a Laplace approximation, and the prior precision it gives."""

from __future__ import annotations

import dataclasses

import numpy as np

LOG_RANGE = (-14.0, 18.0)  # of the prior precision: 1e-6 to 7e7
BISECTIONS = 60


@dataclasses.dataclass(frozen=True)
class Piece:
    """One array of weights.

    Args:
      eigenvalues: of the curvature summed over examples at noise variance 1; one for each weight.
      square: |w - prior mean|^2.
    """

    eigenvalues: np.ndarray
    square: float


def optimal_precision(pieces: list[Piece], noise: float) -> float:
    """The prior precision d that maximises the evidence, limited to 1e-6 ... 7e7.

    It is the root of sum l / (l + d) = d |w - prior mean|^2, found by bisection. The root is unique: the
    left side falls in d and the right side rises.

    Source: MacKay, "Bayesian interpolation" (1992), Eq. 4.
    """
    values = np.concatenate([piece.eigenvalues.ravel() for piece in pieces]) / noise
    square = sum(piece.square for piece in pieces)
    low, high = LOG_RANGE
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        precision = np.exp(middle)
        rising = np.sum(values / (values + precision)) > precision * square
        low, high = (middle, high) if rising else (low, middle)
    return float(np.exp((low + high) / 2))


def log_evidence(
    groups: list[list[Piece]], precisions: list[float], noise: float, log_likelihood: float
) -> float:
    """Log p(y | w) - 1/2 sum_groups (d |w - prior mean|^2 + sum log(1 + l / d)), nats."""
    total = log_likelihood
    for pieces, precision in zip(groups, precisions, strict=True):
        for piece in pieces:
            logs = np.log1p(piece.eigenvalues / (noise * precision))
            total -= 0.5 * (precision * piece.square + np.sum(logs))
    return float(total)


def effective_parameters(groups: list[list[Piece]], precisions: list[float], noise: float) -> float:
    """Sum of l / (l + d): the number of weights that the data determine."""
    return float(
        sum(
            np.sum(piece.eigenvalues / (piece.eigenvalues + noise * precision))
            for pieces, precision in zip(groups, precisions, strict=True)
            for piece in pieces
        )
    )


def kronecker_variances(
    rows: np.ndarray, columns: np.ndarray, precision: float
) -> list[np.ndarray]:
    """Variances a_i b_j closest to 1 / (rows_i columns_j + precision).

    Minimises KL(exact || product) between Gaussians with the same eigenvectors, one factor at a time.
    Exact for precision 0, and for equal rows or columns.
    """
    exact = 1 / (rows[:, None] * columns[None, :] + precision)
    a, b = np.ones_like(rows), np.ones_like(columns)
    for _ in range(100):
        before = a
        b = np.mean(exact / a[:, None], axis=0)
        a = np.mean(exact / b[None, :], axis=1)
        if np.max(np.abs(a / before - 1)) < 1e-6:
            break
    return [a, b]
