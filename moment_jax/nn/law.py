"""The first law on the user's data: the first call of every program is held to the plain network."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.covariance.fields import need
from moment_jax.nn.belief import joined
from moment_jax.nn.inputs import with_batch
from moment_jax.nn.static import Static
from moment_jax.posterior.base import mean_params
from moment_jax.propagation import law
from moment_jax.propagation.propagator import is_random_input, plan

EXAMPLES = 8  # on which the plain network runs

_held: set[Any] = set()  # programs that were held to the law, and their networks
_told: set[Any] = set()  # networks of which it was said that they were not


def hold(
    model: Any, graph: Any, state: Any, inputs: Any, known: Static, mean: Callable[[Any], Any],
    *, always: bool = False,
) -> None:  # fmt: skip
    """Raise a PropagationError if a program's mean without noise is not the network; once a program.

    `mean` is the compiled program, from the model's state to the mean of the pass; `known` are its
    options. With `always` also of a program that was held before.
    """
    shapes = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves((state, inputs)))
    program = graph, known, jax.tree.structure(inputs), shapes
    if (program in _held and not always) or not _holds(model, inputs):
        return
    certain = without_noise(model)
    _, state = nnx.split(certain)
    given = jax.tree.map(lambda x: x[:EXAMPLES], inputs)
    plain = partial(at_means, graph, known=known)
    output = plain(state, given)
    if np.isnan(output).any():  # of a weight, perhaps
        for path, x in nnx.to_flat_state(nnx.state(certain, nnx.Param)):
            came = f"NaN in {joined(path)}, and so in the network's output"
            need("mj.Bayesian", not np.isnan(x[...]).any(), "finite weights", came)

    def own() -> float:
        unit = law.rounding(jax.make_jaxpr(plain)(state, given))
        return law.deviation(plain(*law.rounded((state, given), unit)), output)

    def culprit(bound: float) -> str:
        alone = plain(state, jax.tree.map(lambda x: x[:1], given))
        if law.deviation(alone, output[: len(alone)]) > bound:
            return (
                " The network gives an example another output beside others than alone, but `Bayesian` "
                "takes the examples of a batch as independent."
            )
        one = tuple(with_batch(x) for x in jax.tree.map(lambda x: x[0], inputs))
        fn = as_function(certain, known.value)
        planned = partial(plan, fn, structure=model.structure, landmarks=model.landmarks)
        return law.first_off(bound, planned, certain.beliefs, one)

    found = mean(state)
    law.hold_to_network(found[: len(output)], output, own, culprit)
    _held.update((program, _network(model)))


def note_unheld(model: Any) -> None:
    """Say once that a model is compiled into a user's program whose pass was never held to the law."""
    if _holds(model, ()) and _network(model) not in _held | _told:
        _told.add(_network(model))
        logging.getLogger("moment_jax").warning(
            f"moment_jax: the pass of {model.name} ({model.structure.__name__}) has not been compared "
            "with the network yet. Call model.check(x), or model(x), once outside of jit."
        )


def is_held(model: Any) -> bool:
    """Whether a pass of this network in this structure was held to the law."""
    return _network(model) in _held


def without_noise(model: Any) -> Any:
    """A copy with standard deviations of zero, for the same programs: nothing compiles."""
    copy = nnx.clone(model)
    for belief in copy.owned.values():
        for name in {"scale", "entries"} & set(belief.raw):
            raw = belief.raw[name].get_value()
            value = np.full(raw.shape, -np.inf, raw.dtype)
            if name == "entries":
                value = np.where(np.eye(len(value), dtype=bool), value, np.zeros_like(value))
            belief.raw[name].set_value(law.placed_as(value, raw))
    return copy


def as_function(model: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """The network as a function of its weights' values and its inputs, to be propagated."""

    def fn(values: Any, *inputs: Any) -> Any:
        return model._network(values)(*inputs, **options)

    return fn


def _holds(model: Any, inputs: Any) -> bool:
    """Whether there is anything to hold: a linearised mean is the network's, a random input's is not."""
    random = model.owned and not any(map(is_random_input, inputs))
    return bool(random and model.verify and not model.linearised)


def _network(model: Any) -> Any:
    return model.graph, model.structure


@partial(jax.jit, static_argnums=0, static_argnames="known")
def at_means(graph: Any, state: Any, inputs: Any, *, known: Static) -> Array:
    """The plain network's output at the means."""
    model: Any = nnx.merge(graph, state)
    return jnp.asarray(as_function(model, known.value)(mean_params(model.beliefs), *inputs))
