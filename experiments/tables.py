"""Compare `mj.fit` and Laplace approximations with well-known methods on two small tables.

Five divisions into 80 % training and 20 % test data. Inputs (and real targets) are
standardised by the training data; early stopping and weight decay are chosen on a part of those. Scores
are the test negative log-likelihood (nats, of standardised targets) and the seconds to fit, compilation
included.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from scipy import stats
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import moment_jax as mj
from experiments.command_line import Parser
from experiments.report import aligned

TASKS = {"diabetes": load_diabetes, "breast_cancer": load_breast_cancer}
MEMBERS = 5
HELD_OUT, PATIENCE, STEPS_AT_ONCE, MAX_STEPS, LEARNING_RATE = 0.15, 6, 50, 3000, 1e-2
WEIGHT_DECAYS = (1.0, 10.0, 100.0)  # of the whole data set's loss
Predict = Callable[[np.ndarray, np.ndarray], np.ndarray]  # inputs, targets -> log densities


class Split(NamedTuple):
    """One division of a table; targets are (N,) classes, or (N, 1) numbers."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    classes: bool
    seed: int


def add_arguments(parser: Parser) -> None:
    """How often the tables are divided."""
    parser.whole("--splits", 5, "divisions", least=2)


def run(args: argparse.Namespace) -> None:
    """Print a table for each task."""
    for task in TASKS:
        scores: dict[str, list[tuple[float, float]]] = {}
        for seed in range(args.splits):
            split = divided(task, seed)
            for name, method in methods(split.classes).items():
                start = time.perf_counter()
                predict = method(split)
                seconds = time.perf_counter() - start
                scores.setdefault(name, []).append((-float(np.mean(predict(*split.test))), seconds))
        rows = [["method", "NLL", "s.e.", "seconds: first", "others"]]
        for name, found in scores.items():
            nll, seconds = np.array(found).T
            error = nll.std(ddof=1) / len(nll) ** 0.5
            times = f"{seconds[0]:.1f}", f"{seconds[1:].mean():.2f}"
            rows.append([name, f"{nll.mean():.4f}", f"{error:.4f}", *times])
        print(f"{task}, {args.splits} divisions\n{aligned(rows)}\n", flush=True)


def divided(task: str, seed: int) -> Split:
    """Training and test data of one seed."""
    x, y = TASKS[task](return_X_y=True)
    classes = y.dtype.kind == "i"
    y, strata = (y, y) if classes else (y[:, None], None)
    train_x, test_x, train_y, test_y = train_test_split(
        x, y, test_size=0.2, random_state=seed, stratify=strata
    )
    scaler = StandardScaler().fit(train_x)
    train_x, test_x = (scaler.transform(a).astype(np.float32) for a in (train_x, test_x))
    if not classes:
        scaler = StandardScaler().fit(train_y)
        train_y, test_y = scaler.transform(train_y), scaler.transform(test_y)
    return Split((train_x, train_y), (test_x, test_y), classes, seed)


def methods(classes: bool) -> dict[str, Callable[[Split], Predict]]:
    """By name: from a division to log densities."""
    own: dict[str, Callable[[Split], Predict]] = {
        "mj.fit": fit,
        "laplace kfac, linearised": partial(laplace, kind="kfac", linearised=True),
        "laplace kfac, propagated": partial(laplace, kind="kfac", linearised=False),
        "laplace kfac, held out": partial(laplace, kind="kfac", linearised=True, by_held_out=True),
        "laplace last layer": partial(laplace, kind="last_layer", linearised=True),
        "one plain network": partial(ensemble, members=1),
        f"ensemble of {MEMBERS}": partial(ensemble, members=MEMBERS),
    }
    if classes:
        return own | {"LogisticRegression": logistic}
    kernel = ConstantKernel(1.0) * RBF(3.0) + WhiteKernel(0.5)
    process = GaussianProcessRegressor(
        kernel, normalize_y=True, n_restarts_optimizer=2, random_state=0
    )
    return own | {
        "BayesianRidge": partial(regression, model=BayesianRidge()),
        "GaussianProcessRegressor": partial(regression, model=process),
    }


def fit(split: Split) -> Predict:
    """`mj.fit` with its defaults."""
    likelihood = mj.objectives.Categorical if split.classes else mj.objectives.Gaussian
    return mj.fit(None, split.train, likelihood, seed=split.seed).log_prob


