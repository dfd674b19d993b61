"""Compiled passes and predictions of a `mj.Bayesian`; its graph and the network's options are static."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from moment_jax.covariance import Diagonal, Full, Moments
from moment_jax.covariance.fields import need
from moment_jax.nn.inputs import check_certain, check_inputs, explain_batch, with_batch
from moment_jax.nn.law import as_function, hold, is_held, note_unheld
from moment_jax.nn.modules import inference_output
from moment_jax.nn.static import Static
from moment_jax.posterior.base import mean_params
from moment_jax.progress import compiling
from moment_jax.propagation import linearised as linearise
from moment_jax.propagation import propagate
from moment_jax.propagation.errors import Steps
from moment_jax.propagation.propagator import is_random_input, plan
from moment_jax.xla import inlined, with_automatic_axes


def predicted(model: Any, inputs: Any, options: dict[str, Any], batch_size: int) -> Any:
    """`model.likelihood(model(*inputs, **options))`; the last batch repeats its first example."""
    right = isinstance(batch_size, int | np.integer) and batch_size >= 1
    need("predict", right, "an integer batch_size >= 1", batch_size)
    known = Static(options)
    size = jax.tree.leaves(inputs)[0].shape[0]
    if size <= batch_size:
        return _run(model, inputs, known, predicts=True)
    parts = []
    for first in range(0, size, batch_size):
        rows = np.arange(first, first + batch_size)
        rows = np.where(rows < size, rows, first)
        batch = jax.tree.map(lambda x, rows=rows: jnp.asarray(x)[rows], inputs)
        parts.append(_run(model, batch, known, predicts=True))
    return _joined(parts, size)


@partial(inlined, static_argnums=1)
def _joined(parts: list[Any], size: int) -> Any:
    return jax.tree.map(lambda *each: jnp.concatenate(each)[:size], *parts)


def compiled_pass(model: Any, inputs: Any, options: dict[str, Any]) -> Any:
    """`model(*inputs, **options)` as one program; in compiled or differentiated code as it stands."""
    if is_traced((nnx.state(model), inputs, options)):
        note_unheld(model)
        return moments_of(model, inputs, options)
    return _run(model, inputs, Static(options), predicts=False)


def moments_of(model: Any, inputs: tuple[Any, ...], options: Any) -> Any:
    """The moments of the output, in code that is compiled or traced."""
    beliefs = model.beliefs
    means = tuple(x[0] if is_random_input(x) else x for x in inputs)
    if not model.owned:
        output = model._network(beliefs)(*means, **options)
        shape = (1, 1, *output.shape[1:])
        dense = model.linearised and model.structure is not Diagonal
        kept = Full if dense else model.structure
        zeros = kept.zeros((math.prod(shape[:-1]), shape[-1]), output.dtype)
        broadcast = partial(jax.tree.map, lambda x: jnp.broadcast_to(x, (len(output), *x.shape)))
        return Moments(output, broadcast(zeros))

    fn = as_function(model, options)
    if model.linearised:
        mend = "Use model.replace(linearised=False)."
        check_certain("mj.Bayesian(linearised=True)", inputs, mend)
        of: Any = linearise(fn, structure=Diagonal if model.structure.entrywise else Full)
    else:
        of = propagate(fn, structure=model.structure, landmarks=model.landmarks)

    def one(beliefs: Any, inputs: Any) -> Any:
        factors = model.spread.get_value()
        known = beliefs if factors is None else as_corrected(beliefs)
        mean, cov = of(known, *(with_batch(x) for x in inputs))
        return mean, cov if factors is None else cov.rescale(factors[None])

    try:
        shape = _output_shape(model, means, options)
        each = jax.vmap(one, (None, 0))
        mean, cov = with_automatic_axes(lambda both: each(*both), (beliefs, inputs), 1)
    except Exception as error:
        known = mean_params(beliefs)
        explain_batch(lambda x: fn(known, *x), means, options, error)
        raise
    return Moments(mean.reshape(mean.shape[0], *shape), cov)


def explained(model: Any, inputs: Any, options: dict[str, Any]) -> Steps:
    """See `Bayesian.explain`."""
    check_inputs(inputs, model.structure)
    rule, came = "a pass of operations", "a linearised model, which takes the network as a whole"
    need("explain", not model.linearised, rule, came, "Use model.replace(linearised=False).")
    steps: Steps = Steps()
    graph, state = nnx.split(model)  # traced: no more is known than in the pass

    def run(state: Any, inputs: Any) -> None:
        at: Any = nnx.merge(graph, state)
        one = tuple(with_batch(x) for x in jax.tree.map(lambda x: x[0], inputs))
        _, found = plan(as_function(at, options), at.beliefs, one, at.structure, at.landmarks)
        steps.extend(found.steps.values())

    try:
        jax.eval_shape(run, state, inputs)
    except Exception as error:
        fn, means = as_function(model, options), mean_params(model.beliefs)
        explain_batch(lambda x: fn(means, *x), inputs, options, error)
        raise
    known = "is the network" if is_held(model) else "was not compared with it yet: model.check(x)"
    steps.law = f"Without noise the pass {known}."
    return steps


def _output_shape(model: Any, inputs: tuple[Any, ...], options: Any) -> tuple[int, ...]:
    """The shape of one example's output; raises for a network in training mode."""
    ones = tuple(jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in inputs)
    network = model._network(mean_params(model.beliefs))
    # `propagate` says itself where random numbers are drawn.
    found = inference_output("mj.Bayesian", network, ones, options, keys=model.linearised)
    rule = "a network whose output has the batch axis of its inputs"
    came = f"{tuple(found.shape)} for one example"
    need("mj.Bayesian", found.shape[:1] == (1,), rule, came)
    return tuple(found.shape[1:])


def _run(model: Any, inputs: Any, known: Static, predicts: bool) -> Any:
    """The result of the pass, which is held to the law at its first call."""
    graph, state = nnx.split(model)
    program = partial(run_pass, graph, known=known, predicts=predicts)
    with compiling(f"the pass of {model.name} ({model.structure.__name__})"):
        result, _ = program(state, inputs)
    if is_traced((state, inputs)):
        note_unheld(model)
    else:
        hold(model, graph, state, inputs, known, lambda x: program(x, inputs)[1])
    return result


def is_traced(tree: Any) -> bool:
    """Whether a value is not known yet, in a program of the user's own."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


@jax.custom_jvp
def as_corrected(beliefs: Any) -> Any:
    """Beliefs that have no derivative, for the spread was found at their values."""
    return beliefs


@as_corrected.defjvp
def _refused(*_: Any) -> Any:
    raise ValueError(
        "A corrected model has factors that hold for its present beliefs. Got a derivative by them. "
        "Train the model that `corrected` was called on, or model.replace(), and correct it afterwards."
    )


@partial(jax.jit, static_argnums=0, static_argnames=("known", "predicts"))
def run_pass(
    graph: Any, state: Any, inputs: Any, *, known: Static, predicts: bool = False
) -> tuple[Any, Array]:
    """The moments, or their predictive distribution, and the mean, to which the law holds."""
    model: Any = nnx.merge(graph, state)
    moments = moments_of(model, inputs, known.value)
    return model.likelihood(moments) if predicts else moments, moments.mean
