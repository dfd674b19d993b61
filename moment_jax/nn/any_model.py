"""`bayesian`: the moments of any Flax model, from a belief about its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from moment_jax.covariance import Covariance, Separable
from moment_jax.posterior import Posterior
from moment_jax.propagation import linearised as linearise
from moment_jax.propagation import propagate
from moment_jax.propagation.errors import shapes, takes, with_axes

Array = jax.Array


def bayesian(
    model: nnx.Module,
    posterior: Any,
    *,
    structure: type[Covariance] = Separable,
    batch_axes: int = 1,
    batched: tuple[str, ...] = (),
    linearised: bool = False,
    receipt: bool = False,
) -> Callable[..., Any]:
    """The model with a belief about its parameters: called as the model is, it gives mean and cov.

    The model is not changed, nor its class: its operations are traced and carried out on moments, see
    `propagate`. It has to be in inference mode (`model.eval()`, or `deterministic=True`).

    Args:
      model: a Flax NNX module that returns one array.
      posterior: beliefs in the places of parameters, a tree as `nnx.to_pure_dict(nnx.state(model,
        nnx.Param))` gives one; parameters that it leaves out are certain.
      structure: in which covariances are kept, as in `propagate`.
      batch_axes: how many leading axes of the inputs are a batch.
      batched: names of keyword arguments with these axes, such as ("mask",); others are for all alike.
      linearised: of the network linearised in its weights, right for a Laplace approximation, see
        `mj.linearised`; the covariance is `Full` then.
      receipt: return the operations too, see `propagate`; for inputs without batch axes.

    Returns:
      A function of the model's arguments. It gives the mean, of the shape of the model's output, and the
      covariance of a sequence (T, D), the last axis being D, with the batch axes before its fields.

    Raises:
      TypeError: if `model` is no module. ValueError: if the beliefs do not fit the parameters, or if the
        model is in training mode.

    >>> import jax.numpy as jnp
    >>> import moment_jax as mj
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
    beliefs = _completed(
        known, nnx.to_pure_dict(posterior) if isinstance(posterior, nnx.State) else posterior
    )

    def moments(inputs: tuple[Any, ...], shared: dict[str, Any], own: dict[str, Any]) -> Any:
        def fn(values: Any, inputs: tuple[Any, ...], own: dict[str, Any]) -> Any:
            # New variables, which a model may write to while it is traced.
            filled, others = jax.tree.map(lambda x: x, (parameters, rest))
            nnx.replace_by_pure_dict(filled, values)
            merged: Any = nnx.merge(graph, filled, others)
            before = jax.tree.leaves(nnx.state(merged, nnx.BatchStat))
            result = merged(*inputs, **shared, **own)
            after = jax.tree.leaves(nnx.state(merged, nnx.BatchStat))
            if any(a is not b for a, b in zip(before, after, strict=True)):
                raise ValueError(
                    "`bayesian` needs a model in inference mode. Got one that changed its statistics of "
                    "a batch (BatchStat). Call model.eval() first, or give use_running_average=True."
                )
            return result

        of = linearise(fn) if linearised else propagate(fn, structure=structure, receipt=receipt)
        mean, cov, *steps = of(beliefs, inputs, own)
        shape = jax.eval_shape(fn, known, inputs, own).shape
        return mean.reshape(shape), cov, *steps

    def plain(*inputs: Any, **options: Any) -> Any:
        merged: Any = nnx.merge(graph, *jax.tree.map(lambda x: x, (parameters, rest)))
        return merged(*inputs, **options)

    def call(*inputs: Any, **options: Any) -> Any:
        own = {name: options.pop(name) for name in batched if name in options}
        _check_inputs(inputs, batch_axes)

        def one(inputs: Any, own: dict[str, Any]) -> Any:
            inputs, own = with_axes((inputs, own), batch_axes)
            mean, *more = moments(inputs, options, own)
            return mean.reshape(mean.shape[batch_axes:]), *more

        of_all = one
        for _ in range(batch_axes):
            of_all = jax.vmap(of_all)
        try:
            return of_all(inputs, own)
        except Exception as error:
            _explain(lambda x: plain(*x[0], **options, **x[1]), (inputs, own), batch_axes, error)
            raise

    return call


def _check_inputs(inputs: tuple[Any, ...], batch_axes: int) -> None:
    for x in inputs:
        if not hasattr(x, "ndim") or x.ndim < batch_axes:
            raise ValueError(
                f"A Bayesian model needs arrays with {batch_axes} leading batch axes. Got "
                f"{getattr(x, 'shape', type(x).__name__)}. For one input, use x[None], or batch_axes=0."
            )


def _explain(
    plain: Callable[[Any], Any], inputs: tuple[Any, Any], batch_axes: int, error: Exception
) -> None:
    """Say so where the model failed for inputs that lack a batch axis, or have one too many."""

    def as_one(dropped: int) -> Any:
        """A batch of one example, without so many leading axes of the inputs."""
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
            f"{rule}, and this model's single example has all of theirs. {got}. For one input, "
            f"use x[None]{'' if batch_axes == 1 else ', once for each axis'}."
        ) from error
    if takes(plain, as_one(batch_axes + 1)):
        raise ValueError(
            f"{rule}, and this model's single example has one axis less than theirs. {got}. Give "
            f"batch_axes={batch_axes + 1}."
        ) from error


def _completed(known: Any, beliefs: Any, path: str = "") -> Any:
    """The tree of parameters, with beliefs where there are some."""
    if isinstance(known, dict):
        given = {} if beliefs is None else beliefs
        if not isinstance(given, dict) or set(given) - set(known):
            came = sorted(map(str, given)) if isinstance(given, dict) else type(given).__name__
            raise ValueError(
                f"`bayesian` needs beliefs at parameters of the model; at '{path or '/'}' it has "
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
            f"`bayesian` needs a belief of shape {tuple(known.shape)} at '{path}', as the parameter "
            f"has. Got {came}."
        )
    return beliefs
