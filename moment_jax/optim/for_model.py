"""The optimiser of a whole model in one call."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from moment_jax.optim.layer_blocks import path_name
from moment_jax.optim.natural_gradient import kfac
from moment_jax.optim.taps import find_blocks


def for_model(
    model: nnx.Module,
    method: Callable[..., optax.GradientTransformation] = kfac,
    *,
    others: optax.GradientTransformation | None = None,
    wrt: Any = nnx.Param,
) -> optax.GradientTransformationExtraArgs:
    """The optimiser of all parameters of a model: layers by curvature, the others by Adam.

    `method` takes the layers with curvature factors, of an `mj.Bayesian` their means. `others` takes the
    rest: positions, spreads of beliefs, learned priors and noise.

    Args:
      model: an NNX module, an `mj.Bayesian`, or a module of such; `nnx.eval_shape` of it is enough.
      method: called as method(blocks=...): `kfac` (default), `cg_fac`, or a functools.partial of either.
      others: None for Adam with a learning rate of 1e-2, fast enough for positions to follow the layers.
        The spreads of a Bayesian model start far from where they end: give `optax.adam(0.1)`.
      wrt: filter of the trained parameters.

    Returns:
      An `optax.partition` with extra arguments: `update(grads, state, params, factors=factors)`.

    Raises:
      ValueError: if no layer of the model has curvature factors. TypeError: if `method` does not take
        `blocks`.

    >>> from functools import partial
    >>> import optax
    >>> from flax import nnx
    >>> import moment_jax as mj
    >>> model = mj.Bayesian(mj.nn.MLP([3, 4, 1], rngs=nnx.Rngs(0)), mj.Gaussian())
    >>> method = partial(mj.optim.kfac, momentum=0.9)
    >>> tx = mj.optim.for_model(model, method, others=optax.adam(0.1))
    >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    """
    try:
        inspect.signature(method).bind(blocks=())
    except TypeError as error:
        raise TypeError(
            "`for_model` needs a second-order method that takes blocks=... . Got "
            f"{getattr(method, '__name__', type(method).__name__)}. Use "
            "functools.partial(mj.optim.kfac, momentum=0.5). Use first-order methods such as Adam by "
            "themselves, or pass them as others=."
        ) from error
    blocks = find_blocks(model, wrt)
    if not blocks:
        raise ValueError(
            f"`for_model` needs a model with layers that have curvature factors. Got "
            f"{type(model).__name__} without any; see mj.optim.find_blocks."
        )
    in_layers = {leaf for block in blocks for leaf in block.leaves}

    def label(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "layers" if path_name(path) in in_layers else "others", params
        )

    others = optax.adam(1e-2) if others is None else others
    return optax.partition({"layers": method(blocks=blocks), "others": others}, label)
