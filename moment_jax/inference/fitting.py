"""`fit`: a model from data in one call, trained by the evidence or by the ELBO."""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from moment_jax.covariance import Covariance
from moment_jax.inference import data as checks
from moment_jax.inference.elbo import ELBO_RATE, ELBO_STEPS, Course, by_elbo
from moment_jax.inference.evidence import MOST_WEIGHTS, RATE, STEPS, anew, by_evidence
from moment_jax.inference.laplace_approximation import LaplaceReceipt
from moment_jax.nn import likelihood as likelihoods
from moment_jax.nn.bayesian import Bayesian, Mixture
from moment_jax.nn.modules import FLOATING, as_nnx
from moment_jax.objectives import Gaussian
from moment_jax.progress import is_shown

HELD_OUT = ("held_out", "patience")  # options of the ELBO and of plain networks
SETTLED = 0.05  # nats for each example: the last change of the log evidence


class FitReceipt(NamedTuple):
    """The course of a training: an evaluation gives steps, -ELBO / N and the held-out NLL, in nats.

    For the evidence, -log evidence / N stands in the place of -ELBO / N.
    """

    history: list[tuple[int, float, float]]  # member after member; NaN where nothing is held out
    converged: bool  # whether the held-out NLL improved no more, or the evidence changed no more
    objective: str  # "elbo", "evidence" or "plain"
    reason: str  # why that was taken
    evidence: tuple[LaplaceReceipt, ...] = ()  # of each member, in standard units


