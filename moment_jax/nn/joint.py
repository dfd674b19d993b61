"""Joint moments of the outputs of several inputs, of the network linearised in its weights."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from moment_jax.covariance.fields import need
from moment_jax.nn.bayesian import Bayesian
from moment_jax.nn.inputs import arguments, check_certain, check_inputs, with_batch
from moment_jax.nn.law import EXAMPLES, as_function, at_means
from moment_jax.nn.prediction import is_traced
from moment_jax.nn.static import Static
from moment_jax.posterior import Point, Posterior, sample_params
from moment_jax.posterior.base import mean_params
from moment_jax.propagation.derivatives import check_derivatives
from moment_jax.propagation.weights import root_of

MOST = 2**28  # numbers of a factor or a covariance, 1 GiB in float32
NUMBERS = 2**20  # of the Jacobian at once: they stay in the cache
DRAWS, LARGE = 4, 0.25  # networks by which linearity is judged, and their largest nonlinear share


class Joint(NamedTuple):
    """Moments of the outputs (N, ...) of N inputs as one vector of M = N ... numbers."""

    mean: Array  # (M,)
    cov: Array  # (M, M)
    cross: Array | None  # with the outputs of the targets, (M, M of the targets)


def joint(
    model: Bayesian, x: Any, targets: Any = None, *, rank: int | None = None, **options: Any
) -> Joint:
    """Joint mean and covariance of the outputs of all inputs, of the network linearised in its weights.

    The outputs of different inputs share the noise of the weights, which `model(x)` leaves out. The
    covariance is F F^T, F the derivatives by all P random weights times a root of their covariance.

    Only small noise is described, so four networks are drawn first: where more than a quarter of how
    their outputs differ from the mean network's, in squares, is nonlinear, a ValueError is raised (not
    in a program of your own, whose values are not known). That share is about the relative error of the
    covariances: at sds of .05 and .1 of the weights' size it is .002 and .009 in an MLP, .11 and .33 in
    a ViT of two blocks, .18 and .58 in a decoder.

    Args:
      model: in any structure, whose derivatives are those of its values.
      x: the network's input (N, ...), or a tuple of its arguments: certain, and so few that 2^28 numbers
        are enough. A ValueError is raised else.
      targets: further inputs, whose covariance with those of x is wanted.
      rank: numbers in a row of F; None for P. Fewer are random sums with signs, which keep variances:
        covariances between inputs are .32 off with 400, .16 with 1,600 (10 classes, 27,000 weights). Of
        64 inputs F takes 46 plain forwards, F F^T 60 more with all P, and .3 with 400.
      options: the network's keyword arguments.

    >>> import moment_jax as mj
    >>> net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    >>> found = mj.joint(mj.Bayesian(net), jnp.eye(5, 3), jnp.ones((4, 3)))
    >>> found.mean.shape, found.cov.shape, found.cross.shape
    ((10,), (10, 10), (10, 8))
    """
    need("joint", isinstance(model, Bayesian), "a mj.Bayesian", type(model).__name__)
    need("joint", rank is None or rank >= 1, "rank >= 1", rank, "None is exact.")
    graph, state = nnx.split(model)
    found: list[tuple[Array, Array]] = []
    for inputs in map(arguments, (x,) if targets is None else (x, targets)):
        check_certain("joint", inputs)
        check_inputs(inputs, model.structure)
        known = Static(options)
        output = jax.eval_shape(partial(at_means, graph, known=known), state, inputs)
        weights = sum(math.prod(belief.shape) for belief in model.owned.values())
        most = max(output.size * min(rank or weights, weights), output.size**2)
        came = f"{most}, for {output.size} outputs and {weights} random weights"
        mend = "Give fewer inputs, or a rank." if rank is None else "Give fewer inputs."
        need("joint", most <= MOST, "at most 2^28 numbers", came, mend)
        if not found and not is_traced((state, inputs)):
            few = jax.tree.map(lambda x: x[:EXAMPLES], inputs)
            share = float(_nonlinearity(graph, state, few, known))
            came = f"{share:.0%} of their squares nonlinear"
            mend = "Give less noise, or take the covariance over 1,000 of model.sample(key)(x)."
            need("joint", not share > LARGE, "changes of outputs to be near linear", came, mend)
        found.append(_factor(graph, state, inputs, known, rank))
    (mean, factor), *others = found
    return Joint(mean, factor @ factor.T, factor @ others[0][1].T if others else None)


def _network(
    graph: Any, state: Any, inputs: Any, options: Static
) -> tuple[Callable[[Any, Any], Array], Any, dict[int, Posterior]]:
    """The output of one input by the means of the random weights; those means; and all weights."""
    model: Any = nnx.merge(graph, state)
    leaves, tree = jax.tree.flatten(model.beliefs, is_leaf=lambda x: isinstance(x, Posterior))
    beliefs = {i: x for i, x in enumerate(leaves) if isinstance(x, Posterior)}
    random = {i: x for i, x in beliefs.items() if not isinstance(x, Point)}
    means = {i: x.mean for i, x in random.items()}
    fn = as_function(model, options.value)

    def output(means: Any, one: Any) -> Array:
        filled = mean_params([means.get(i, x) for i, x in enumerate(leaves)])
        return fn(jax.tree.unflatten(tree, filled), *(with_batch(x) for x in one)).ravel()

    first = jax.tree.map(lambda x: x[0], inputs)
    check_derivatives("joint", lambda at: output(at, first), means)
    return output, means, random


@partial(jax.jit, static_argnums=(0, 3))
def _nonlinearity(graph: Any, state: Any, inputs: Any, options: Static) -> Array:
    """The share of what networks differ in from the mean network, that the linearised one has not."""
    output, means, beliefs = _network(graph, state, inputs, options)

    def of_draw(key: Array) -> Array:
        drawn = sample_params(beliefs, key)
        changes = jax.tree.map(jnp.subtract, drawn, means)

        def of_input(one: Any) -> Array:
            mean, linear = jax.jvp(lambda at: output(at, one), (means,), (changes,))
            rest = output(drawn, one) - mean - linear
            return jnp.stack([jnp.sum(rest**2), jnp.sum(linear**2)])

        return jax.vmap(of_input)(inputs).sum(axis=0)

    rest, linear = jax.lax.map(of_draw, jax.random.split(jax.random.key(0), DRAWS)).sum(axis=0)
    return rest / jnp.where(linear > 0, linear, 1)


@partial(jax.jit, static_argnums=(0, 3, 4))
def _factor(
    graph: Any, state: Any, inputs: Any, options: Static, rank: int | None
) -> tuple[Array, Array]:
    """The outputs (M,), and F (M, P), or (M, rank)."""
    output, means, beliefs = _network(graph, state, inputs, options)
    roots = {i: root_of(belief) for i, belief in beliefs.items()}
    weights = sum(x.size for x in means.values())

    def rows(one: Any) -> tuple[Array, Array]:
        mean, pull = jax.vjp(lambda at: output(at, one), means)
        (jacobian,) = jax.vmap(pull)(jnp.eye(mean.size, dtype=mean.dtype))
        parts = [roots[i](x.reshape(mean.size, -1)) for i, x in jacobian.items()]
        if rank is None or rank >= weights:
            return mean, jnp.concatenate(parts, axis=1)
        sums, start = jnp.zeros((mean.size, rank), mean.dtype), 0
        for x in parts:
            signs = jax.random.rademacher(jax.random.key(start), x.shape[1:], x.dtype)
            ends = start % rank, -(start + x.shape[1]) % rank  # where the array before ended
            padded = jnp.pad(x * signs, ((0, 0), ends))
            sums, start = sums + padded.reshape(mean.size, -1, rank).sum(axis=1), start + x.shape[1]
        size = jnp.sum(sums**2, axis=1, keepdims=True)
        known = jnp.stack([jnp.sum(x**2, axis=1, keepdims=True) for x in parts]).sum(axis=0)
        return mean, sums * jnp.sqrt(known / jnp.where(size > 0, size, 1))

    count = jax.eval_shape(output, means, jax.tree.map(lambda x: x[0], inputs)).size
    at_once = max(1, NUMBERS // (count * weights))
    mean, factor = jax.lax.map(rows, inputs, batch_size=at_once)
    return mean.ravel(), factor.reshape(mean.size, -1)