def laplace(split: Split, *, kind: str, linearised: bool, by_held_out: bool = False) -> Predict:
    """Laplace approximation of a plain network; prior precision by evidence or held-out data."""
    model, _ = plain(split, split.seed)
    held, rest = parts(split, split.seed)
    options: dict[str, Any] = {"kind": kind, "receipt": True}
    data = split.train
    if by_held_out:
        x, y = split.train
        data, options["held_out"] = (x[rest], y[rest]), (x[held], y[held])
    likelihood: Any = mj.objectives.Categorical() if split.classes else mj.objectives.Gaussian
    belief, receipt = mj.laplace(model, likelihood, data, **options)
    if not split.classes:
        likelihood = mj.objectives.Gaussian(receipt.noise_variance)

    def log_prob(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        moments = mj.bayesian(model, belief, linearised=linearised, structure=mj.TokenBlock)
        mean, cov = jax.jit(moments)(jnp.asarray(x))
        cov = jax.vmap(lambda c: c.to_dense()[0, :, 0, :])(cov)
        score = jax.vmap(mj.objectives.log_marginal, (None, 0, 0, 0))
        targets = jnp.asarray(y, None if split.classes else x.dtype)
        return np.asarray(score(likelihood, targets, mean, cov))

    return log_prob


def ensemble(split: Split, *, members: int) -> Predict:
    """Averaged densities of plain networks; the noise of each is its error on held-out data."""
    networks = [plain(split, 100 * split.seed + i) for i in range(members)]

    def log_prob(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        logs = [_log_density(model(jnp.asarray(x)), y, noise) for model, noise in networks]
        return np.logaddexp.reduce(logs, axis=0) - np.log(members)

    return log_prob


def parts(split: Split, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the training data that are held out, and the others."""
    size = len(split.train[1])
    held, rest = np.split(np.random.default_rng(seed).permutation(size), [round(HELD_OUT * size)])
    return held, rest


def plain(split: Split, seed: int) -> tuple[mj.inference.TableNetwork, float]:
    """A network without beliefs and its held-out error, by which steps and weight decay are chosen."""
    x, y = split.train
    model = mj.inference.TableNetwork(x.shape[1], 2 if split.classes else 1, rngs=nnx.Rngs(seed))
    graph, params = nnx.split(model)
    held, rest = parts(split, seed)
    best, best_loss = params, np.inf
    for decay in WEIGHT_DECAYS:
        state, least, since = (params, optax.adam(LEARNING_RATE).init(params)), np.inf, 0
        for _ in range(MAX_STEPS // STEPS_AT_ONCE):
            state = _steps(graph, *state, x[rest], y[rest], decay / len(rest))
            loss = float(_loss(graph, state[0], x[held], y[held]))
            least, since = (loss, 0) if loss < least else (least, since + 1)
            if loss < best_loss:
                best, best_loss = state[0], loss
            if since >= PATIENCE:
                break
    return nnx.merge(graph, best), best_loss


@partial(jax.jit, static_argnums=0)
def _steps(graph: Any, params: Any, state: Any, x: Any, y: Any, decay: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        return _loss(graph, params, x, y) + 0.5 * decay * optax.tree.norm(params, squared=True)

    def one(carry: Any, _: None) -> Any:
        params, state = carry
        updates, state = optax.adam(LEARNING_RATE).update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(one, (params, state), None, length=STEPS_AT_ONCE)[0]


def _loss(graph: Any, params: Any, x: Any, y: Any) -> jax.Array:
    """Cross-entropy of classes (N,), else mean squared error."""
    outputs = nnx.merge(graph, params)(x)
    if jnp.ndim(y) == 1:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()
    return jnp.mean((outputs - y) ** 2)


def _log_density(outputs: Any, y: np.ndarray, noise: float) -> np.ndarray:
    if y.ndim == 1:
        return np.asarray(jax.nn.log_softmax(outputs))[np.arange(len(y)), y]
    return stats.norm.logpdf(y, np.asarray(outputs), noise**0.5)[:, 0]


def logistic(split: Split) -> Predict:
    """scikit-learn's logistic regression."""
    model = LogisticRegression(max_iter=1000).fit(*split.train)
    return lambda x, y: model.predict_log_proba(x)[np.arange(len(y)), y]


def regression(split: Split, *, model: Any) -> Predict:
    """A scikit-learn model that predicts a standard deviation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a length scale of a process at its bound
        model = model.fit(split.train[0], split.train[1][:, 0])

    return lambda x, y: stats.norm.logpdf(y[:, 0], *model.predict(x, return_std=True))
