"""scikit-learn estimators on top of `fit`, for tables; needs the extra `moment_jax[sklearn]`."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data

from moment_jax.inference.fitting import fit
from moment_jax.objectives import Categorical, Gaussian


class _MomentEstimator(BaseEstimator):
    """The settings that both estimators share."""

    def __init__(
        self,
        *,
        num_hidden: int = 32,
        validation: float = 0.15,
        max_steps: int = 3000,
        patience: int = 6,
        learning_rate: float | None = None,
        progress: bool | None = False,
        random_state: Any = 0,
    ) -> None:
        self.num_hidden = num_hidden
        self.validation = validation
        self.max_steps = max_steps
        self.patience = patience
        self.learning_rate = learning_rate
        self.progress = progress
        self.random_state = random_state

    def _fit(self, x: Any, y: np.ndarray, likelihood: type) -> None:
        settings = self.get_params()
        seed = check_random_state(settings.pop("random_state")).randint(2**31 - 1)
        self.fitted_ = fit(None, (x, y), likelihood, seed=int(seed), **settings)
        self.n_iter_ = self.fitted_.history[-1][0]

    def _inputs(self, x: Any) -> np.ndarray:
        check_is_fitted(self)
        return validate_data(self, x, reset=False, dtype=np.float64)


class MomentRegressor(RegressorMixin, _MomentEstimator):
    """Regression with a predictive standard deviation, by `mj.fit(None, (X, y), Gaussian)`.

    Args:
      num_hidden: hidden units beside the linear model.
      validation: share of the data held out for early stopping and the noise.
      max_steps: largest number of Adam steps.
      patience: stop after this many evaluations, 50 steps apart, without improvement.
      learning_rate: None means 0.01.
      progress: show a progress bar; None means if stderr is a terminal.
      random_state: integer, `numpy.random.RandomState` or None.

    Attributes: `fitted_`, what `mj.fit` returns; `n_iter_`; `n_features_in_`.

    >>> x = np.linspace(-1, 1, 50)[:, None]
    >>> mean, sd = MomentRegressor(max_steps=300).fit(x, x[:, 0]).predict(x, return_std=True)
    >>> mean.shape, sd.shape
    ((50,), (50,))
    """

    def fit(self, X: Any, y: Any) -> MomentRegressor:  # noqa: N803  (scikit-learn's name)
        """Fit to X (N, D) and y (N,) or (N, outputs)."""
        x, y = validate_data(
            self, X, y, dtype=np.float64, y_numeric=True, multi_output=True, ensure_min_samples=2
        )
        self._one_output = np.ndim(y) == 1
        self._fit(x, np.asarray(y, np.float64), Gaussian)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:  # noqa: N803
        """The mean, or mean and standard deviation (noise included), in the shape of y."""
        x = self._inputs(X)  # raises if not fitted
        mean, sd = self.fitted_.predict(x)
        if self._one_output:
            mean, sd = mean[:, 0], sd[:, 0]
        return (mean, sd) if return_std else mean

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class MomentClassifier(ClassifierMixin, _MomentEstimator):
    """Classification with averaged probabilities, by `mj.fit(None, (X, y), Categorical)`.

    The arguments are those of `MomentRegressor`.

    Attributes: `fitted_`, what `mj.fit` returns; `classes_`; `n_iter_`; `n_features_in_`.

    >>> x = np.linspace(-1, 1, 50)[:, None]
    >>> labels = np.where(x[:, 0] > 0, "high", "low")
    >>> str(MomentClassifier(max_steps=300).fit(x, labels).predict([[0.9]])[0])
    'high'
    """

    def fit(self, X: Any, y: Any) -> MomentClassifier:  # noqa: N803
        """Fit to X (N, D) and labels (N,) of any type."""
        x, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"Classifier can't train when only one class is present. Got {self.classes_[0]!r}."
            )
        self._fit(x, labels, Categorical)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        """Predictive probabilities, (N, classes), in the order of `classes_`."""
        x = self._inputs(X)  # raises if not fitted
        return self.fitted_.predict_proba(x)

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """The most probable class of each row."""
        probabilities = self.predict_proba(X)  # raises if not fitted
        return self.classes_[np.argmax(probabilities, axis=1)]
