"""`bayesian`: moments of any Flax model, from a belief about its parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.interpreters import partial_eval

from moment_jax.covariance import Covariance, Diagonal, Full, Separable
from moment_jax.posterior import Posterior
from moment_jax.propagation import linearised as linearise
from moment_jax.propagation import propagate
from moment_jax.propagation.errors import shapes, takes, with_axes


def bayesian(
    model: nnx.Module,
    posterior: Any,
    *,
    structure: type[Covariance] = Separable,
    batch_axes: int = 1,
    linearised: bool = False,
    receipt: bool = False,
) -> Callable[..., Any]:
    """A function that takes the model's arguments and returns mean and covariance of its output.

    The model itself is not changed: its operations are traced and carried out on moments, see
    `propagate`. It has to be in inference mode (`model.eval()`, or `deterministic=True`).

    Args:
      model: a Flax NNX module that returns one array.
      posterior: beliefs in the places of parameters, in a tree like `nnx.to_pure_dict(nnx.state(model,
        nnx.Param))`; parameters that it omits are certain.
      structure: in which covariances are kept, as in `propagate`.
      batch_axes: the number of leading batch axes of the inputs, all of which lose them; keyword
        arguments are shared by all examples.
      linearised: linearise the network in its weights, which is right for a Laplace approximation, see
        `mj.linearised`; the covariance is `Full` then, or `Diagonal` if that is the structure.
      receipt: also return the operations, see `propagate`; for inputs without batch axes.

    Returns:
      The function. Its mean has the shape of the model's output. Its covariance is that of a sequence
      (T, D), the last axis being D, with the batch axes leading in its fields.

    Raises:
      TypeError: if `model` is no module. ValueError: if the beliefs do not fit the parameters, or the
        model is in training mode.

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> first, second = (nnx.Linear(3, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    >>> model = nnx.Sequential(first, jax.nn.gelu, second)
    >>> weights = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    >>> beliefs = jax.tree.map(lambda w: mj.posterior.Factorized(w, (0.1 * w) ** 2), weights)
    >>> mean, cov = mj.bayesian(model, beliefs)(jnp.ones((5, 3)))
    >>> mean.shape, cov.variance().shape
    ((5, 3), (5, 1, 3))
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"`bayesian(model, posterior)` needs a Flax NNX module. Got {type(model).__name__}. For a "
            "function of parameters, use mj.propagate(fn)(params, x)."
        )
    split: Any = nnx.split(model, nnx.Param, ...)
    graph, parameters, rest = split
    known = nnx.to_pure_dict(parameters)
    given = nnx.to_pure_dict(posterior) if isinstance(posterior, nnx.State) else posterior
    beliefs = _completed(known, given)

    def merged(values: Any) -> Any:
        """The model with these parameters, on new variables, which it may write to while traced."""
        filled, others = jax.tree.map(lambda x: x, (parameters, rest))
        nnx.replace_by_pure_dict(filled, values)
        return nnx.merge(graph, filled, others)

    def call(*inputs: Any, **options: Any) -> Any:
        for x in inputs:
            if not hasattr(x, "ndim") or x.ndim < batch_axes:
                got = getattr(x, "shape", type(x).__name__)
                raise ValueError(
                    f"A Bayesian model needs arrays with {batch_axes} leading batch axes. Got {got}. "
                    "For one input, use x[None], or batch_axes=0."
                )

        def fn(values: Any, inputs: tuple[Any, ...]) -> Any:
            return merged(values)(*inputs, **options)

        kept_in = Diagonal if structure is Diagonal else Full
        of = propagate(fn, structure=structure, receipt=receipt)
        of = linearise(fn, structure=kept_in) if linearised else of

        def one(inputs: Any) -> Any:
            inputs = with_axes(inputs, batch_axes)
            mean, *more = of(beliefs, inputs)
            shape = jax.eval_shape(fn, known, inputs).shape
            if shape[:batch_axes] != (1,) * batch_axes:
                raise ValueError(
                    "`bayesian` needs a model whose outputs keep the batch axes of its inputs. Got "
                    f"outputs of shape {shape} for one example."
                )
            return mean.reshape(shape[batch_axes:]), *more

        def of_zeros(network: Any) -> Any:
            ones = (1,) * batch_axes
            return network(
                *(jnp.zeros(ones + x.shape[batch_axes:], x.dtype) for x in inputs), **options
            )

        state = nnx.merge_state(parameters, rest)
        # `propagate` says itself where random numbers are drawn.
        check_inference_mode("bayesian", graph, state, of_zeros, keys=linearised)
        of_all = one
        for _ in range(batch_axes):
            of_all = jax.vmap(of_all)
        try:
            return of_all(inputs)
        except Exception as error:
            batch = inputs[0].shape[:batch_axes] if inputs else ()
            each = [k for k, v in options.items() if getattr(v, "shape", ())[: len(batch)] == batch]
            if batch and each:
                raise ValueError(
                    f"`bayesian` shares keyword arguments between examples. Got {', '.join(each)} of "
                    f"the batch axes {batch}. Give what each example has of its own by position."
                ) from error
            _explain(lambda x: fn(known, x), inputs, batch_axes, error)
            raise

    return call


def check_inference_mode(
    caller: str, graph: Any, state: nnx.State, call: Callable[..., Any], *, keys: bool = True
) -> None:
    """Raise if the output of `call(model)` depends on random keys, or it writes statistics."""
    # What layers report or draw is no state that the next call would need.
    stored = nnx.Not(nnx.Any(nnx.Param, nnx.RngState, nnx.Intermediate))
    split: Any = nnx.split_state(state, nnx.RngState, stored, ...)
    random, written = (len(jax.tree.leaves(part)) for part in split[:2])

    def run(state: Any) -> Any:
        model: Any = nnx.merge(graph, *state, copy=True)
        before = jax.tree.map(lambda x: x, nnx.state(model, stored))
        return before, call(model), nnx.state(model, stored)

    if random + written == 0:
        return
    try:
        closed, shapes = jax.make_jaxpr(run, return_shape=True)(split)
    except Exception:  # of the call itself, which will say it again
        return
    before, outputs = (len(jax.tree.leaves(part)) for part in shapes[:2])
    outvars = closed.jaxpr.outvars
    changed = outvars[:before] != outvars[before + outputs :]
    of_output = [before <= i < before + outputs for i in range(len(outvars))]
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, of_output)
    if changed or (keys and any(used[:random])):
        what = "writes statistics, a cache or other state" if changed else "draws random numbers"
        raise ValueError(
            f"`{caller}` needs a model in inference mode. Got one that {what}. Call model.eval() first, "
            "or set deterministic=True, use_running_average=True and decode=False."
        )


