"""Classes of tables: the evidence beside logistic regression, boosted trees and a Gaussian process."""

import time
from typing import Any

import numpy as np
from flax import nnx
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import moment_jax as mj
from experiments.outputs import summary
from experiments.uci.methods import HIDDEN, MEMBERS

SETS = {"wine": load_wine, "breast_cancer": load_breast_cancer}
METHODS: dict[str, Any] = {
    "evidence, three networks": None,
    "logistic regression": LogisticRegression(),
    "gradient boosting": GradientBoostingClassifier(random_state=0),
    "Gaussian process": GaussianProcessClassifier(1.0 * RBF(1.0)),
}


def compare(name: str, folds: int, steps: int, seed: int) -> dict[str, Any]:
    """Scores of every method on one part of the rows after the other, trained on the others."""
    x, y = SETS[name](return_X_y=True)
    parts = [*StratifiedKFold(folds, shuffle=True, random_state=seed).split(x, y)]
    nll = {}
    records: dict[str, Any] = {}
    for method, sklearn in METHODS.items():
        start, found = time.perf_counter(), []
        for train, test in parts:
            if sklearn is None:
                network = mj.nn.MLP([x.shape[1], HIDDEN, y.max() + 1], rngs=nnx.Rngs(seed))
                options: Any = {"objective": "evidence", "members": MEMBERS, "max_steps": steps}
                model = mj.fit(
                    network,
                    mj.Categorical(),
                    (x[train], y[train]),
                    seed=seed,
                    progress=False,
                    **options,
                )
                probs = np.asarray(model.predict(x[test]).probs, float)
            else:
                model = make_pipeline(StandardScaler(), sklearn).fit(x[train], y[train])
                probs = model.predict_proba(x[test])
            probs /= probs.sum(axis=1, keepdims=True)
            found.append((log_loss(y[test], probs), np.mean(probs.argmax(axis=1) == y[test])))
        nll[method], accuracy = (list(map(float, column)) for column in zip(*found, strict=True))
        above = np.subtract(nll[method], nll[next(iter(nll))]).tolist()
        scores = {"nll": nll[method], "accuracy": accuracy, "nll_above_first": above}
        seconds = (time.perf_counter() - start) / folds
        records[method] = {k: summary(v) for k, v in scores.items()} | {"seconds": seconds}
    return records
