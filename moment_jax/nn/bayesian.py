"""`Bayesian`: a Flax network with a Gaussian belief about its weights, the one door of the library."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import Array
from jax.interpreters import partial_eval

from moment_jax import objectives
from moment_jax.covariance import STRUCTURES, Covariance, Diagonal, Full, Moments, Separable
from moment_jax.covariance.token_gram import num_landmarks
from moment_jax.nn.belief import FAMILIES, Belief, matrix_shape
from moment_jax.objectives import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from moment_jax.objectives.moments import labels_of, over_batch
from moment_jax.posterior import Factorized, FullNormal, Point, Posterior, sample_params
from moment_jax.propagation import PropagationError, propagate
from moment_jax.propagation import linearised as linearise
from moment_jax.propagation.errors import Steps, explain, takes, with_axes
from moment_jax.propagation.propagator import is_random_input
from moment_jax.xla import with_automatic_axes

LIKELIHOODS = (Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian)
Path = tuple[Any, ...]


class LogNoise(nnx.Param):
    """The log variance of a Gaussian likelihood's noise, which is learned."""


class Check(NamedTuple):
    """One pass beside sampled networks, averaged over all entries of the output."""

    sd_ratio: float  # sd of the pass over the sampled one, mean
    sd_error: float  # the same, mean |ratio - 1|
    mean_error: float  # |mean of the pass - sampled mean|, in sampled sds
    noise: float  # of a sampled sd, relative: `sd_error` cannot be told from it below
    seconds: float  # of the pass, compiled
    seconds_sampled: float  # of all sampled networks, compiled


