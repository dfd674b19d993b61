"""The methods: the evidence, MC dropout, boosting, Gaussian processes; each for one split's rows."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.scipy import stats
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import moment_jax as mj
from experiments import draws
from experiments.training import Task, clipped_adam

HIDDEN = 50
MEMBERS = 3
GROUPS = 16  # networks that share a mini-batch
BATCH = 128
NUM_DRAWS = 200  # networks that predict
DECAY = 1e-4  # squared length scale of MC dropout's prior, as published
RATES = (0.005, 0.01, 0.05, 0.1)  # of MC dropout, those of the published search
FACTORS = np.geomspace(1 / 16, 16, 17)  # on its noise variance
VALIDATION = 0.2  # share of the training rows on which both are chosen
LEARNING_RATE = 0.02
NORMAL = 1.6449  # half a 90 % interval of N(0, 1)

Part = tuple[np.ndarray, np.ndarray]  # rows (N, D) and targets (N,)


class Answer(NamedTuple):
    """Of the test rows: log densities of the targets, expectations, 90 % intervals, (N,)."""

    log_density: np.ndarray
    mean: np.ndarray
    told: dict[str, float]
    interval: tuple[np.ndarray, np.ndarray] | None = None


def evidence(likelihood: Any, outputs: int) -> Callable[[Part, Part, int, int], Answer]:
    """The library's default for tables, an average of three. Nothing is chosen on rows kept apart."""

    def answer(train: Part, test: Part, seed: int, steps: int) -> Answer:
        network = mj.nn.MLP([train[0].shape[1], HIDDEN, outputs], rngs=nnx.Rngs(seed))
        options: Any = {"members": MEMBERS, "seed": seed, "max_steps": steps, "progress": False}
        model, found = mj.fit(network, likelihood, train, receipt=True, **options)
        prediction = model.predict(test[0])
        told = {"log_evidence": np.mean([x.log_evidence for x in found.evidence])}
        told["parameters"] = np.mean([x.effective_parameters for x in found.evidence])
        log_density = np.asarray(prediction.log_prob(test[1][:, None]))
        low, high = (np.asarray(end[:, 0]) for end in prediction.interval(0.9))
        return Answer(log_density, np.asarray(prediction.mean[:, 0]), told, (low, high))

    return answer


def process(train: Part, test: Part, seed: int, steps: int) -> Answer:
    """A Gaussian process with a length scale for each feature, by its marginal likelihood."""
    kernel = ConstantKernel() * RBF(np.ones(train[0].shape[1])) + WhiteKernel()
    of = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)
    return normal(
        test[1], *make_pipeline(StandardScaler(), of).fit(*train).predict(test[0], return_std=True)
    )


def normal(y: np.ndarray, mean: np.ndarray, sd: np.ndarray) -> Answer:
    """Of targets that have normal densities."""
    log_density = np.asarray(stats.norm.logpdf(y, mean, sd))
    return Answer(log_density, mean, {}, (mean - NORMAL * sd, mean + NORMAL * sd))


def ngboost(train: Part, test: Part, seed: int, steps: int) -> Answer:
    """Natural gradient boosting; as many trees as suit a fifth of the rows, then trained on all."""
    of = functools.partial(importlib.import_module("ngboost").NGBRegressor, random_state=seed)
    (held_x, x), (held_y, y) = ([part[rows] for rows in parted(len(part), seed)] for part in train)
    options = {"X_val": held_x, "Y_val": held_y, "early_stopping_rounds": 50}
    trees = of(n_estimators=2000, verbose=False).fit(x, y, **options).best_val_loss_itr
    found = of(n_estimators=max(trees, 1), verbose=False).fit(*train).pred_dist(test[0])
    return normal(test[1], found.loc, found.scale)


def catboost(train: Part, test: Part, seed: int, steps: int) -> Answer:
    """CatBoost's mean and variance, its trees chosen likewise."""
    options = {"loss_function": "RMSEWithUncertainty", "random_seed": seed, "verbose": False}
    of = functools.partial(importlib.import_module("catboost").CatBoostRegressor, **options)
    held, rest = ((train[0][rows], train[1][rows]) for rows in parted(len(train[1]), seed))
    found = of(allow_writing_files=False).fit(*rest, eval_set=held)
    chosen = {"iterations": max(found.tree_count_, 1), "learning_rate": found.learning_rate_}
    mean, variance = of(allow_writing_files=False, **chosen).fit(*train).predict(test[0]).T
    return normal(test[1], mean, variance**0.5)


