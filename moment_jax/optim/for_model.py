"""The optimiser of a whole model in one call."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from moment_jax.optim.damping import Number, Schedule
from moment_jax.optim.kfac import kfac
from moment_jax.optim.natural_scales import find_scales, natural_scales
from moment_jax.optim.taps import find_blocks
from moment_jax.optim.trees import path_name

CURVATURE, SCALES, OTHERS = "curvature", "scales", "others"


def for_model(
    model: nnx.Module,
    method: Callable[..., optax.GradientTransformation] = kfac,
    *,
    scale_learning_rate: Number | Schedule | None = None,
    dataset_size: float = 1,
    others: optax.GradientTransformation | None = None,
    wrt: Any = nnx.Param,
) -> optax.GradientTransformationExtraArgs:
    """The optimiser of all parameters of a model, each kind by a suitable method.

    `method` takes the layers with curvature factors: plain layers and the means of Bayesian ones.
    `natural_scales` takes the spreads of beliefs, and `others` the rest (positions, learned priors).
    In a Bayesian layer the factors are of the means of its random input, and of the gradients with
    respect to the means of its output.

    Args:
      model: an NNX module.
      method: called as method(blocks=...): `kfac` (default), `cg_fac`, or a functools.partial of either.
      scale_learning_rate: of `natural_scales`; None to leave spreads to `others`.
      dataset_size: for `natural_scales`: what the loss was divided by, over the weight of its KL term.
      others: None for Adam with a learning rate of 1e-2, fast enough for positions to follow the layers.
      wrt: filter of the trained parameters.

    Returns:
      An `optax.partition` with extra arguments: `update(grads, state, params, factors=factors)`.

    Raises:
      ValueError: if no layer of the model has curvature factors. TypeError: if `method` does not take
        `blocks`.

    >>> from functools import partial
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> import moment_jax as mj
    >>> model = mj.nn.MLP([3, 4, 1], rngs=nnx.Rngs(0))
    >>> tx = mj.optim.for_model(
    ...     model, partial(mj.optim.kfac, momentum=0.8), scale_learning_rate=0.1, dataset_size=100)
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
    scales = () if scale_learning_rate is None else find_scales(model, wrt)
    labels = {leaf: CURVATURE for block in blocks for leaf in block.leaves}
    labels |= {scale.path: SCALES for scale in scales}

    def label(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: labels.get(path_name(path), OTHERS), params
        )

    rate = 0.0 if scale_learning_rate is None else scale_learning_rate
    return optax.partition(
        {
            CURVATURE: method(blocks=blocks),
            SCALES: natural_scales(rate, scales, dataset_size=dataset_size),
            OTHERS: optax.adam(1e-2) if others is None else others,
        },
        label,
    )