class Bayesian(nnx.Module):
    """A Flax network with a Gaussian belief about each of its weights.

    `model(x)` is the mean and the covariance of the network's output, in one pass: its operations are
    traced and carried out on moments, see `mj.propagate`. The variational parameters stand under the
    network's own paths below `weights`, as `VariationalMean`, `VariationalScale` and `PriorScale`, so
    that it trains by `nnx.Optimizer(model, ..., wrt=nnx.Param)`, and filters, checkpoints and shardings
    work as for any Flax module. The network itself is not changed.

    Assumes that weight arrays are independent of each other.

    Args:
      network: a Flax NNX module, or a linen module bound to its variables, `module.bind(variables)`; in
        inference mode, returning one array.
      likelihood: of the targets: `mj.Categorical()`, `mj.Bernoulli()`, `mj.Gaussian(variance)`,
        `mj.Gaussian()` to learn the noise, or `mj.objectives.HeteroscedasticGaussian()`. Needed to
        train and to predict.
      beliefs: posteriors in the places of weights, a tree like `nnx.to_pure_dict(nnx.state(network,
        nnx.Param))`; weights that it omits are certain. None for the family below.
      random: an NNX filter of the weights that are random, such as `nnx.PathContains("head")`. The
        others stay `nnx.Param`: certain, and trained like the rest. What does not depend on random
        weights is computed at the plain network's price.
      family: of the beliefs, a class of `mj.posterior`, or a function of the path that returns one.
        Arrays of more than two axes are matrices to families of matrices, cut as (in, out); vectors are
        `Factorized` to them.
      relative_scale: initial standard deviation of a weight, over the root mean square of its array,
        which counts as at least .1.
      prior_scale: standard deviation of the prior N(0, prior_scale^2) of every weight.
      learn_prior: learn one prior standard deviation for each array (empirical Bayes).
      structure: in which covariances are kept.
      landmarks: tokens at which `Separable` keeps the covariance of a long sequence, see
        `Separable.zeros`; with a causal mask, all of them.
      linearised: linearise the network in its weights, which is right for Laplace approximations, see
        `mj.linearised`; covariances are `Full` then, or `Diagonal` if that is the structure.
      batch_axes: the number of leading batch axes of the inputs.

    Raises:
      TypeError, ValueError: if the network has no parameters or is in training mode, the filter selects
        none, the beliefs have another tree or shape, or a family does not fit an array.

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> net = nnx.Sequential(
    ...     nnx.Linear(3, 8, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
    >>> model = mj.Bayesian(net, mj.Categorical())
    >>> mean, cov = model(jnp.ones((5, 3)))
    >>> prediction = model.predict(jnp.ones((5, 3)))
    >>> mean.shape, model(jnp.ones((5, 3))).sd.shape, prediction.probs.shape
    ((5, 2), (5, 2), (5, 2))
    """

    def __init__(
        self,
        network: nnx.Module | linen.Module,
        likelihood: Any = None,
        *,
        beliefs: Any = None,
        random: Any = nnx.Param,
        family: type[Posterior] | Callable[[Path], type[Posterior]] = Factorized,
        relative_scale: float = 0.1,
        prior_scale: float = 1.0,
        learn_prior: bool = False,
        structure: type[Covariance] = Separable,
        landmarks: int | None = None,
        linearised: bool = False,
        batch_axes: int = 1,
    ) -> None:
        self._set_options(structure, landmarks, linearised)
        self.batch_axes = batch_axes
        self.kind, self.noise = _stored_likelihood(likelihood)
        self.name = type(network).__name__
        network = _as_nnx(network)
        split: Any = nnx.split(network, nnx.Param, ...)
        self.graph, params, rest = split
        known = dict(nnx.to_flat_state(params))
        if not known:
            raise ValueError(
                "`mj.Bayesian` needs a network with parameters. Got "
                f"{type(network).__name__} without any."
            )
        self.rest = nnx.data(jax.tree.map(lambda x: x, rest))
        prior = {"prior_scale": prior_scale, "learn_prior": learn_prior}
        weights: dict[Path, Any] = {path: variable.copy() for path, variable in known.items()}
        if beliefs is None:
            chosen = dict(nnx.to_flat_state(nnx.state(network, nnx.All(nnx.Param, random))))
            chosen = {path: v for path, v in chosen.items() if _is_floating(v[...])}
            if not chosen:
                raise ValueError(
                    "`mj.Bayesian` needs weights that `random` selects. Got none of "
                    f"{', '.join(map(_name, known))}. Give a filter such as nnx.PathContains('head')."
                )
            for path, variable in chosen.items():
                kind = family if isinstance(family, type) else family(path)
                weights[path] = _belief(path, variable[...], kind, relative_scale, prior)
                if not isinstance(family, type) and weights[path].family is not kind:
                    raise ValueError(
                        f"`family` needs to fit every array. Got {kind.__name__}, a family of "
                        f"matrices, for the vector {_name(path)}. Return Factorized for it."
                    )
        else:
            for path, posterior in _checked_beliefs(beliefs, known).items():
                if isinstance(posterior, Posterior):
                    try:
                        weights[path] = Belief.of(posterior, **prior)
                    except ValueError as error:
                        raise ValueError(
                            f"`mj.Bayesian`: {error} It is at {_name(path)}."
                        ) from error
                else:
                    weights[path].set_value(jnp.asarray(posterior))
        self.weights = nnx.data(nnx.traversals.unflatten_mapping(weights))

    def _set_options(self, structure: Any, landmarks: int | None, linearised: bool) -> None:
        if not (isinstance(structure, type) and issubclass(structure, Covariance)):
            raise TypeError(
                f"`mj.Bayesian` needs a covariance structure, one of {', '.join(STRUCTURES)} (the type "
                f"itself, such as mj.Separable). Got {structure!r}."
            )
        num_landmarks("mj.Bayesian", 1, landmarks)
        self.structure, self.landmarks, self.linearised = structure, landmarks, linearised

    # -- beliefs and networks -------------------------------------------------------------------------

    @property
    def owned(self) -> dict[Path, Belief]:
        """The belief about each random array, by the network's own paths."""
        return {path: x for path, x in self._flat().items() if isinstance(x, Belief)}

    @property
    def beliefs(self) -> dict[Any, Any]:
        """A posterior in the place of each random array, and the certain arrays in theirs.

        A tree like `nnx.to_pure_dict(nnx.state(network, nnx.Param))`.
        """
        flat = self._flat().items()
        known = {p: x.posterior if isinstance(x, Belief) else x[...] for p, x in flat}
        return nnx.traversals.unflatten_mapping(known)

    @property
    def likelihood(self) -> Any:
        """The likelihood, a learned noise at its present value; None without one."""
        if self.noise is None:
            return self.kind
        noise = self.noise[...]
        return Gaussian(jnp.exp(noise) if isinstance(self.noise, LogNoise) else noise)

    def at_means(self) -> Any:
        """The plain network at the means, of the class that came in."""
        return _as_given(self._network(_at_means(self.beliefs)))

    def sample(self, key: Array) -> Any:
        """The plain network of one draw of the weights, of the class that came in."""
        return _as_given(self._network(sample_params(self.beliefs, key)))

    def kl(self) -> Array:
        """KL(posterior || prior) of all random weights, in nats."""
        return sum((belief.kl() for belief in self.owned.values()), jnp.zeros(()))

    def scaled(self, factor: Array | float) -> Self:
        """A copy with all standard deviations multiplied by a positive number."""
        copy = nnx.clone(self)
        for belief in copy.owned.values():
            belief.scale_by(factor)
        return copy

    def replace(self, **options: Any) -> Self:
        """The same variables with another `structure`, `landmarks` or `linearised`.

        So a network trained in `Diagonal` predicts in `Separable`, and training one trains the other.
        """
        known = {name: getattr(self, name) for name in ("structure", "landmarks", "linearised")}
        if set(options) - set(known):
            raise TypeError(
                f"`replace` takes {', '.join(known)}. Got {', '.join(set(options) - set(known))}."
            )
        copy = nnx.clone(self, variables=False)
        copy._set_options(**{**known, **options})
        return copy

    def make_certain(self, network: Any) -> None:
        """Put this plain network in the place of the random one: nothing is random then, inputs neither.

        `mj.optim` observes the layers of the network at the means by it, in a copy of the model.
        """
        split: Any = nnx.split(_as_nnx(network), nnx.Param, ...)
        self.graph, params, rest = split
        self.rest = nnx.data(rest)
        self.weights = nnx.data(nnx.traversals.unflatten_mapping(dict(nnx.to_flat_state(params))))

    # -- moments --------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **options: Any) -> Moments:
        """Moments of the network's output.

        Args:
          inputs: the network's arguments, with `batch_axes` leading axes, all of which have them. One
            that is random is given as its moments, (mean, cov), independent of the weights.
          options: the network's keyword arguments, shared by all examples.
        """
        return self._moments(inputs, options)

    def predict(self, *inputs: Any, batch_size: int = 256, **options: Any) -> Any:
        """The predictive distribution, `likelihood(model(x))`, compiled and in batches.

        Its arrays have the network's output shape: `probs`, `label`, `entropy`, `epistemic` of classes,
        `mean`, `sd`, `interval(.9)` of real values, and `log_prob(y)` and `sample(key)` of both.
        """
        self._needs_likelihood("predict")
        known = _Static(options)
        return self._in_batches(partial(_predicted, known=known), inputs, batch_size)

    def elbo(
        self, x: Any, y: Array, *, dataset_size: int, kl_weight: Array | float = 1.0, **options: Any
    ) -> Array:
        """The ELBO of a mini-batch, in nats for each example of the data; of one pass, without samples.

        Args:
          x: the network's input, or a tuple of its arguments.
          y: targets, with the batch axes leading: integers (B, ...) for Categorical.
          dataset_size: the number of examples in the data set.
          kl_weight: 1 for the bound itself; below 1 for warm-up or a cold posterior.
          options: the network's keyword arguments.
        """
        likelihood = self._needs_likelihood("elbo")
        fits = expected_log_likelihoods(likelihood, y, self(*_arguments(x), **options))
        fits = fits.reshape(*fits.shape[: self.batch_axes], -1).sum(axis=-1).reshape(-1)
        bound = objectives.elbo(fits, self.kl(), dataset_size=dataset_size, kl_weight=kl_weight)
        return bound / dataset_size

    def log_prob(self, x: Any, y: Array, *, batch_size: int = 256, **options: Any) -> Array:
        """Log predictive density of each target, in nats: `predict(x).log_prob(y)`."""
        return self.predict(*_arguments(x), batch_size=batch_size, **options).log_prob(y)

    def check(self, x: Any, key: Array | None = None, samples: int = 300, **options: Any) -> Check:
        """The moments of this input beside those of sampled networks, and the price of both.

        Args:
          x: the network's input, or a tuple of its arguments.
          key: a JAX random key; None for a fixed one.
          samples: number of networks drawn, 2 or more.
          options: the network's keyword arguments.
        """
        key, inputs = jax.random.key(0) if key is None else key, _arguments(x)
        if samples < 2:
            raise ValueError(f"`check` needs samples >= 2. Got {samples}.")
        graph, state = nnx.split(self)
        known = _Static(options)
        one_pass = partial(_moments_of, graph, known, state, inputs)
        drawn = partial(_drawn_moments, graph, known, samples, state, inputs, key)
        found = []
        for run in (one_pass, drawn):
            jax.block_until_ready(run())  # compiles
            start = time.perf_counter()
            result = jax.block_until_ready(run())
            found.append((result, time.perf_counter() - start))
        (moments, seconds), ((mean, sd), seconds_sampled) = found
        ratio = np.asarray(moments.sd / sd)[np.asarray(sd) > 0]
        shift = np.asarray(jnp.abs(moments.mean - mean) / sd)[np.asarray(sd) > 0]
        return Check(
            float(ratio.mean()), float(np.abs(ratio - 1).mean()), float(shift.mean()),
            (2 * (samples - 1)) ** -0.5, seconds, seconds_sampled,
        )  # fmt: skip

    def explain(self, *inputs: Any, **options: Any) -> Steps:
        """The operations of a pass, the rule that took each and what it assumes; prints as a table."""
        steps: Steps = Steps()

        def run(inputs: Any) -> Any:
            moments, found = self._moments(inputs, options, receipt=True)
            steps.extend(found)
            return moments

        jax.eval_shape(run, jax.tree.map(lambda x: x[(slice(1),) * self.batch_axes], inputs))
        return steps

    def __repr__(self) -> str:
        """Five lines: the network, its weights, the beliefs, the covariance, the targets."""
        flat, owned = self._flat(), self.owned
        families = sorted({belief.family.__name__ for belief in owned.values()})
        random = sum(belief.mean[...].size for belief in owned.values())
        certain = sum(x[...].size for path, x in flat.items() if path not in owned)
        landmarks = "" if self.landmarks is None else f", landmarks={self.landmarks}"
        return "\n".join(
            (
                f"Bayesian({self.name})",
                f"  random: {random} weights in {len(owned)} arrays, {', '.join(families) or 'none'}",
                f"  certain: {certain} weights in {len(flat) - len(owned)} arrays",
                f"  moments: {self.structure.__name__}{landmarks}"
                + (", linearised in the weights" if self.linearised else ""),
                f"  likelihood: {self.kind if self.noise is None else 'Gaussian'}",
            )
        )

    __str__ = __repr__

    # -- how -------------------------------------------------------------------------------------------

    def _flat(self) -> dict[Path, Any]:
        """Beliefs and certain parameters by the network's own paths."""
        return nnx.traversals.flatten_mapping(
            self.weights, is_leaf=lambda _, x: not isinstance(x, dict)
        )

    def _network(self, values: Any) -> nnx.Module:
        """The plain network with these arrays, on new variables, which it may write to while traced."""
        flat = nnx.traversals.flatten_mapping(values)
        kinds = self._flat()
        params = {
            path: nnx.Param(x) if isinstance(kinds[path], Belief) else kinds[path].replace(x)
            for path, x in flat.items()
        }
        rest = jax.tree.map(lambda x: x, self.rest)
        network: nnx.Module = nnx.merge(self.graph, nnx.from_flat_state(params), rest, copy=True)
        return network

    def _moments(self, inputs: tuple[Any, ...], options: Any, *, receipt: bool = False) -> Any:
        axes, beliefs = self.batch_axes, self.beliefs
        means = tuple(x[0] if is_random_input(x) else x for x in inputs)
        self._check_inputs(inputs)
        if not self.owned:
            output = self._network(beliefs)(*means, **options)
            lead, shape = output.shape[:axes], (1, 1, *output.shape[axes:])
            dense = self.linearised and self.structure is not Diagonal
            kept = Full if dense else self.structure
            zeros = kept.zeros((math.prod(shape[:-1]), shape[-1]), output.dtype)
            broadcast = partial(jax.tree.map, lambda x: jnp.broadcast_to(x, (*lead, *x.shape)))
            return Moments(output, broadcast(zeros))

        def fn(values: Any, *inputs: Any) -> Any:
            return self._network(values)(*inputs, **options)

        if self.linearised:
            if any(map(is_random_input, inputs)):
                raise ValueError(
                    "A linearised model needs certain inputs. Got the moments of a random one. Use "
                    "model.replace(linearised=False)."
                )
            kept = Diagonal if self.structure is Diagonal else Full
            of = linearise(fn, structure=kept)
        else:
            of = propagate(fn, structure=self.structure, landmarks=self.landmarks, receipt=receipt)

        def one(beliefs: Any, inputs: Any) -> Any:
            return of(beliefs, *(_with_batch(x, axes) for x in inputs))

        try:
            shape = self._output_shape(means, options)
            for _ in range(0 if receipt else axes):
                one = jax.vmap(one, (None, 0))
            if receipt:
                mean, cov, steps = one(beliefs, jax.tree.map(lambda x: x[(0,) * axes], inputs))
                return Moments(mean, cov), steps
            mean, cov = with_automatic_axes(lambda both: one(*both), (beliefs, inputs), axes)
        except Exception as error:
            known = _at_means(beliefs)
            self._explain(lambda x: fn(known, *x), means, options, error)
            raise
        lead = means[0].shape[:axes] if means else ()
        return Moments(mean.reshape(*lead, *shape), cov)

    def _output_shape(self, inputs: tuple[Any, ...], options: Any) -> tuple[int, ...]:
        """The shape of one example's output; raises for a network in training mode."""
        axes = self.batch_axes
        ones = tuple(jax.ShapeDtypeStruct((1,) * axes + x.shape[axes:], x.dtype) for x in inputs)
        network = self._network(_at_means(self.beliefs))
        # `propagate` says itself where random numbers are drawn.
        found = inference_output("mj.Bayesian", network, ones, options, keys=self.linearised)
        shape = getattr(found, "shape", None)
        if shape is None or shape[:axes] != (1,) * axes:
            raise ValueError(
                "`mj.Bayesian` needs a network that returns one array, with the batch axes of its "
                f"inputs. Got {found} for one example."
            )
        return tuple(shape[axes:])

    def _check_inputs(self, inputs: tuple[Any, ...]) -> None:
        axes = self.batch_axes
        for x, cov in (x for x in inputs if is_random_input(x)):
            width = (1, *x.shape[axes:])[-1]
            wanted = (*x.shape[:axes], math.prod(x.shape[axes:]) // width, width)
            if type(cov) is not self.structure or tuple(cov.shape) != wanted:
                raise ValueError(
                    f"A random input (mean, cov) needs a covariance in {self.structure.__name__} of "
                    f"shape {wanted}, with the mean's batch axes. Got {type(cov).__name__} of "
                    f"{tuple(cov.shape)}."
                )
        for x in (x[0] if is_random_input(x) else x for x in inputs):
            if not hasattr(x, "ndim") or x.ndim < self.batch_axes:
                got = getattr(x, "shape", type(x).__name__)
                raise ValueError(
                    f"A Bayesian model needs arrays with {self.batch_axes} leading batch axes. Got "
                    f"{got}. For one input, use x[None], or mj.Bayesian(..., batch_axes=0)."
                )

    def _needs_likelihood(self, method: str) -> Any:
        if self.likelihood is None:
            raise ValueError(
                f"`{method}` needs a likelihood. Got a model without one. Give it to "
                "mj.Bayesian(network, mj.Categorical())."
            )
        return self.likelihood

    def _in_batches(self, fn: Callable[..., Any], inputs: Any, batch_size: int) -> Any:
        """`fn(graph, state, inputs)` of batches, the last one filled up with its first example."""
        if batch_size < 1:
            raise ValueError(f"`predict` needs batch_size >= 1. Got {batch_size}.")
        graph, state = nnx.split(self)
        size = jax.tree.leaves(inputs)[0].shape[0] if self.batch_axes and inputs else 0
        if size <= batch_size:
            return fn(graph, state, inputs)
        parts = []
        for first in range(0, size, batch_size):
            rows = np.arange(first, first + batch_size)
            rows = np.where(rows < size, rows, first)
            part = fn(graph, state, jax.tree.map(lambda x, rows=rows: jnp.asarray(x)[rows], inputs))
            parts.append(jax.tree.map(lambda x, left=size - first: x[:left], part))
        return jax.tree.map(lambda *each: jnp.concatenate(each), *parts)

    def _explain(self, plain: Any, inputs: tuple[Any, ...], options: Any, error: Exception) -> None:
        """Raise a ValueError if the model failed because inputs have one batch axis too few or many."""
        axes = self.batch_axes
        batch = inputs[0].shape[:axes] if inputs else ()
        each = [k for k, v in options.items() if batch and getattr(v, "shape", ())[:axes] == batch]
        if each and not isinstance(error, PropagationError):
            raise ValueError(
                f"`mj.Bayesian` shares keyword arguments between examples. Got {', '.join(each)} of "
                f"the batch axes {batch}. Give what each example has of its own by position."
            ) from error

        def as_one(dropped: int) -> Any:
            """Shapes of a batch of one, without the first `dropped` axes of the inputs."""
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((1,) * axes + x.shape[dropped:], x.dtype), inputs
            )

        if takes(plain, as_one(axes)):
            return
        rule = f"`mj.Bayesian` takes the first {axes} axes of its inputs as a batch"
        one, raised = "a single example of this model has", f"The network raised: {error}"
        mend = f"For one input, use x[None]{'' if axes == 1 else ', once for each axis'}. {raised}"
        more = f"Give batch_axes={axes + 1}. {raised}"
        whole = plain, as_one(0), f"{one} all of theirs", mend
        explain(rule, inputs, error, whole, (plain, as_one(axes + 1), f"{one} one axis less", more))


