"""`Bayesian`: a Flax network with a Gaussian belief about its weights; `Mixture`: several of them."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import Array

from moment_jax import objectives
from moment_jax.covariance import STRUCTURES, Covariance, Moments, Separable
from moment_jax.covariance.fields import known_values, need
from moment_jax.covariance.token_gram import num_landmarks
from moment_jax.nn import likelihood as likelihoods
from moment_jax.nn.belief import Belief, Path, begun, changed, placed, priors, selected
from moment_jax.nn.check import Check, beside_sampled, checked
from moment_jax.nn.inputs import arguments, check_inputs, check_key
from moment_jax.nn.modules import Module, as_given, as_nnx
from moment_jax.nn.prediction import compiled_pass, explained, predicted
from moment_jax.nn.static import Static
from moment_jax.objectives.predictive import averaged
from moment_jax.posterior import Factorized, GaussianPrior, Posterior, sample_params
from moment_jax.posterior.base import mean_params
from moment_jax.propagation.errors import Steps
from moment_jax.xla import inlined


class Bayesian(Module):
    """A Flax network with a Gaussian belief about each of its weights.

    `model(x)` is the mean and the covariance of the network's output, in one pass: its operations are
    traced and carried out on moments, see `mj.propagate`. The variational parameters stand under the
    network's own paths below `weights`, as `VariationalMean`, `VariationalScale` and `PriorScale`, so
    that it trains by `nnx.Optimizer(model, ..., wrt=nnx.Param)`, and filters, checkpoints and shardings
    work as for any Flax module. The network itself is not changed.

    Assumes that weight arrays are independent of each other. Raises a TypeError or ValueError for a
    network without parameters or in training mode, a filter that selects nothing, beliefs or priors of
    another tree or shape, or prior variances that are not positive.

    Args:
      network: a Flax NNX module, or a linen module bound to its variables, `module.bind(variables)`; in
        inference mode.
      likelihood: of the targets, to train and to predict: `mj.Categorical()`, `mj.Bernoulli()`,
        `mj.Gaussian(variance)`, `mj.Gaussian()` to learn the noise, or `mj.HeteroscedasticGaussian()`.
      beliefs: posteriors in the places of weights, a tree like `nnx.to_pure_dict(nnx.state(network,
        nnx.Param))`; weights that it omits are certain. None for the family below.
      random: an NNX filter of the weights that are random, such as `nnx.PathContains("head")`. The
        others stay `nnx.Param`: certain, and trained like the rest. What does not depend on random
        weights is computed at the plain network's price.
      family: of the beliefs, a class of `mj.posterior`. Arrays of more than two axes are matrices to
        families of matrices, cut as (in, out); vectors are `Factorized` to them.
      relative_scale: initial standard deviation of a weight, over the root mean square of its array,
        which counts as at least .1.
      prior: None for N(0, prior_scale^2) of every weight. "network" for the weights that came in as
        means, with prior_scale times each array's root mean square (at least .1) as standard deviation.
        A tree of `mj.posterior.GaussianPrior` or posteriors in the places of weights, of which single
        means and variances count; what it omits has N(0, prior_scale^2). Another `mj.Bayesian`, for its
        `as_prior()`. Weights that are certain have none.
      prior_scale: a positive number, see `prior`.
      learn_prior: learn one factor of the prior's standard deviations for each array (empirical Bayes).
      structure: in which covariances are kept.
      landmarks: tokens at which `Separable` keeps the covariance of a long sequence, see
        `Separable.zeros`; with a causal mask, all of them.
      linearised: linearise the network in its weights, which is right for Laplace approximations, see
        `mj.linearised`; covariances are `Full` then, or `Diagonal` if that is the structure.
      output: picks the one array whose moments are wanted out of what the network returns, such as
        `lambda out: out.logits`; networks at the means and sampled ones return all of it. A model with a
        lambda cannot be pickled, one with a function of a module can.
      verify: hold the first call of every compiled program to the network: without noise, on up to 8
        examples, its mean has to be the network's output, or a `PropagationError` names the first
        operation that is off. That is one more pass and one plain forward. In your own `jit` nothing can
        be raised: call `model.check(x)` once before.

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
        self, network: nnx.Module | linen.Module, likelihood: Any = None, *, beliefs: Any = None,
        random: Any = nnx.Param, family: type[Posterior] = Factorized, relative_scale: float = 0.1,
        prior: Any = None, prior_scale: float = 1.0, learn_prior: bool = False,
        structure: type[Covariance] = Separable, landmarks: int | None = None,
        linearised: bool = False, output: Callable[[Any], Any] | None = None, verify: bool = True,
    ) -> None:  # fmt: skip
        self.verify = verify
        self._set_options(structure, landmarks, linearised)
        self.kind, self.noise = likelihoods.stored(likelihood)
        self._output = Static(output)
        network = as_nnx(network, output)
        self.name = type(as_given(network)).__name__
        split: Any = nnx.split(network, nnx.Param, ...)
        graph, params, rest = split
        self.graph = Static(graph)
        known = dict(nnx.to_flat_state(params))
        need("mj.Bayesian", known, "a network with parameters", self.name)
        self.rest = nnx.data(jax.tree.map(lambda x: x, rest))
        arrays = {path: variable[...] for path, variable in known.items()}
        weights: dict[Path, Any] = {path: variable.copy() for path, variable in known.items()}
        if beliefs is None:
            weights |= begun(selected("mj.Bayesian", network, random), family, relative_scale)
        else:
            for path, x in placed(beliefs, arrays).items():
                if isinstance(x, Belief):
                    weights[path] = x
                else:
                    weights[path].set_value(x)
        self.weights = nnx.data(nnx.traversals.unflatten_mapping(weights))
        of = priors("mj.Bayesian", prior, prior_scale, arrays)
        for path, belief in self.owned.items():
            belief.set_prior(of[path], learn_prior)

    def _set_options(self, structure: Any, landmarks: int | None, linearised: bool) -> None:
        right = isinstance(structure, type) and issubclass(structure, Covariance)
        names = ", ".join(STRUCTURES)
        rule = f"a covariance structure, one of {names} (the type itself, such as mj.Separable)"
        need("mj.Bayesian", right, rule, repr(structure), error=TypeError)
        num_landmarks("mj.Bayesian", 1, landmarks)
        self.structure, self.landmarks, self.linearised = structure, landmarks, linearised
        self.spread: Any = nnx.Variable(None)  # factors of the output's sds, see `corrected`

    # -- beliefs and networks -------------------------------------------------------------------------

    @property
    def owned(self) -> dict[Path, Belief]:
        """The belief about each random array, by the network's own paths."""
        return {path: x for path, x in self._flat().items() if isinstance(x, Belief)}

    @property
    def beliefs(self) -> dict[Any, Any]:
        """Posteriors and certain arrays, as in `nnx.to_pure_dict(nnx.state(network, nnx.Param))`."""
        flat = self._flat().items()
        known = {p: x.posterior if isinstance(x, Belief) else x[...] for p, x in flat}
        return nnx.traversals.unflatten_mapping(known)

    @property
    def likelihood(self) -> Any:
        """The likelihood, a learned noise at its present value; None without one."""
        return likelihoods.present(self.kind, self.noise)

    @property
    def output(self) -> Any:
        """The function that picks the output; None for networks that return one array."""
        return self._output.value

    def at_means(self) -> Any:
        """The plain network at the means, of the class that came in."""
        return as_given(self._network(mean_params(self.beliefs)))

    def sample(self, key: Array) -> Any:
        """The plain network of one draw of the weights, of the class that came in."""
        check_key("sample", key)
        return as_given(self._network(inlined(sample_params)(self.beliefs, key)))

    def kl(self) -> Array:
        """KL(posterior || prior) of all random weights, in nats."""
        return _kl([(belief.posterior, belief.prior) for belief in self.owned.values()])

    def as_prior(self, factor: Array | float = 1.0) -> dict[Any, Any]:
        """Means and variances of single weights, as `prior=` of another model; variances times a factor.

        A tree of `mj.posterior.GaussianPrior` in the places of random arrays; correlations are left out.
        In continual learning the factor says how much the old tasks count, and is the thing to tune.
        """
        known = known_values(factor)
        need("as_prior", known is None or known > 0, "a positive factor", factor)
        of = ((path, belief.posterior) for path, belief in self.owned.items())
        found = {p: GaussianPrior(x.mean, factor * x.marginal_variance()) for p, x in of}
        return nnx.traversals.unflatten_mapping(found)

    def with_beliefs(
        self, where: Any = nnx.Param, *, means: Any = None, sds: Any = None, relative: bool = False,
        prior: Any = None, prior_scale: float | None = None,
    ) -> Self:  # fmt: skip
        """A copy with other means, standard deviations or priors, in differentiated code too.

        Args:
          where: an NNX filter of the random arrays whose standard deviations and priors change.
          means: a tree of arrays in the places of weights, random or certain.
          sds: of single weights, which are independent then (`Factorized`): a positive number, or a tree
            of arrays in the places of random weights.
          relative: `sds` are over the root mean square of an array's means, at least .1.
          prior: as in `mj.Bayesian`, "network" for the means; what a tree omits stays as it is.
          prior_scale: as in `mj.Bayesian`; None for 1.
        """
        copy = nnx.clone(self)
        copy.spread = nnx.Variable(None)  # it was found with the beliefs before
        changed(copy._flat(), where, means, sds, relative, prior, prior_scale)
        return copy

    def scaled(self, factor: Array | float) -> Self:
        """A copy with all standard deviations multiplied by a positive number."""
        known = known_values(factor)
        right = known is None or (known >= 0).all()
        need("scaled", right, "a factor that is not negative", factor)
        copy = nnx.clone(self)
        copy.spread = nnx.Variable(None)  # it was found with the standard deviations before
        for belief in copy.owned.values():
            belief.scale_by(factor)
        return copy

    def replace(self, **options: Any) -> Self:
        """The same variables with another `structure`, `landmarks` or `linearised`.

        So a network trained in `Diagonal` predicts in `Separable`, and training one trains the other.
        Of a corrected model it is a copy.
        """
        known = {name: getattr(self, name) for name in ("structure", "landmarks", "linearised")}
        others = ", ".join(set(options) - set(known))
        need("replace", not others, f"one of {', '.join(known)}", others, error=TypeError)
        # A corrected model keeps variables of its own: others could be trained under its factor.
        copy = nnx.clone(self, variables=self.spread.get_value() is not None)
        copy._set_options(**{**known, **options})
        return copy

    def make_certain(self, network: Any) -> None:
        """Put this plain network in the place of the random one: nothing is random then, inputs neither.

        `mj.optim` observes the layers of the network at the means by it, in a copy of the model.
        """
        split: Any = nnx.split(as_nnx(network, self.output), nnx.Param, ...)
        graph, params, rest = split
        self.graph, self.rest = Static(graph), nnx.data(rest)
        self.weights = nnx.data(nnx.traversals.unflatten_mapping(dict(nnx.to_flat_state(params))))

    # -- moments --------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **options: Any) -> Moments:
        """Moments of the network's output.

        Args:
          inputs: the network's arguments, all with a batch axis before theirs, whose examples count as
            independent (else see `mj.joint`). One that is random is given as its moments, (mean, cov),
            independent of the weights.
          options: the network's keyword arguments, shared by all examples. Outside compiled code they
            are constants of the program: each new value, of a mask say, compiles again.
        """
        check_inputs(inputs, self.structure)
        return compiled_pass(self, inputs, options)

    def predict(self, *inputs: Any, batch_size: int = 256, **options: Any) -> Any:
        """The predictive distribution, `likelihood(model(x))`, compiled and in batches.

        Its arrays have the network's output shape: `probs`, `label`, `entropy`, `epistemic` of classes,
        `mean`, `sd`, `interval(.9)` of real values, and `log_prob(y)` and `sample(key)` of both.
        """
        self._needs_likelihood("predict")
        check_inputs(inputs, self.structure)
        return predicted(self, inputs, options, batch_size)

    def elbo(
        self, x: Any, y: Array, *, dataset_size: Array | int, kl_weight: Array | float = 1.0,
        **options: Any,
    ) -> Array:  # fmt: skip
        """The ELBO of a mini-batch, in nats for each example of the data; of one pass, without samples.

        Args:
          x: the network's input, or a tuple of its arguments.
          y: targets, with the batch axis leading: integers (B, ...) for Categorical.
          dataset_size: the number of examples in the data set.
          kl_weight: 1 for the bound itself; below 1 for warm-up or a cold posterior. Both may be traced.
          options: the network's keyword arguments.
        """
        likelihood, moments = self._needs_likelihood("elbo"), self(*arguments(x), **options)
        fits = likelihoods.expected("elbo", likelihood, y, moments)
        bound = objectives.elbo(fits, self.kl(), dataset_size=dataset_size, kl_weight=kl_weight)
        return bound / dataset_size

    def log_prob(self, x: Any, y: Array, *, batch_size: int = 256, **options: Any) -> Array:
        """Log predictive density of each target, in nats: `predict(x).log_prob(y)`."""
        return self.predict(*arguments(x), batch_size=batch_size, **options).log_prob(y)

    def check(
        self, x: Any, key: Array | None = None, samples: int = 300, *, y: Array | None = None,
        progress: bool | None = None, **options: Any,
    ) -> Check:  # fmt: skip
        """Whether the pass is right on this input, and its price beside that of sampled networks.

        Three comparisons: without noise the pass has to be the network, or a PropagationError names the
        first operation that is off; at a tenth of the noise its sd is that of the network linearised in
        its weights, which tells a wrong rule from a posterior that is wide; and sampled networks. With
        targets it also compares what the ELBO is made of, their expected log likelihood.

        Args (x and options are those of `elbo`):
          key: a JAX random key; None for a fixed one.
          samples: number of networks drawn, 2 or more.
          y: targets as for `elbo`, for the `claim` of the check.
          progress: as in `mj.calibrate`.
        """
        if y is not None:
            self._needs_likelihood("check")
        return checked(self, x, key, samples, y, progress, options)

    def corrected(
        self, x: Any, key: Array | None = None, samples: int = 32, progress: bool | None = None,
        **options: Any,
    ) -> Self:  # fmt: skip
        """A copy whose pass has the spread of sampled networks: a factor for each feature of the output.

        It is the mean ratio of sds on this input, so give a few dozen examples; of features that do not
        vary the others' mean. For `Diagonal`, which
        takes tokens as independent: their mean then has a fifth of its sd, and the factors mend most of
        that. They hold for these beliefs: `scaled` and `replace` forget them, and a gradient by the
        beliefs raises, so correct after training. Arguments are those of `check`.
        """
        given, known = (arguments(x), key, samples, progress), Static(options)
        (moments, _), ((_, sampled, _), _) = beside_sampled(self, "corrected", *given, known)
        sd, sampled = (x[..., None] if x.ndim == 1 else x for x in (moments.sd, sampled))
        varies = (sd > 0) & (sampled > 0)
        need("corrected", jnp.any(varies), "an output that varies", "variances of zero")
        ratio = jnp.where(varies, sampled / jnp.where(varies, sd, 1), jnp.nan)
        each = jnp.nanmean(ratio, axis=tuple(range(sd.ndim - 1)))  # of features, (C,)
        found, before = jnp.where(jnp.isnan(each), jnp.nanmean(each), each), self.spread.get_value()
        copy = nnx.clone(self)
        copy.spread = nnx.Variable(found if before is None else found * before)
        return copy

    def explain(self, *inputs: Any, **options: Any) -> Steps:
        """The operations of a pass, the rule that took each and what it assumes; prints as a table."""
        return explained(self, inputs, options)

    def __repr__(self) -> str:
        flat, owned = self._flat(), self.owned
        families = ", ".join(sorted({belief.family.__name__ for belief in owned.values()}))
        random = sum(belief.mean[...].size for belief in owned.values())
        certain = sum(x[...].size for path, x in flat.items() if path not in owned)
        landmarks = "" if self.landmarks is None else f", landmarks={self.landmarks}"
        linearised = ", linearised in the weights" if self.linearised else ""
        return (
            f"Bayesian({self.name})\n"
            f"  random: {random} weights in {len(owned)} arrays, {families or 'none'}\n"
            f"  certain: {certain} weights in {len(flat) - len(owned)} arrays\n"
            f"  moments: {self.structure.__name__}{landmarks}{linearised}\n"
            f"  likelihood: {self.kind if self.noise is None else 'Gaussian'}"
        )

    __str__ = __repr__

    # -- how -------------------------------------------------------------------------------------------

    def _flat(self) -> dict[Path, Any]:
        """Beliefs and certain parameters by the network's own paths."""
        flatten = nnx.traversals.flatten_mapping
        return flatten(self.weights, is_leaf=lambda _, x: not isinstance(x, dict))

    def _network(self, values: Any) -> nnx.Module:
        """The plain network with these arrays, on new variables, which it may write to while traced."""
        flat, kinds = nnx.traversals.flatten_mapping(values), self._flat()
        params = {
            path: nnx.Param(x) if isinstance(kinds[path], Belief) else kinds[path].replace(x)
            for path, x in flat.items()
        }
        state = nnx.from_flat_state(params), jax.tree.map(lambda x: x, self.rest)
        network: nnx.Module = nnx.merge(self.graph.value, *state, copy=True)
        return network

    def _needs_likelihood(self, method: str) -> Any:
        known, mend = self.likelihood, "Give it to mj.Bayesian(network, mj.Categorical())."
        need(method, known is not None, "a likelihood", "a model without one", mend)
        return known


