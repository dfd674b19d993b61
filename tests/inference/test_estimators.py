"""The estimators behave as scikit-learn's own, by scikit-learn's own suite."""

from __future__ import annotations

import warnings

import jax
import pytest

pytest.importorskip("sklearn")
from sklearn.utils.estimator_checks import check_estimator

import moment_jax as mj


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [mj.MomentRegressor, mj.MomentClassifier])
def test_scikit_learn_accepts_it(estimator):
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn's about its own checks
        check_estimator(estimator(num_hidden=8, max_steps=100, learning_rate=0.05, validation=0.0))
