"""Scores of class probabilities, of their calibration, and of how they tell other images."""

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn.metrics import average_precision_score, roc_auc_score

from experiments.predictions import calibration_error, entropy


def detection(known: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """How well the entropy tells others from known ones (N, C): AUROC, and AUPR (others positive)."""
    score = np.concatenate([entropy(known), entropy(other)])
    is_other = np.repeat([0, 1], [len(known), len(other)])
    return {
        "auroc": float(roc_auc_score(is_other, score)),
        "aupr": float(average_precision_score(is_other, score)),
    }


def calibrated_ece(probabilities: np.ndarray, draws: int = 200) -> float:
    """The mean ECE of predictions (N, C) whose labels are drawn from themselves: the score's floor.

    So many examples do not bring the ECE of a perfectly calibrated method to zero.
    """
    confidence = probabilities.max(axis=1)
    hits = np.random.default_rng(0).random((draws, len(confidence))) < confidence
    return float(calibration_error(confidence, hits).mean())


def tempered(probabilities: np.ndarray, temperature: float) -> np.ndarray:
    """Probabilities (..., C) to the power of 1 / temperature, normalised: more doubt above 1."""
    return softmax(np.log(np.maximum(probabilities, 1e-30)) / temperature, axis=-1)


def best_temperature(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The temperature in [1/4, 4] with the best NLL of probabilities (..., C), over all of `labels`."""
    logs = np.log(np.maximum(probabilities, 1e-30))

    def nll(log_temperature: float) -> float:
        given = log_softmax(logs / np.exp(log_temperature), axis=-1)
        return -float(np.take_along_axis(given, labels[..., None], axis=-1).mean())

    found = minimize_scalar(nll, bounds=(-np.log(4), np.log(4)), method="bounded")
    return float(np.exp(found.x))
