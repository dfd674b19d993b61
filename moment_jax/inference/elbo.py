"""Training by the ELBO, one sampled network a step, with a KL warm-up and early stopping."""

import functools
import math
import numbers
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from moment_jax import objectives
from moment_jax.covariance import Diagonal
from moment_jax.inference import data as checks
from moment_jax.inference import standardised
from moment_jax.inference.training import STEPS_AT_ONCE, Training
from moment_jax.nn import PriorScale
from moment_jax.nn import likelihood as likelihoods
from moment_jax.nn.bayesian import Bayesian
from moment_jax.nn.check import Claim, drawn, of_draw
from moment_jax.nn.static import Static
from moment_jax.progress import bar

Data = tuple[tuple[np.ndarray, ...], np.ndarray]

ELBO_STEPS, ELBO_RATE = 3000, 1e-3
TRAINED = nnx.All(nnx.Param, nnx.Not(PriorScale))  # the prior's optimum has a closed form
ADAM = functools.cache(optax.adam)  # one object for each rate: trainings alike are compiled once
WARM_UP = 3.0  # steps of KL warm-up, times the learning rate
BATCH_SIZES = (32, 64, 128, 256)  # few, so that data of other sizes need no other programs
# Of outputs in a batch: with 300 classes, batches of 64 take a quarter of the time.
MOST_PAIRS = 2**23
FEWEST_HELD_OUT = 10
DRAWS, MORE_DRAWS = 16, 300  # sampled networks: to keep the best state by, to compare the pass with


class Course:
    """What a training of so many steps tells: its history, and a progress bar."""

    def __init__(self, total: int, shown: bool) -> None:
        self.total, self.history = total, list[tuple[int, float, float]]()
        self.bar = bar(shown, "step", total=total)

    def __call__(self, step: int, loss: float, nll: float = math.nan) -> None:
        """After so many steps: the loss, and the held-out NLL if data are held out."""
        self.history.append((step, loss, nll))
        self.bar.update(step - self.bar.n)
        self.bar.set_postfix(loss=f"{loss:.3f}", held_out=f"{nll:.3f}")


