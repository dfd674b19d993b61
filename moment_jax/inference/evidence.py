"""Prior precision and noise by the marginal likelihood of a Laplace approximation."""

from __future__ import annotations

import dataclasses

import numpy as np

LOG_RANGE = (-14.0, 18.0)  # of the prior precision: e^-14 is 1e-6, e^18 is 7e7
BISECTIONS = 60


@dataclasses.dataclass(frozen=True)
class Piece:
    """One array of weights: eigenvalues of its curvature (noise variance 1), and its square.

    Args:
      eigenvalues: of the curvature summed over examples, of any shape, one for each weight.
      square: |w - prior mean|^2.
    """

    eigenvalues: np.ndarray
    square: float


def optimal_precision(pieces: list[Piece], noise: float) -> float:
    """The prior precision d of highest evidence: the root of sum l / (l + d) = d |w - prior mean|^2.

    The left side falls in d and the right side rises, so the root is the only one, and bisection finds
    it; it is kept between 1e-6 and 7e7.

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
    """Sum l / (l + d): how many weights the data have determined."""
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

    The least KL(exact || product) of two Gaussians with the same eigenvectors; each update solves for
    one factor exactly. It is exact for precision 0, and for rows or columns that are all alike.
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