def _explain(
    plain: Callable[[Any], Any], inputs: tuple[Any, ...], batch_axes: int, error: Exception
) -> None:
    """Raise a ValueError if the model failed because inputs have one batch axis too few or too many."""

    def as_one(dropped: int) -> Any:
        """Shapes of a batch of one, without the first `dropped` axes of the inputs."""
        ones = (1,) * batch_axes
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(ones + x.shape[dropped:], x.dtype), inputs
        )

    if takes(plain, as_one(batch_axes)):
        return
    rule = f"`bayesian` takes the first {batch_axes} axes of its inputs as a batch"
    got = f"Got inputs of shape {shapes(inputs)}"
    if takes(plain, as_one(0)):
        raise ValueError(
            f"{rule}, and a single example of this model has all of theirs. {got}. For one input, "
            f"use x[None]{'' if batch_axes == 1 else ', once for each axis'}."
        ) from error
    if takes(plain, as_one(batch_axes + 1)):
        raise ValueError(
            f"{rule}, and a single example of this model has one axis less. {got}. Give "
            f"batch_axes={batch_axes + 1}."
        ) from error


def _completed(known: Any, beliefs: Any, path: str = "") -> Any:
    """The tree of parameters, with beliefs in the places that have one."""
    if isinstance(known, dict):
        given = {} if beliefs is None else beliefs
        if not isinstance(given, dict) or set(given) - set(known):
            came = sorted(map(str, given)) if isinstance(given, dict) else type(given).__name__
            raise ValueError(
                f"`bayesian` needs beliefs about parameters of the model; at '{path or '/'}' it has "
                f"{sorted(map(str, known))}. Got {came}. Start from nnx.to_pure_dict(nnx.state(model, "
                "nnx.Param))."
            )
        return {k: _completed(v, given.get(k), f"{path}/{k}") for k, v in known.items()}
    if beliefs is None:
        return known
    mean = beliefs.mean if isinstance(beliefs, Posterior) else beliefs
    if getattr(mean, "shape", None) != known.shape:
        came = getattr(mean, "shape", type(beliefs).__name__)
        raise ValueError(
            f"`bayesian` needs a belief of the parameter's shape {tuple(known.shape)} at '{path}'. Got "
            f"{came}."
        )
    return beliefs