def expected_log_likelihoods(likelihood: Any, y: Array, moments: Moments) -> Array:
    """E[log p(y | f)] at every place of a batch, (...) for moments (..., C), in nats."""
    mean = moments.mean
    known = moments.variance if isinstance(moments.cov, Diagonal) else moments.features
    fn = partial(objectives.expected_log_likelihood, likelihood)
    if isinstance(likelihood, Categorical):
        y = labels_of("elbo", y, mean)
    else:
        width = mean.shape[-1] // (2 if isinstance(likelihood, HeteroscedasticGaussian) else 1)
        y = jnp.asarray(y, mean.dtype)
        y = y[..., None] if y.shape == mean.shape[:-1] and width == 1 else y
        if y.shape != (*mean.shape[:-1], width):
            raise ValueError(
                f"`elbo` needs targets of shape {(*mean.shape[:-1], width)}, the output's. Got "
                f"{tuple(y.shape)}."
            )
    return over_batch(lambda m, c, y: fn(y, m, c), mean, known, y)


def inference_output(
    caller: str, network: nnx.Module, inputs: tuple[Any, ...], options: Any, *, keys: bool = True
) -> Any:
    """The shape of `network(*inputs)`; raises if it depends on random keys, or writes statistics."""
    # What layers report or draw is no state that the next call would need.
    stored = nnx.Not(nnx.Any(nnx.Param, nnx.RngState, nnx.Intermediate))
    split: Any = nnx.split(network, nnx.RngState, stored, ...)
    graph, *state = split
    random, written = (len(jax.tree.leaves(part)) for part in state[:2])

    def run(state: Any, inputs: Any) -> Any:
        model: Any = nnx.merge(graph, *state, copy=True)
        before = jax.tree.map(lambda x: x, nnx.state(model, stored))
        return before, model(*inputs, **options), nnx.state(model, stored)

    if random + written == 0:
        return jax.eval_shape(run, state, inputs)[1]
    closed, found = jax.make_jaxpr(run, return_shape=True)(state, inputs)
    outvars, outputs = closed.jaxpr.outvars, len(jax.tree.leaves(found[1]))
    before = len(jax.tree.leaves(found[0]))
    changed = outvars[:before] != outvars[before + outputs :]
    of_output = [before <= i < before + outputs for i in range(len(outvars))]
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, of_output)
    if changed or (keys and any(used[:random])):
        what = "writes statistics, a cache or other state" if changed else "draws random numbers"
        raise ValueError(
            f"`{caller}` needs a network in inference mode. Got one that {what}. Call network.eval() "
            "first, or set deterministic=True, use_running_average=True and decode=False."
        )
    return found[1]


