"""`fit`: a `Bayesian` from data in one call, trained by the analytic ELBO or the evidence."""

import functools
import math
import numbers
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax import Array

from moment_jax import objectives
from moment_jax.covariance import Covariance
from moment_jax.inference import data as checks
from moment_jax.inference.evidence import EVIDENCE_RATE, EVIDENCE_STEPS, MOST_WEIGHTS, by_evidence
from moment_jax.inference.laplace_approximation import LaplaceReceipt
from moment_jax.inference.standardised import Standardised, columns, columns_of
from moment_jax.inference.training import STEPS_AT_ONCE, Training
from moment_jax.nn import PriorScale
from moment_jax.nn import likelihood as likelihoods
from moment_jax.nn.bayesian import Bayesian
from moment_jax.nn.mixture import Mixture
from moment_jax.nn.plain import FLOATING, as_nnx
from moment_jax.objectives import Gaussian

Data = tuple[tuple[np.ndarray, ...], np.ndarray]

TRAINED = nnx.All(nnx.Param, nnx.Not(PriorScale))  # the prior's optimum has a closed form
ADAM = functools.cache(optax.adam)  # one object for each rate: trainings alike are compiled once
WARM_UP = 3.0  # steps of KL warm-up, times the learning rate
BATCH_SIZES = (32, 64, 128, 256)  # few, so that data of other sizes need no other programs
# Of outputs in a batch: with 300 classes, batches of 64 take a quarter of the time.
MOST_PAIRS = 2**23
FEWEST_HELD_OUT = 10
SETTLED = 0.05  # nats for each example: the last change of the log evidence


class FitReceipt(NamedTuple):
    """The course of a training: an evaluation gives steps, -ELBO / N and the held-out NLL, in nats.

    For the evidence, -log evidence / N stands in the place of -ELBO / N.
    """

    history: list[tuple[int, float, float]]  # NaN without held-out data
    converged: bool  # whether the held-out NLL improved no more, or the evidence changed no more
    objective: str  # "elbo" or "evidence"
    reason: str  # why that was taken
    evidence: tuple[LaplaceReceipt, ...] = ()  # of each member, in standard units