def by_elbo(
    plain: nnx.Module, model: Bayesian | None, likelihood: Any, inputs: tuple[np.ndarray, ...],
    targets: np.ndarray, shape: tuple[int, ...], course: Course, *, learning_rate: float, seed: int,
    certain: bool, own: dict[str, Any],
) -> tuple[Bayesian, bool]:  # fmt: skip
    """The trained model, and whether training converged; see `fit`, of which `own` are options.

    `model` is trained in place if it is given; else one is made of the plain network, which stays plain
    if it is to be `certain`: its ELBO is the log likelihood.
    """
    options: Any = {name: value for name, value in own.items() if value is not None}
    held_out, patience = options.pop("held_out", 0.15), options.pop("patience", 6)
    max_steps, kl_weight = course.total, options.pop("kl_weight", 1.0)
    if isinstance(held_out, numbers.Real):
        (inputs, targets), held = _divided((inputs, targets), float(held_out), seed)
    else:
        held = checks.data("fit", plain, likelihood, held_out, inputs)[:2]
    of_inputs = list(map(standardised.columns_of, inputs))
    of_targets = None
    if isinstance(likelihood, checks.REAL):
        of_targets = standardised.of_outputs(likelihood, *standardised.columns(targets))
    if model is not None:
        model = _as_it_is(model, options, of_inputs)
    else:
        if any(of_inputs) or of_targets:
            rule, came = 'prior="network" where it standardises columns', "a prior in other units"
            mend = "Standardise them, and give it a mj.Bayesian(network, likelihood, prior=...)."
            checks.need("fit", options.get("prior", "network") == "network", rule, came, mend)
            plain = standardised.brought_along(
                plain, likelihood, inputs, targets, of_inputs, of_targets
            )
            plain = standardised.Standardised(plain, of_inputs, of_targets)
        defaults = {"relative_scale": 0.05, "learn_prior": True}
        model = Bayesian(plain, **defaults | options | ({"structure": Diagonal} if certain else {}))
        if certain:
            model.make_certain(plain)
    if model.kind is None:
        model.kind, model.noise = likelihoods.stored(likelihood)
        if isinstance(model.noise, likelihoods.LogNoise) and of_targets:
            model.noise.set_value(jnp.asarray(2 * np.log(of_targets[1])))

    batch = _batch_size(len(targets), shape[-1])
    apart = (inputs, targets) if held is None else held
    some = np.random.default_rng(seed).permutation(len(apart[1]))[:batch]
    some = jax.tree.map(lambda x: x[some], apart)
    model(*some[0])  # before a step is made, the pass is held to the network

    warm_up, size = min(round(WARM_UP / learning_rate), max_steps // 2), len(targets)
    batches = _shuffled((inputs, targets), seed, batch)

    def chunk(first: int) -> Any:
        weights = objectives.kl_warmup(first + jnp.arange(STEPS_AT_ONCE), warm_up, kl_weight)
        weights = jnp.broadcast_to(weights, STEPS_AT_ONCE)
        return *next(batches), weights, float(size), jax.random.key(seed)

    _fit_priors(model)
    adam = ADAM(learning_rate)
    training, start = Training.of(model, adam, _loss, wrt=TRAINED, finish=_fit_priors)
    best, best_nll, best_at, nll = start, math.inf, 0, math.nan
    for step, state, value in training.run(start, chunk, max_steps):
        loss = float(value)
        if held is not None and math.isfinite(loss):
            nll = sampled_nll(training.model(state), held, batch)
        course(step, loss, nll)
        if not math.isfinite(loss) or (held is not None and not math.isfinite(nll)):
            raise ValueError(
                f"`fit` diverged: after {step} steps -ELBO / N is {loss}, the NLL {nll}. Standardise "
                f"inputs and targets, or take a learning_rate below {learning_rate}."
            )
        if held is None or nll < best_nll - 1e-3:
            best, best_nll, best_at = state, nll, len(course.history)
        elif sum(done > warm_up for done, *_ in course.history[best_at:]) >= patience:
            break
    converged = len(course.history) - best_at >= patience
    if held is not None and not converged:
        warnings.warn(
            "`fit` stopped without having converged: the held-out density was still improving at the "
            f"end of {max_steps} steps. Take more max_steps, or a larger learning_rate.",
            stacklevel=3,
        )
    nnx.update(model, best[0])
    if model.owned:
        _compare(model, some)
    return model, converged


def sampled_nll(model: Bayesian, data: Data, batch: int) -> float:
    """NLL of an average of sampled networks, from the same random numbers at each call.

    Not of the pass, which may be too sure.
    """
    size, found, draws = len(data[1]), [], DRAWS if model.owned else 1
    for first in range(0, size, batch):
        rows = np.arange(first, first + min(batch, size)) % size
        fits = _fits(model, jax.tree.map(lambda x, rows=rows: x[rows], data), draws)
        found.append(jax.nn.logsumexp(fits, axis=0) - math.log(draws))
    return -float(jnp.concatenate(found)[:size].mean())


def _fits(model: Bayesian, data: Data, samples: int) -> Array:
    """Log likelihoods (samples, B) of sampled networks."""
    keys = jax.random.split(jax.random.key(0), samples)
    fits: Array = drawn(*nnx.split(model), *data, keys, known=Static({}))[1]
    return fits


def _compare(model: Bayesian, data: Data) -> None:
    """Warn if sampled networks do not fit one batch as the pass claims."""
    claim = Claim.of(model, data[1], model(*data[0]), _fits(model, data, MORE_DRAWS))
    if claim.holds:
        return
    owned = [belief.posterior for belief in model.owned.values()]
    of_noise, of_means = (sum(map(jnp.sum, x)) for x in (
        [x.marginal_variance() for x in owned], [x.mean**2 for x in owned]
    ))  # fmt: skip
    cure = "Train in mj.Separable" if model.structure is Diagonal else "Take fewer steps"
    warnings.warn(
        f"`fit`: the pass in {model.structure.__name__} is wrong for this posterior, whose standard "
        f"deviations are {(of_noise / of_means) ** 0.5:.2g} of the weights' size. Expected log "
        f"likelihood: {claim}. {cure}, or average networks of model.sample(key).",
        stacklevel=4,
    )


def _loss(model: Bayesian, data: Any, step: Array) -> Array:
    """-ELBO for each example of the data, by one draw and one of the batches (steps, batch, ...).

    Its gradient is unbiased, at a ninth to a fifth of a pass's price; training through a pass goes where
    that is wrong.
    """
    *batches, size, key = data
    inputs, targets, weight = jax.tree.map(lambda x: x[step % STEPS_AT_ONCE], batches)
    _, fits = of_draw(model, inputs, targets, jax.random.fold_in(key, step), {})
    return weight * model.kl() / size - fits.mean()


def _fit_priors(model: Bayesian) -> None:
    for belief in model.owned.values():
        belief.fit_prior()


def _as_it_is(model: Bayesian, options: dict[str, Any], columns: list[Any]) -> Bayesian:
    """The model that is trained in place; warns of columns in other units."""
    rule, mend = "no options of a Bayesian, which it trains as it is", "Set them in mj.Bayesian()."
    checks.need("fit", not options, rule, ", ".join(options), mend)
    odd = [sd for each in columns if each for sd in each[1] if not 0.1 <= sd <= 10]
    if odd:
        warnings.warn(
            "`fit` trains a Bayesian on inputs as they are. Got a column of standard deviation "
            f"{odd[0]:.3g}. Bring columns to about one, or give the plain network.",
            stacklevel=4,
        )
    return model


def _divided(data: Data, share: float, seed: int) -> tuple[Data, Data | None]:
    """Split the data at random into training and held-out data."""
    checks.need("fit", 0 <= share < 1, "held_out as data, or a share from 0 to below 1", share)
    held = round(share * len(data[1]))
    if held < FEWEST_HELD_OUT:
        return data, None
    order = np.random.default_rng(seed).permutation(len(data[1]))
    train, apart = (jax.tree.map(lambda x, r=r: x[r], data) for r in (order[held:], order[:held]))
    return train, apart


def _batch_size(size: int, num_outputs: int) -> int:
    """The smallest of `BATCH_SIZES` that holds all examples, else the largest within `MOST_PAIRS`."""
    fit = [b for b in BATCH_SIZES if b * num_outputs**2 <= MOST_PAIRS] or BATCH_SIZES[:1]
    return next((b for b in fit if b >= size), fit[-1])


def _shuffled(data: Data, seed: int, batch: int) -> Iterator[Data]:
    """Endless groups of `STEPS_AT_ONCE` batches, (steps, batch, ...), from successive permutations.

    Every example occurs equally often, so batch averages are unbiased.
    """
    rng, count, order = np.random.default_rng(seed), STEPS_AT_ONCE * batch, np.empty(0, np.int64)
    while True:
        while order.size < count:
            order = np.append(order, rng.permutation(len(data[1])))
        rows, order = order[:count].reshape(STEPS_AT_ONCE, batch), order[count:]
        yield jax.tree.map(lambda x, rows=rows: x[rows], data)