# -- compiled programs: the model's graph and the network's options are static -------------------------


class _Static:
    """Keyword arguments as a static argument: arrays count by their values, and stay known."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        leaves, tree = jax.tree.flatten(options)
        arrays = jax.Array | np.ndarray
        known = [
            (np.asarray(x).tobytes(), x.shape, str(x.dtype)) if isinstance(x, arrays) else x
            for x in leaves
        ]
        self.key = tree, *known

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.key == other.key


@partial(jax.jit, static_argnums=0, static_argnames="known")
def _predicted(graph: Any, state: Any, inputs: Any, *, known: _Static) -> Any:
    model: Any = nnx.merge(graph, state)
    return model.likelihood(model(*inputs, **known.options))


@partial(jax.jit, static_argnums=(0, 1))
def _moments_of(graph: Any, known: _Static, state: Any, inputs: Any) -> Moments:
    model: Any = nnx.merge(graph, state)
    found: Moments = model(*inputs, **known.options)
    return found


@partial(jax.jit, static_argnums=(0, 1, 2))
def _drawn_moments(
    graph: Any, known: _Static, samples: int, state: Any, inputs: Any, key: Array
) -> tuple[Array, Array]:
    """Mean and standard deviation of the outputs of sampled networks."""
    model: Any = nnx.merge(graph, state)

    def of_network(key: Array) -> Array:
        return model._network(sample_params(model.beliefs, key))(*inputs, **known.options)

    outputs = jax.lax.map(of_network, jax.random.split(key, samples), batch_size=min(samples, 10))
    return outputs.mean(axis=0), outputs.std(axis=0, ddof=1)


# -- parts of the constructor --------------------------------------------------------------------------


def _belief(
    path: Path, value: Array, family: Any, relative_scale: float, prior: dict[str, Any]
) -> Belief:
    """The first belief about an array, its mean the array."""
    if family not in FAMILIES:
        Belief(value, family=family)  # raises
    if not 0 < relative_scale < np.inf:
        raise ValueError(f"`mj.Bayesian` needs relative_scale > 0. Got {relative_scale}.")
    scale = jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(value))), 0.1)
    shape = tuple(value.shape)
    matrix: tuple[int, ...] = matrix_shape(str(path[-1]), shape)
    if family in (Factorized, Point, FullNormal):
        matrix = shape
    elif matrix[1] == 1:
        family, matrix = Factorized, shape
    options = {"family": family, "shape": shape, **prior}
    return Belief(value.reshape(matrix), scale=relative_scale * scale, **options)


def _checked_beliefs(beliefs: Any, known: dict[Path, Any]) -> dict[Path, Any]:
    """Posteriors and arrays by path, in the places and shapes of the network's parameters."""
    tree = nnx.to_pure_dict(beliefs) if isinstance(beliefs, nnx.State) else beliefs
    given = nnx.traversals.flatten_mapping(tree) if isinstance(tree, dict) else {(): tree}
    given = {path: x for path, x in given.items() if x is not None}
    for path, x in given.items():
        mean = x.mean if isinstance(x, Posterior) else x
        wanted = tuple(known[path][...].shape) if path in known else None
        if wanted is None or getattr(mean, "shape", None) != wanted:
            places = ", ".join(f"{_name(p)} {tuple(v[...].shape)}" for p, v in known.items())
            raise ValueError(
                "`mj.Bayesian` needs beliefs in the places and shapes of the network's parameters: "
                f"{places}. Got {type(x).__name__} of shape {getattr(mean, 'shape', None)} at "
                f"'{_name(path)}'. Start from nnx.to_pure_dict(nnx.state(network, nnx.Param))."
            )
    if not any(isinstance(x, Posterior) for x in given.values()):
        raise ValueError("`mj.Bayesian` needs a belief about one array at least. Got none.")
    return given