def fit(
    network: nnx.Module | linen.Module | Bayesian,
    likelihood: Any,
    data: tuple[Any, Any],
    *,
    objective: str | None = None,
    members: int = 1,
    held_out: float | tuple[Any, Any] | None = None,
    random: Any = None,
    max_steps: int | None = None,
    patience: int | None = None,
    learning_rate: float | None = None,
    kl_weight: float | None = None,
    relative_scale: float | None = None,
    structure: type[Covariance] | None = None,
    seed: int = 0,
    progress: bool | None = None,
    receipt: bool = False,
) -> Any:
    """Train a belief about a network's weights, by the evidence or by the analytic ELBO, with Adam.

    **"evidence"**, for networks whose weights the data determine, of at most 5,000: a MAP estimate, ten
    times on the way the prior precision of each array and the noise of `mj.Gaussian()` re-estimated by
    MacKay's evidence, from the exact Gauss-Newton matrix of all weights. The belief is the inverse, the
    joint covariance of all weights, and the model is linearised in them. The noise is the same share of
    each output's variance. Nothing is held out.

    **"elbo"**, for all others: independent Gaussian weights (`Factorized`). The prior scale of each
    array is learned, and so is the noise of `mj.Gaussian()`. Training stops when the negative log
    predictive density of held-out data has not improved for `patience` times 50 steps, and keeps the
    best point. In a large network with little data the full ELBO can erase the fit, so points from
    during the KL's warm-up may be the best.

    Columns may be in any unit: floating inputs (N, D) and the targets of a Gaussian likelihood are
    brought to mean 0 and standard deviation 1 inside the model, whose network is then a `Standardised`.
    Images, sequences and integers stay as they are: scale them to about one.

    Args:
      network: a Flax network in inference mode, with outputs (N, ..., C), which is not changed; or a
        `mj.Bayesian`, which is trained in place, as it is: nothing is standardised.
      likelihood: `mj.Categorical()`, `mj.Bernoulli()`, `mj.Gaussian()` to learn the noise of each
        output, or `mj.Gaussian(noise_variance)`, a number. Of a `Bayesian` None, for its own.
      data: inputs, an array (N, ...) or a tuple of them, and targets: (N, ...) integers from 0 for
        Categorical, else numbers in the outputs' shape.
      objective: "evidence", "elbo", or None: the evidence for a Gaussian likelihood, a plain network of
        at most 5,000 weights and none of the ELBO's own options below; else the ELBO. The receipt says
        which, and so does a line on stderr where progress is shown.
      members: number of trainings, by the evidence, of which a `mj.nn.Mixture` is the average; the first
        begins at the network's weights, the others at matrices drawn anew with their mean and spread.
      held_out: the ELBO's: share of the data to hold out, or (inputs, targets); None for .15. If the
        share is fewer than 10 examples, nothing is held out and training takes `max_steps`.
      random: the ELBO's: an NNX filter of the random weights; None for all. The others are trained too.
      max_steps: largest number of Adam steps, at least 1; None for 3,000, in batches of up to 256; by
        the evidence for 20,000, in batches of up to 64, which are all taken.
      patience: the ELBO's: stop after this many evaluations, 50 steps apart, without improvement; None
        for 6.
      learning_rate: of Adam; None for 1e-3; by the evidence for 1e-2, which falls to a twentieth.
      kl_weight: the ELBO's: of the KL divergence; 1, or None, is the ELBO, 0 leaves it out.
      relative_scale: the ELBO's: initial standard deviation of a weight, over the root mean square of
        its array; None for .05.
      structure: the ELBO's: of the covariances; None for `mj.Separable`.
      seed: of the held-out split, the batches and the members' starts.
      progress: show a progress bar (tqdm, on stderr); None means if stderr is a terminal.
      receipt: also return a `FitReceipt`: the history, whether it converged, which objective and why.

    Returns:
      A `mj.Bayesian`, or a `mj.nn.Mixture` of several members: `model.predict(x)`,
      `model.log_prob(x, y)`.

    Raises:
      TypeError, ValueError: if an argument is invalid, or the training diverges. It warns if `max_steps`
        ended while the held-out density was still improving.

    >>> import moment_jax as mj
    >>> x = np.linspace(-100, 100, 60)[:, None]
    >>> y = 2 * x + 5 * np.random.default_rng(0).normal(size=x.shape)
    >>> net = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> model, found = mj.fit(net, mj.Gaussian(), (x, y), max_steps=2000, receipt=True)
    >>> prediction = model.predict(x)
    >>> found.objective, prediction.mean.shape, bool(4 < prediction.sd.mean() < 6)
    ('evidence', (60, 1), True)
    """
    settings = {"patience": patience, "learning_rate": learning_rate, "kl_weight": kl_weight or 1}
    checks.positive("fit", max_steps=max_steps, members=members, **settings)
    own = {
        "held_out": held_out, "random": random, "patience": patience, "kl_weight": kl_weight,
        "relative_scale": relative_scale, "structure": structure,
    }  # fmt: skip
    objective, reason = _chosen(objective, network, likelihood, members, own)
    shown = sys.stderr.isatty() if progress is None else progress
    if shown:
        print(f"fit: objective={objective!r}, for {reason}", file=sys.stderr)
    if isinstance(network, Bayesian) and network.kind is not None:
        likelihood = _own_likelihood(network, likelihood)
    else:
        checks.likelihood("fit", likelihood)
    plain = as_nnx(network.at_means() if isinstance(network, Bayesian) else network)
    inputs, targets, shape = checks.data("fit", plain, likelihood, data)
    history: list[tuple[int, float, float]] = []
    if objective == "evidence":
        steps, rate = max_steps or EVIDENCE_STEPS, learning_rate or EVIDENCE_RATE
        bar = _bar(steps, shown)

        def tell(step: int, evidence: float) -> None:
            history.append((step, -evidence / len(targets), math.nan))
            if bar is not None:
                bar.update(step - bar.n)
                bar.set_postfix(loss=f"{history[-1][1]:.3f}")

        models, found = by_evidence(
            plain, likelihood, inputs, targets, shape,
            members=int(members), steps=steps, rate=rate, seed=seed, tell=tell,
        )  # fmt: skip
        if bar is not None:
            bar.close()
        model = models[0] if members == 1 else Mixture(models)
        settled = abs(history[-1][1] - history[-2][1]) < SETTLED
        told = FitReceipt(history, settled, objective, reason, found)
        return (model, told) if receipt else model
    held_out = 0.15 if held_out is None else held_out
    max_steps, patience, learning_rate = max_steps or 3000, patience or 6, learning_rate or 1e-3
    kl_weight = 1.0 if kl_weight is None else kl_weight
    if isinstance(held_out, numbers.Real):
        (inputs, targets), held = _divided((inputs, targets), float(held_out), seed)
    else:
        held = checks.data("fit", plain, likelihood, held_out, inputs)[:2]
    of_inputs = list(map(columns_of, inputs))
    of_targets = columns(targets) if isinstance(likelihood, Gaussian) else None
    given = {"random": random, "relative_scale": relative_scale, "structure": structure}
    options = {name: value for name, value in given.items() if value is not None}
    if isinstance(network, Bayesian):
        model = _as_it_is(network, options, of_inputs)
    else:
        if any(of_inputs) or of_targets:
            plain = Standardised(plain, of_inputs, of_targets)
        model = Bayesian(plain, **{"relative_scale": 0.05, "learn_prior": True, **options})
    if model.kind is None:
        model.kind, model.noise = likelihoods.stored(likelihood)
        if isinstance(model.noise, likelihoods.LogNoise) and of_targets:
            model.noise.set_value(jnp.asarray(2 * np.log(of_targets[1])))

    warm_up, size = min(round(WARM_UP / learning_rate), max_steps // 2), len(targets)
    batch = _batch_size(size, shape[-1])
    batches = _shuffled((inputs, targets), seed, batch)

    def chunk(first: int) -> Any:
        weights = objectives.kl_warmup(first + jnp.arange(STEPS_AT_ONCE), warm_up, kl_weight)
        return *next(batches), jnp.broadcast_to(weights, STEPS_AT_ONCE), float(size)

    _fit_priors(model)
    adam = ADAM(learning_rate)
    training, start = Training.of(model, adam, _loss, wrt=TRAINED, finish=_fit_priors)
    best, best_nll, best_at, nll = start, math.inf, 0, math.nan
    bar = _bar(max_steps, shown)
    for step, state, value in training.run(start, chunk, max_steps):
        loss = float(value)
        if held is not None and math.isfinite(loss):
            log_probs = training.model(state).log_prob(*held, batch_size=batch)
            nll = -float(log_probs.sum()) / len(held[1])
        history.append((step, loss, nll))
        if bar is not None:
            bar.update(step - bar.n)
            bar.set_postfix(loss=f"{loss:.3f}", held_out=f"{nll:.3f}")
        if not math.isfinite(loss) or (held is not None and not math.isfinite(nll)):
            raise ValueError(
                f"`fit` diverged: after {step} steps -ELBO / N is {loss}, the NLL {nll}. Standardise "
                f"inputs and targets, or take a learning_rate below {learning_rate}."
            )
        if held is None or nll < best_nll - 1e-3:
            best, best_nll, best_at = state, nll, len(history)
        elif sum(done > warm_up for done, *_ in history[best_at:]) >= patience:
            break
    if bar is not None:
        bar.close()
    converged = len(history) - best_at >= patience
    if held is not None and not converged:
        warnings.warn(
            "`fit` stopped without having converged: the held-out density was still improving at the "
            f"end of {max_steps} steps. Take more max_steps, or a larger learning_rate.",
            stacklevel=2,
        )
    nnx.update(model, best[0])
    return (model, FitReceipt(history, converged, objective, reason)) if receipt else model


def _chosen(
    objective: str | None, network: Any, likelihood: Any, members: int, own: dict[str, Any]
) -> tuple[str, str]:
    """The objective, and the reason for it; `own` are the ELBO's own options."""
    need = functools.partial(checks.need, "fit")
    right = objective in ("evidence", "elbo", None)
    need(right, 'objective="evidence", "elbo" or None', repr(objective))
    need(members == int(members), "a whole number of members", members)
    trained = isinstance(network, Bayesian)
    known = () if trained else jax.tree.leaves(nnx.state(as_nnx(network), FLOATING))
    size, given = sum(x.size for x in known), [name for name, x in own.items() if x is not None]
    reasons = {
        "it was asked for": objective == "elbo",
        "a Bayesian, which is trained itself": trained,
        f"{', '.join(given)}, for the ELBO alone": given,
        f"{size:,} weights, of 1 to {MOST_WEIGHTS:,}": not 0 < size <= MOST_WEIGHTS,
        "a likelihood that is not Gaussian": objective is None
        and not isinstance(likelihood, Gaussian),
    }
    against = next((reason for reason, holds in reasons.items() if holds), "")
    if objective == "evidence":
        rule = f"a plain network of 1 to {MOST_WEIGHTS:,} weights for the evidence"
        need(not against, rule, against, 'Use objective="elbo".')
    need(
        members == 1 or not against,
        "the evidence for several members",
        f"the ELBO, for {against}",
        'Give objective="evidence".',
    )
    return (
        "elbo" if against else "evidence",
        against or f"{size:,} weights, of 1 to {MOST_WEIGHTS:,}",
    )


def _loss(model: Bayesian, data: Any, step: Array) -> Array:
    """-ELBO for each example of the data, of one of the batches (steps, batch, ...)."""
    *batches, size = data
    inputs, targets, weight = jax.tree.map(lambda x: x[step % STEPS_AT_ONCE], batches)
    count = len(targets)
    # A batch may hold more examples than the data, some of them twice.
    weighted = weight * count / size
    return -model.elbo(inputs, targets, dataset_size=count, kl_weight=weighted)


def _fit_priors(model: Bayesian) -> None:
    for belief in model.owned.values():
        belief.fit_prior()


def _as_it_is(model: Bayesian, options: dict[str, Any], columns: list[Any]) -> Bayesian:
    """The model that is trained in place; warns of columns in other units."""
    if options or model.batch_axes != 1:
        raise ValueError(
            f"`fit` trains a Bayesian as it is, of batch_axes=1. Got batch_axes={model.batch_axes}"
            f"{''.join(f', {name}' for name in options)}. Set them in mj.Bayesian()."
        )
    odd = [sd for each in columns if each for sd in each[1] if not 0.1 <= sd <= 10]
    if odd:
        warnings.warn(
            "`fit` trains a Bayesian on inputs as they are. Got a column of standard deviation "
            f"{odd[0]:.3g}. Bring columns to about one, or give the plain network.",
            stacklevel=3,
        )
    return model


def _own_likelihood(model: Bayesian, likelihood: Any) -> Any:
    """The likelihood of a `Bayesian`, which the given one has to be."""
    own = Gaussian() if isinstance(model.noise, likelihoods.LogNoise) else model.likelihood
    flat: Any = map(jax.tree.flatten, (own, own if likelihood is None else likelihood))
    (one, kind), (other, same) = flat
    if not isinstance(own, checks.KINDS) or kind != same or not all(map(np.allclose, one, other)):
        raise ValueError(
            "`fit` trains a Bayesian with its own likelihood: mj.Categorical, mj.Bernoulli or "
            f"mj.Gaussian. Got {likelihood!r}, and {own} of the model. Give None for its own."
        )
    return own


def _divided(data: Data, share: float, seed: int) -> tuple[Data, Data | None]:
    """Split the data at random into training and held-out data."""
    if not 0 <= share < 1:
        raise ValueError(
            f"`fit` needs held_out as data, or a share from 0 to below 1. Got {share}."
        )
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


def _bar(total: int, wanted: bool | None) -> Any:
    """A tqdm progress bar, hidden unless wanted (by default on a terminal); None without tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    shown = sys.stderr.isatty() if wanted is None else wanted
    return tqdm(total=total, unit="step", leave=False, disable=not shown)