def fit(
    network: nnx.Module | linen.Module | Bayesian, likelihood: Any, data: tuple[Any, Any], *,
    objective: str | None = None, members: int = 1, held_out: float | tuple[Any, Any] | None = None,
    random: Any = None, max_steps: int | None = None, patience: int | None = None,
    learning_rate: float | None = None, kl_weight: float | None = None,
    relative_scale: float | None = None, prior: Any = None, prior_scale: float | None = None,
    structure: type[Covariance] | None = None, seed: int = 0, progress: bool | None = None,
    receipt: bool = False, output: Callable[[Any], Any] | None = None,
) -> Any:  # fmt: skip
    """Train a belief about a network's weights, or an average of plain networks, with Adam.

    **"evidence"**, for networks whose weights the data determine, of at most 5,000: a MAP estimate, ten
    times on the way the prior precision of each array and the noise of `mj.Gaussian()` re-estimated by
    MacKay's evidence, from the exact Gauss-Newton matrix of all weights. The belief is the inverse, the
    joint covariance of all weights, and the model is linearised in them. One noise is the same share of
    each output's variance; one that depends on the input, `mj.HeteroscedasticGaussian()`, is
    fitted to E[(y - mean)^2] under the belief. Nothing is held out.

    **"elbo"**, for all others: independent Gaussian weights (`Factorized`), by the gradient of one
    sampled network a step, which is unbiased; `model.elbo` has that of a pass. The prior scale of each
    array is learned, and so is the noise of `mj.Gaussian()`. Training stops when the negative log
    predictive density of held-out data by 16 sampled networks, in which the pass has no say, has not
    improved for `patience` times 50 steps, and keeps the best point. In a large network with little data
    the full ELBO can erase the fit, so points from during the KL's warm-up may be the best.

    **"plain"**: maximum likelihood, stopped as the ELBO is, and no belief. Five `members` are a better
    predictive distribution of classes than one belief in most comparisons, at five times the price.

    Columns may be in any unit: floating inputs (N, D) and the targets of a Gaussian likelihood are
    brought to mean 0 and standard deviation 1 inside the model, whose network is then a `Standardised`.
    A network that was trained in the columns' own units starts as it is: its layers take the units.
    Images, sequences and integers stay as they are: scale them to about one.

    Args:
      network: a Flax network in inference mode, with outputs (N, ..., C), which is not changed; or a
        `mj.Bayesian`, which is trained in place, as it is: nothing is standardised.
      likelihood: as in `mj.calibrate`, or `mj.HeteroscedasticGaussian()` for a network of 2 D outputs, D
        means and D log noise variances. Of a `Bayesian` that has one None.
      data: inputs and targets, as `held_out` of `mj.calibrate`.
      objective: "evidence", "elbo", "plain" or None: the evidence for a Gaussian likelihood of either
        kind, a plain network of at most 5,000 weights and none of the ELBO's own options below; else the
        ELBO, or plain networks for several members. The receipt says which, and so does a line on stderr
        where progress is shown.
      members: number of trainings, of which a `mj.nn.Mixture` is the average; the first begins at the
        network's weights, the others at matrices drawn anew with their mean and spread.
      held_out: the ELBO's and plain networks': share of the data to hold out, or (inputs, targets);
        None for .15. If it is fewer than 10 examples, nothing is held out, and training takes
        `max_steps`.
      random: the ELBO's: an NNX filter of the random weights; None for all. The others are trained too.
      max_steps: largest number of Adam steps, at least 1; None for 3,000, in batches of up to 256; by
        the evidence for 20,000, in batches of up to 64, which are all taken.
      patience: the ELBO's and plain networks': stop after this many evaluations, 50 steps apart, without
        improvement; None for 6.
      learning_rate: of Adam; None for 1e-3; by the evidence for 1e-2, which falls to a twentieth.
      kl_weight: the ELBO's: of the KL divergence; 1, or None, is the ELBO, 0 leaves it out.
      relative_scale: the ELBO's: initial standard deviation of a weight, over the root mean square of
        its array; None for .05.
      prior: the ELBO's: as in `mj.Bayesian`, with a factor for each array that is learned; a tree or a
        Bayesian only where columns are not standardised.
      prior_scale: the ELBO's: as in `mj.Bayesian`.
      structure: the ELBO's: as in `mj.Bayesian`.
      seed: of the held-out split, the batches and the members' starts.
      progress: as in `mj.calibrate`.
      output: of a plain network, see `mj.Bayesian`.
      receipt: also return a `FitReceipt`: the history, whether it converged, which objective and why.

    Returns:
      A `mj.Bayesian`, or a `mj.nn.Mixture` of several members: `model.predict(x)`,
      `model.log_prob(x, y)`.

    Raises:
      TypeError, ValueError: if an argument is invalid, or the training diverges. It warns if `max_steps`
        ended while the held-out density or the evidence still changed, if 300 sampled networks do not
        fit as the pass claims, and of a trained network that cannot take the units.

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
        "relative_scale": relative_scale, "structure": structure, "prior": prior,
        "prior_scale": prior_scale,
    }  # fmt: skip
    objective, reason = _chosen(objective, network, likelihood, members, own)
    shown = is_shown(progress)
    if shown:
        print(f"fit: objective={objective!r}, for {reason}", file=sys.stderr)
    if isinstance(network, Bayesian) and network.kind is not None:
        mend = "To train with another, use a mj.Bayesian without a likelihood."
        rule = "None as the likelihood, for a Bayesian's own"
        checks.need("fit", likelihood is None, rule, repr(likelihood), mend)
        learned = isinstance(network.noise, likelihoods.LogNoise)
        likelihood = Gaussian() if learned else network.likelihood
    else:
        checks.likelihood("fit", likelihood)
    if isinstance(network, Bayesian):
        rule, mend = "output= of a plain network", "Give it to mj.Bayesian(output=...)."
        checks.need("fit", output is None, rule, "a Bayesian", mend)
        plain = as_nnx(network.at_means(), network.output)
    else:
        plain = as_nnx(network, output)
    inputs, targets, shape = checks.data("fit", plain, likelihood, data)
    steps = max_steps or (STEPS if objective == "evidence" else ELBO_STEPS)
    evidence: tuple[LaplaceReceipt, ...] = ()
    if objective == "evidence":
        course = Course(steps, shown)
        models, evidence = by_evidence(
            plain, likelihood, inputs, targets, shape, members=int(members), steps=steps,
            rate=learning_rate or RATE, seed=seed,
            tell=lambda step, value: course(step, -value / len(targets)),
        )  # fmt: skip
        course.bar.close()
        history = course.history
        (_, before, _), (_, last, _) = history[-2:]
        converged = abs(last - before) < SETTLED
    else:
        models, history, converged = [], [], True
        for member in range(int(members)):
            course, rng = Course(steps, shown), np.random.default_rng(seed + member)
            start = nnx.clone(plain)
            for _, x in nnx.to_flat_state(nnx.state(start, FLOATING)) if member else ():
                x.set_value(jnp.asarray(anew(rng, np.asarray(x[...])), x.dtype))
            trained, done = by_elbo(
                start, network if isinstance(network, Bayesian) else None, likelihood, inputs,
                targets, shape, course, seed=seed + member, learning_rate=learning_rate or ELBO_RATE,
                certain=objective == "plain", own=own,
            )  # fmt: skip
            course.bar.close()
            models.append(trained)
            history, converged = history + course.history, converged and done
    if evidence and not converged:
        warnings.warn(
            f"`fit` stopped without having converged: the last tenth of {steps} steps changed "
            f"the log evidence by {abs(last - before):.2g} nats an example. Take more max_steps.",
            stacklevel=2,
        )
    model = models[0] if members == 1 else Mixture(models)
    told = FitReceipt(history, converged, objective, reason, evidence)
    return (model, told) if receipt else model


def _chosen(
    objective: str | None, network: Any, likelihood: Any, members: int, own: dict[str, Any]
) -> tuple[str, str]:
    """The objective, and the reason for it; `own` are the ELBO's own options."""
    need = functools.partial(checks.need, "fit")
    right = objective in ("evidence", "elbo", "plain", None)
    need(right, 'objective="evidence", "elbo", "plain" or None', repr(objective))
    need(members == int(members), "a whole number of members", members)
    trained, real = isinstance(network, Bayesian), isinstance(likelihood, checks.REAL)
    known = () if trained else jax.tree.leaves(nnx.state(as_nnx(network), FLOATING))
    size, given = sum(x.size for x in known), [name for name, x in own.items() if x is not None]
    reasons = {
        "it was asked for": objective in ("elbo", "plain"),
        "a Bayesian, which is trained itself": trained,
        f"{', '.join(given)}, for the ELBO alone": given,
        f"{size:,} weights, of 1 to {MOST_WEIGHTS:,}": not 0 < size <= MOST_WEIGHTS,
        "a likelihood that is not Gaussian": objective is None and not real,
    }
    against = next((reason for reason, holds in reasons.items() if holds), "")
    if objective == "evidence":
        rule = f"a plain network of 1 to {MOST_WEIGHTS:,} weights for the evidence"
        need(not against, rule, against, 'Use objective="elbo".')
    need(members == 1 or not trained, "a plain network for several members", "a Bayesian")
    if not against:
        return "evidence", f"{size:,} weights, of 1 to {MOST_WEIGHTS:,}"
    odd = [name for name in given if name not in HELD_OUT]
    other = objective or ("plain" if members > 1 and not odd else "elbo")
    right = other != "plain" or not (odd or trained)
    need(right, "no belief for plain networks", ", ".join(odd) or "a Bayesian", 'Give "elbo".')
    return other, against