def _stored_likelihood(likelihood: Any) -> tuple[Any, Any]:
    """The likelihood, a static value, and the noise of a Gaussian one, a variable."""
    if likelihood is None or isinstance(
        likelihood, Bernoulli | Categorical | HeteroscedasticGaussian
    ):
        return likelihood, nnx.data(None)
    if not isinstance(likelihood, Gaussian):
        names = ", ".join(f"{kind.__name__}()" for kind in LIKELIHOODS)
        raise TypeError(f"`mj.Bayesian` needs a likelihood, one of {names}. Got {likelihood!r}.")
    if likelihood.noise_variance is None:
        return Gaussian(), nnx.data(LogNoise(jnp.zeros(())))
    return Gaussian(), nnx.data(nnx.Variable(jnp.asarray(likelihood.noise_variance)))


def _at_means(beliefs: Any) -> Any:
    """Arrays in place of the beliefs."""

    def is_belief(leaf: Any) -> bool:
        return isinstance(leaf, Posterior)

    return jax.tree.map(lambda x: x.mean if is_belief(x) else x, beliefs, is_leaf=is_belief)


def _with_batch(x: Any, axes: int) -> Any:
    """An input with batch axes of length one."""
    if is_random_input(x):
        return Moments(with_axes(x[0], axes), x[1])
    return with_axes(x, axes)