def parted(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows to choose by, and the rest."""
    order, cut = np.random.default_rng(seed).permutation(count), round(VALIDATION * count)
    return order[:cut], order[cut:]


def quantiles(train: Part, test: Part, seed: int, steps: int) -> Answer:
    """Boosted trees of three quantiles, which have no density."""
    low, median, high = (
        GradientBoostingRegressor(loss="quantile", alpha=q, random_state=seed)
        .fit(*train)
        .predict(test[0])
        for q in (0.05, 0.5, 0.95)
    )
    return Answer(np.full(len(low), np.nan), median, {}, (low, high))


class Noisy(nnx.Module):
    """A perceptron with one output, the mean, or two, the mean and the log noise variance."""

    def __init__(self, num_features: int, outputs: int, key: Array) -> None:
        self.body = mj.nn.MLP([num_features, HIDDEN, outputs], rngs=nnx.Rngs(key))
        self.log_noise = nnx.Param(jnp.asarray(-1.0))

    def draw(self, rate: Array) -> tuple[Any, draws.Draw]:
        """The network as a function of its arrays, and how they are drawn."""
        arrays = nnx.to_pure_dict(nnx.state(self.body, nnx.Param))
        return draws.function_of(self.body), draws.dropout(arrays, rate)

    def log_density(self, outputs: Array, y: Array, factor: Array | float = 1.0) -> Array:
        """Of targets (N,), given outputs (..., N, O)."""
        own = outputs[..., 1] if outputs.shape[-1] == 2 else self.log_noise[...]
        return stats.norm.logpdf(y, outputs[..., 0], jnp.sqrt(factor * jnp.exp(own)))


def loss(model: Any, given: Any, step: Array) -> Array:
    """The loss of MC dropout for each row, on a mini-batch; each part of it uses its own network."""
    key, rate, x, y = given
    row_key, draw_key = jax.random.split(jax.random.fold_in(key, step))
    rows = jax.random.randint(row_key, (BATCH,), 0, len(y))
    network, draw = model.draw(rate)
    outputs = draws.outputs(network, draw, draw_key, x[rows], GROUPS)
    squares = sum(jnp.sum(w**2) for w in jax.tree.leaves(nnx.state(model.body, nnx.Param)))
    decay = DECAY * (1 - rate) * squares / 2 / len(y)
    return decay - model.log_density(outputs, y[rows]).mean()


@functools.cache
def programs(num_features: int, outputs: int, steps: int) -> Any:
    """The first state of a key, the updates at several rates and the scores, compiled once."""
    task = Task("", loss, clipped_adam(LEARNING_RATE, steps), steps)
    training, _ = task.start(Noisy(num_features, outputs, jax.random.key(0)))

    def scores(state: Any, rate: Array, key: Array, x: Array, y: Array) -> tuple[Array, Array]:
        """Log densities for each factor on the noise, (F, N), and expectations (N,)."""
        model = training.model(state)
        network, draw = model.draw(rate)
        drawn = draws.many(network, draw, key, x, NUM_DRAWS)
        of = jax.vmap(lambda factor: model.log_density(drawn, y, factor))(jnp.asarray(FACTORS))
        return jax.nn.logsumexp(of, axis=1) - jnp.log(NUM_DRAWS), drawn[..., 0].mean(axis=0)

    start = jax.jit(lambda key: task.start(Noisy(num_features, outputs, key))[1])
    advance = jax.vmap(training.advance, (None, (None, 0, None, None), None, None))
    return start, jax.jit(advance), jax.jit(jax.vmap(scores, (0, 0, None, None, None)))


def dropout(outputs: int) -> Callable[[Part, Part, int, int], Answer]:
    """MC dropout (Gal and Ghahramani, 2016), one noise variance or one that depends on the input."""

    def answer(train: Part, test: Part, seed: int, steps: int) -> Answer:
        scaler, centre, scale = StandardScaler().fit(train[0]), train[1].mean(), train[1].std()
        (x, y), (tx, ty) = (
            (scaler.transform(rows).astype("f4"), ((t - centre) / scale).astype("f4"))
            for rows, t in (train, test)
        )
        held, rest = parted(len(y), seed)
        start, advance, scores = programs(x.shape[1], outputs, steps)
        state, key = start(jax.random.key(seed)), jax.random.key(seed)
        rates = np.asarray(RATES, "f4")

        def trained(rates: np.ndarray, rows: np.ndarray) -> Any:
            return advance(state, (key, rates, x[rows], y[rows]), jnp.int32(0), jnp.int32(steps))[0]

        found = scores(trained(rates, rest), rates, key, x[held], y[held])[0].mean(axis=-1)
        best, factor = np.unravel_index(np.argmax(found), found.shape)
        last = trained(rates[[best]], np.concatenate([held, rest]))
        log_density, mean = (a[0] for a in scores(last, rates[[best]], key, tx, ty))
        chosen = {"rate": float(rates[best]), "noise_factor": float(FACTORS[factor])}
        own = np.asarray(log_density[factor]) - np.log(scale)
        return Answer(own, centre + scale * np.asarray(mean), chosen)

    return answer


METHODS = {
    "evidence": ("evidence, noise of the input", evidence(mj.HeteroscedasticGaussian(), 2)),
    "evidence_one": ("evidence, one noise", evidence(mj.Gaussian(), 1)),
    "dropout": ("MC dropout", dropout(1)),
    "dropout_noise": ("MC dropout, noise of the input", dropout(2)),
    "process": ("Gaussian process", process),
    "quantiles": ("boosted quantiles", quantiles),
    **{
        of.__name__: (name, of)
        for name, of in (("NGBoost", ngboost), ("CatBoost, RMSEWithUncertainty", catboost))
        if importlib.util.find_spec(of.__name__)
    },
}
"""By the names that the command line takes; two packages that need not be here."""
