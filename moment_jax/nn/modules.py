"""Networks as they come in: NNX modules, linen modules with their variables, in inference mode."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.errors import InvalidRngError, ModifyScopeVariableError
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.interpreters import partial_eval

from moment_jax.covariance.fields import by_shapes, need
from moment_jax.nn.static import Static

DRAWS, WRITES = "draws random numbers", "writes statistics, a cache or other state"
FLOATING = nnx.All(  # a filter of parameters that hold real numbers
    nnx.Param, lambda _, x: jnp.issubdtype(getattr(x, "dtype", int), jnp.floating) and x.size > 0
)


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
        self.module = Static(module)  # it may hold a configuration without a hash
        params = jax.tree.map(nnx.Param, variables["params"])
        rest = {k: jax.tree.map(nnx.Variable, v) for k, v in variables.items() if k != "params"}
        self.params, self.others = nnx.data(dict(params)), nnx.data(rest)

    @property
    def variables(self) -> dict[str, Any]:
        """The arrays, as linen takes them."""
        pure = nnx.to_pure_dict(nnx.state(self))
        return {"params": pure.get("params", {}), **pure.get("others", {})}

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.module.value.apply(self.variables, *inputs, **options)


class Raveled(nnx.Module):
    """A copy of a network, its real weights one vector: a belief knows how all of them go together."""

    def __init__(self, network: nnx.Module) -> None:
        split: Any = nnx.split(network, FLOATING, ...)
        graph, weights, rest = split
        self.graph = Static(graph)
        flat, self.unravel = ravel_pytree(weights)
        self.weights, self.rest = nnx.Param(flat), nnx.data(jax.tree.map(lambda x: x, rest))

    @property
    def network(self) -> Any:
        """The network in its own class."""
        weights = self.unravel(self.weights[...])
        return nnx.merge(self.graph.value, weights, jax.tree.map(lambda x: x, self.rest), copy=True)

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays by path, in the vector's order."""
        flat = nnx.to_flat_state(self.unravel(self.weights[...]))
        return {"/".join(map(str, path)): x[...] for path, x in flat}

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.network(*inputs, **options)


class Picked(nnx.Module):
    """A network of which `output` picks an array; its variables are shared, under its own paths."""

    def __init__(self, network: nnx.Module, output: Static) -> None:
        graph, state = nnx.split(network)
        self._graph, self._output = Static(graph), output
        flat: Any = dict(nnx.to_flat_state(state))
        for name, part in nnx.traversals.unflatten_mapping(flat).items():
            setattr(self, name, nnx.data(part))

    @property
    def network(self) -> Any:
        """The network in its own class, on the same variables."""
        return nnx.merge(self._graph.value, nnx.state(self))

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self._output.value(self.network(*inputs, **options))


def as_nnx(network: Any, output: Callable[[Any], Any] | None = None) -> nnx.Module:
    """The network as an NNX module whose output is picked by `output`; raises for anything else."""
    check = partial(need, "mj.Bayesian", error=TypeError)
    plain = not hasattr(type(network), "beliefs")
    check(plain, "a plain network", "a Bayesian; use its at_means()")
    came = type(network).__name__
    mend = "For a function of parameters, use mj.propagate(fn)(params, x)."
    if isinstance(network, type):
        came, mend = f"the class {network.__name__}", "Give an object of it."
    check(isinstance(network, nnx.Module | linen.Module), "a Flax module", came, mend)
    if isinstance(network, linen.Module):
        rule, mend = "a linen module bound to its variables", "Use module.bind(variables)."
        check(network.scope is not None, rule, f"a free {came}", mend)
        network = Linen(*network.unbind())
    if output is None:
        return network
    rule, mend = "a function of what the network returns", "Give it as lambda out: out.logits."
    need("output", callable(output), rule, repr(output), mend, TypeError)
    return Picked(network, Static(output))


def as_given(network: nnx.Module) -> Any:
    """The network in its own class: a linen module is bound again."""
    if isinstance(network, Raveled):
        network = network.network
    if isinstance(network, Picked):
        network = network.network
    return network.module.value.bind(network.variables) if isinstance(network, Linen) else network


def inference_output(
    caller: str, network: nnx.Module, inputs: tuple[Any, ...], options: Any, *, keys: bool = True
) -> Any:
    """Shape and type of `network(*inputs)`; raises unless it is one array, in inference mode."""
    # What layers report or draw is no state that the next call would need.
    stored = nnx.Not(nnx.Any(nnx.Param, nnx.RngState, nnx.Intermediate))
    split: Any = nnx.split(network, nnx.RngState, stored, ...)
    graph, *state = split
    random, written = (len(jax.tree.leaves(part)) for part in state[:2])

    def run(state: Any, inputs: Any) -> Any:
        model: Any = nnx.merge(graph, *state, copy=True)
        before = jax.tree.map(lambda x: x, nnx.state(model, stored))
        return before, model(*inputs, **options), nnx.state(model, stored)

    mode = (
        f"`{caller}` needs a network in inference mode. Got one that {{}}. Call network.eval() first, "
        "or set deterministic=True, use_running_average=True and decode=False."
    )
    try:
        closed, found = jax.make_jaxpr(run, return_shape=True)(state, inputs)
    except (InvalidRngError, ModifyScopeVariableError) as error:
        draws = isinstance(error, InvalidRngError)
        raise ValueError(mode.format(DRAWS if draws else WRITES)) from error
    if random + written == 0:
        return _one_array(caller, found[1])
    outvars, outputs = closed.jaxpr.outvars, len(jax.tree.leaves(found[1]))
    before = len(jax.tree.leaves(found[0]))
    changed = outvars[:before] != outvars[before + outputs :]
    of_output = [before <= i < before + outputs for i in range(len(outvars))]
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, of_output)
    if changed or (keys and any(used[:random])):
        raise ValueError(mode.format(WRITES if changed else DRAWS))
    return _one_array(caller, found[1])


def _one_array(caller: str, found: Any) -> Any:
    if hasattr(found, "shape"):
        return found
    if dataclasses.is_dataclass(found):
        names = (field.name for field in dataclasses.fields(found))
        parts = {f".{name}": getattr(found, name) for name in names}
    elif isinstance(found, Mapping):
        parts = {f"[{name!r}]": part for name, part in found.items()}
    else:
        each = found if isinstance(found, list | tuple) else ()
        parts = {f"[{i}]": part for i, part in enumerate(each)}
    shown = {name: by_shapes(x) for name, x in parts.items() if hasattr(x, "shape")}
    came = ", ".join(f"out{name} = {array}" for name, array in shown.items()) or "no array in it"
    first = next((name for name in shown if "logits" in name), next(iter(shown), None))
    mend = "Return an array." if first is None else f"Give output=lambda out: out{first}."
    rule, came = "one array, or output= to pick it", f"{type(found).__name__}: {came}"
    raise TypeError(f"`{caller}` needs a network that returns {rule}. Got {came}. {mend}")
