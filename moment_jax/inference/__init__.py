"""From data to beliefs: Laplace approximations of trained networks, and training by the ELBO."""

import importlib
from typing import Any

from moment_jax.inference.fitted import Fitted
from moment_jax.inference.fitting import TableNetwork, fit
from moment_jax.inference.laplace_approximation import LaplaceReceipt, laplace

__all__ = ["Fitted", "LaplaceReceipt", "TableNetwork", "fit", "laplace"]

ESTIMATORS = ("MomentClassifier", "MomentRegressor")


def __getattr__(name: str) -> Any:
    """Import the estimators on first use, because they need scikit-learn."""
    if name in ESTIMATORS:
        return getattr(importlib.import_module("moment_jax.inference.estimators"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