def _arguments(x: Any) -> tuple[Any, ...]:
    """The network's arguments: a tuple of them, or the only one, which may be (mean, cov)."""
    return x if isinstance(x, tuple) and not is_random_input(x) else (x,)


def _is_floating(value: Any) -> bool:
    return jnp.issubdtype(getattr(value, "dtype", int), jnp.floating) and value.size > 0


def _name(path: Path) -> str:
    return "/".join(map(str, path))


# -- linen ---------------------------------------------------------------------------------------------


class _Linen(nnx.Module):
    """A linen module and its variables, as an NNX module."""

    def __init__(self, module: linen.Module, variables: Any) -> None:
        self.module = module
        params = jax.tree.map(nnx.Param, variables["params"])
        rest = {k: jax.tree.map(nnx.Variable, v) for k, v in variables.items() if k != "params"}
        self.params, self.others = nnx.data(dict(params)), nnx.data(rest)

    @property
    def variables(self) -> dict[str, Any]:
        """The arrays, as linen takes them."""
        pure = nnx.to_pure_dict(nnx.state(self))
        return {"params": pure.get("params", {}), **pure.get("others", {})}

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.module.apply(self.variables, *inputs, **options)


def _as_nnx(network: Any) -> nnx.Module:
    """The network as an NNX module; raises for anything else."""
    if isinstance(network, Bayesian):
        raise TypeError("`mj.Bayesian` needs a plain network. Got a Bayesian; use its at_means().")
    if isinstance(network, nnx.Module):
        return network
    if isinstance(network, linen.Module):
        if network.scope is None:
            raise TypeError(
                f"`mj.Bayesian` needs a linen module bound to its variables. Got a free "
                f"{type(network).__name__}. Use module.bind(variables)."
            )
        return _Linen(*network.unbind())
    raise TypeError(
        f"`mj.Bayesian` needs a Flax module. Got {type(network).__name__}. For a function of "
        "parameters, use mj.propagate(fn)(params, x)."
    )


def _as_given(network: nnx.Module) -> Any:
    """The network in its own class: a linen module is bound again."""
    return network.module.bind(network.variables) if isinstance(network, _Linen) else network
