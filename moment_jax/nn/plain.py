"""What `mj.Bayesian`, `fit` and `laplace` take: Flax modules in inference mode, and their inputs."""

import inspect
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.interpreters import partial_eval

from moment_jax.covariance import Covariance, Moments
from moment_jax.propagation import PropagationError, errors
from moment_jax.propagation.propagator import is_random_input

FLOATING = nnx.All(nnx.Param, lambda _, x: is_floating(x))  # a filter


class Module(nnx.Module):
    """A Flax module whose constructor shows its arguments; Flax's metaclass hides them."""

    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = inspect.signature(cls.__init__)
        cls.__signature__ = own.replace(parameters=[*own.parameters.values()][1:])


class Linen(nnx.Module):
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


class Raveled(nnx.Module):
    """A network whose real weights are one vector: a belief about it knows how all of them go together.

    Args:
      network: in inference mode; it is copied.
    """

    def __init__(self, network: nnx.Module) -> None:
        split: Any = nnx.split(network, FLOATING, ...)
        self.graph, weights, rest = split
        flat, self.unravel = ravel_pytree(weights)
        self.weights, self.rest = nnx.Param(flat), nnx.data(jax.tree.map(lambda x: x, rest))

    @property
    def network(self) -> Any:
        """The network in its own class."""
        weights = self.unravel(self.weights[...])
        return nnx.merge(self.graph, weights, jax.tree.map(lambda x: x, self.rest), copy=True)

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays by path, in the vector's order."""
        leaves = jax.tree_util.tree_leaves_with_path(self.unravel(self.weights[...]))
        names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)
        values = (x for _, x in leaves)
        return dict(zip((x.removesuffix("/value") for x in names), values, strict=True))

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.network(*inputs, **options)


def as_nnx(network: Any) -> nnx.Module:
    """The network as an NNX module; raises for anything else."""
    if hasattr(type(network), "beliefs"):
        raise TypeError("`mj.Bayesian` needs a plain network. Got a Bayesian; use its at_means().")
    if isinstance(network, nnx.Module):
        return network
    if isinstance(network, linen.Module):
        if network.scope is None:
            raise TypeError(
                f"`mj.Bayesian` needs a linen module bound to its variables. Got a free "
                f"{type(network).__name__}. Use module.bind(variables)."
            )
        return Linen(*network.unbind())
    raise TypeError(
        f"`mj.Bayesian` needs a Flax module. Got {type(network).__name__}. For a function of "
        "parameters, use mj.propagate(fn)(params, x)."
    )


def as_given(network: nnx.Module) -> Any:
    """The network in its own class: a linen module is bound again."""
    if isinstance(network, Raveled):
        network = network.network
    return network.module.bind(network.variables) if isinstance(network, Linen) else network


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


def is_floating(value: Any) -> bool:
    """Whether a parameter holds real numbers."""
    return jnp.issubdtype(getattr(value, "dtype", int), jnp.floating) and value.size > 0


def arguments(x: Any) -> tuple[Any, ...]:
    """The network's arguments: a tuple of them, or the only one, which may be (mean, cov)."""
    return x if isinstance(x, tuple) and not is_random_input(x) else (x,)


def with_batch(x: Any, axes: int) -> Any:
    """An input with batch axes of length one."""
    if is_random_input(x):
        return Moments(errors.with_axes(x[0], axes), x[1])
    return errors.with_axes(x, axes)


def check_inputs(inputs: tuple[Any, ...], axes: int, structure: type[Covariance]) -> None:
    """Raise unless all are arrays with so many batch axes, and random ones have their covariance."""
    for x, cov in (x for x in inputs if is_random_input(x)):
        width = (1, *x.shape[axes:])[-1]
        wanted = (*x.shape[:axes], math.prod(x.shape[axes:]) // width, width)
        if type(cov) is not structure or tuple(cov.shape) != wanted:
            raise ValueError(
                f"A random input (mean, cov) needs a covariance in {structure.__name__} of "
                f"shape {wanted}, with the mean's batch axes. Got {type(cov).__name__} of "
                f"{tuple(cov.shape)}."
            )
    for x in (x[0] if is_random_input(x) else x for x in inputs):
        if not hasattr(x, "ndim") or x.ndim < axes or 0 in x.shape[:axes]:
            got = getattr(x, "shape", type(x).__name__)
            raise ValueError(
                f"A Bayesian model needs arrays of an example or more, with {axes} leading batch axes. "
                f"Got {got}. For one input, use x[None], or mj.Bayesian(..., batch_axes=0)."
            )


def explain_batch(
    plain: Any, inputs: tuple[Any, ...], options: Any, axes: int, error: Exception
) -> None:
    """Raise a ValueError if the model failed because inputs have one batch axis too few or many."""
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

    if errors.takes(plain, as_one(axes)):
        return
    rule = f"`mj.Bayesian` takes the first {axes} axes of its inputs as a batch"
    one, raised = "a single example of this model has", f"The network raised: {error}"
    mend = f"For one input, use x[None]{'' if axes == 1 else ', once for each axis'}. {raised}"
    more = f"Give batch_axes={axes + 1}. {raised}"
    whole = plain, as_one(0), f"{one} all of theirs", mend
    errors.explain(
        rule, inputs, error, whole, (plain, as_one(axes + 1), f"{one} one axis less", more)
    )
