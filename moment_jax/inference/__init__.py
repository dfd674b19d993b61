"""From data to beliefs: of trained networks, calibrated or by Laplace; by the evidence or the ELBO."""

from moment_jax.inference.calibration import CalibrationReceipt, calibrate
from moment_jax.inference.fitting import FitReceipt, fit
from moment_jax.inference.laplace_approximation import LaplaceReceipt, laplace
from moment_jax.inference.training import Training

__all__ = [
    "CalibrationReceipt", "FitReceipt", "LaplaceReceipt", "Training", "calibrate", "fit", "laplace",
]  # fmt: skip