@inlined
def _kl(pairs: list[tuple[Posterior, Any]]) -> Array:
    return sum((posterior.kl(prior) for posterior, prior in pairs), jnp.zeros(()))


class Mixture(Module):
    """The equal mixture of `mj.Bayesian` models of one likelihood: one is right, and nobody knows which.

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> nets = [nnx.Linear(3, 1, rngs=nnx.Rngs(seed)) for seed in range(2)]
    >>> model = mj.nn.Mixture([mj.Bayesian(net, mj.Gaussian(0.1)) for net in nets])
    >>> prediction = model.predict(jnp.ones((5, 3)))
    >>> prediction.mean.shape, prediction.log_prob(jnp.zeros((5, 1))).shape
    ((5, 1), (5,))
    """

    def __init__(self, members: Sequence[Bayesian]) -> None:
        known: Any = members if isinstance(members, Sequence) else [members]
        right = known is members and known and all(isinstance(x, Bayesian) for x in known)
        came = ", ".join(type(x).__name__ for x in known) or "an empty one"
        need("mj.nn.Mixture", right, "a list of mj.Bayesian", came, error=TypeError)
        self.members = nnx.List(members)

    def __repr__(self) -> str:
        return f"Mixture of {len(self.members)}, the first of which is {self.members[0]!r}"

    __str__ = __repr__

    def predict(self, *inputs: Any, batch_size: int = 256, **options: Any) -> Any:
        """The average of the members' predictive distributions, with the same methods as one of them.

        Probabilities of classes are averaged. Of real values, `log_prob` is that of the mixture, mean
        and variance follow the law of total variance, and `quantile` solves for the mixture's.
        """
        options |= {"batch_size": batch_size}
        return averaged([member.predict(*inputs, **options) for member in self.members])

    log_prob: Any = Bayesian.log_prob
