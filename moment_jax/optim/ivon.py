"""IVON: a Gaussian belief about each weight at Adam's price, as an Optax transformation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from moment_jax.posterior import Factorized
from moment_jax.xla import materialized

SMALL = 2**14  # entries of an array


class IvonState(NamedTuple):
    """The state of `scale_by_ivon`: the belief's variances are 1 / (ess (hessian + weight_decay))."""

    step: Array
    ess: Array
    weight_decay: Array
    momentum: Any
    hessian: Any


def scale_by_ivon(
    ess: float, *, hess_init: float = 1.0, beta1: float = 0.9, beta2: float = 0.99999,
    weight_decay: float = 1e-4, clip_radius: float = float("inf"), debias: bool = True,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """The direction of `ivon`, before the learning rate; arguments as there."""
    limits = {
        "ess": ess,
        "clip_radius": clip_radius,
        "hess_init + weight_decay": hess_init + weight_decay,
    }
    right = min(limits.values()) > 0 and min(hess_init, weight_decay) >= 0
    if not (right and 0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(
            f"`ivon` needs positive {', '.join(limits)}, none negative, and beta1 and beta2 from 0 to "
            f"below 1. Got {', '.join(map(str, limits.values()))}, {beta1} and {beta2}."
        )

    def init(params: Any) -> IvonState:
        def full(value: float) -> Any:
            return jax.tree.map(lambda x: jnp.full_like(x, value, _wide(x)), params)

        first, size = jnp.zeros((), jnp.int32), jnp.asarray(ess, jnp.float32)
        decay = jnp.asarray(weight_decay, jnp.float32)
        return IvonState(first, size, decay, full(0.0), full(hess_init))

    def update(
        grads: Any, state: IvonState, params: Any = None, *, drawn: Any = None, **_: Any
    ) -> tuple[Any, IvonState]:
        if params is None or drawn is None:
            raise ValueError(
                "`ivon` needs the weights, and those at which the gradients were taken. Got "
                f"{'no params' if params is None else 'no drawn'}. Draw them by mj.optim.ivon_draw, and "
                "call update(grads, state, params, drawn=drawn)."
            )
        step, rest = state.step + 1, 1 - beta2

        def hessian(h: Array, g: Array, m: Array, at: Array) -> Array:
            """Averaged along a geodesic of the positive numbers, so that it stays positive."""
            u = h + state.weight_decay
            change = rest * (g * (at.astype(h.dtype) - m) * state.ess - h / u)
            return h + u * (change + change**2 / 2)

        def direction(g: Array, h: Array, m: Array) -> Array:
            g = g / (1 - beta1**step) if debias else g
            newton = (g + state.weight_decay * m) / (h + state.weight_decay)
            return jnp.clip(newton, -clip_radius, clip_radius).astype(m.dtype)

        momentum = jax.tree.map(lambda a, g: beta1 * a + (1 - beta1) * g, state.momentum, grads)
        new = jax.tree.map(hessian, state.hessian, grads, params, drawn)
        updates = jax.tree.map(direction, momentum, new, params)
        return updates, state._replace(step=step, momentum=momentum, hessian=new)

    return optax.GradientTransformationExtraArgs(init, update)


def ivon(
    learning_rate: optax.ScalarOrSchedule, ess: float, *, hess_init: float = 1.0, beta1: float = 0.9,
    beta2: float = 0.99999, weight_decay: float = 1e-4, clip_radius: float = float("inf"),
    debias: bool = True, rescale_lr: bool = True,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """Improved variational online Newton: an independent Gaussian belief about each weight.

    It minimises E[loss] + KL(belief || N(0, 1 / (ess weight_decay))) / ess, by one draw of the weights a
    step: gradients are those of the mean loss at the drawn weights, and the curvature is estimated by
    the gradient times the draw's offset, so there are no second derivatives. All parts of an accumulated
    gradient have to be taken at one draw.

    A too small `hess_init` or `ess` draws weights that are far off: the fit is then worse than Adam's.
    Weights may be of half precision, draws are of single: an offset is often below a weight's rounding.
    A layer that rounds its weights (`dtype=jnp.bfloat16`) does not see such an offset, and variances
    below (weight / 500)^2 come out too large.

    Args:
      learning_rate: a number or a schedule; with `rescale_lr` as for gradient descent, .1 say.
      ess: the effective sample size, the number of training examples N, or more for a colder belief.
      hess_init: curvature h at the start, that of the mean loss.
      beta1: decay of the gradient's average.
      beta2: of the curvature's.
      weight_decay: delta, the prior's precision over `ess`.
      clip_radius: largest step of a weight, before the learning rate.
      debias: divide the gradient's average by 1 - beta1^t.
      rescale_lr: multiply the learning rate by hess_init + weight_decay.

    Raises:
      ValueError: if a number is out of its range, or an update lacks `params` or `drawn`.

    Source: Shen et al., "Variational learning is effective for large deep networks" (2024), Algorithm 1.

    >>> params, loss = {"w": jnp.zeros(3)}, lambda p: 2 * jnp.sum((p["w"] - 1.0) ** 2)
    >>> tx = ivon(0.1, ess=100, weight_decay=0.0, beta2=0.99)
    >>> @jax.jit
    ... def step(params, state, key):
    ...     drawn = ivon_draw(state, params, key)
    ...     updates, state = tx.update(jax.grad(loss)(drawn), state, params, drawn=drawn)
    ...     return optax.apply_updates(params, updates), state
    >>> state = tx.init(params)
    >>> for key in jax.random.split(jax.random.key(0), 500):
    ...     params, state = step(params, state, key)
    >>> belief = ivon_beliefs(state, params)["w"]  # for mj.Bayesian(network, likelihood, beliefs=...)
    >>> print(belief.mean.round(1), bool(abs(100 * belief.variance.mean() - 1 / 4) < 0.05))
    [1. 1. 1.] True
    """
    scale = hess_init + weight_decay if rescale_lr else 1.0
    direction = scale_by_ivon(
        ess, hess_init=hess_init, beta1=beta1, beta2=beta2, weight_decay=weight_decay,
        clip_radius=clip_radius, debias=debias,
    )  # fmt: skip
    return optax.chain(direction, optax.scale(scale), optax.scale_by_learning_rate(learning_rate))


def ivon_beliefs(state: Any, params: Any) -> Any:
    """A tree of `Factorized` beliefs about the params, for `mj.Bayesian(..., beliefs=)`.

    Args:
      state: of an optimiser with one `ivon` in it, such as `nnx.Optimizer.opt_state`.
      params: the means, the pytree or `nnx.State` that is optimised.
    """
    found = _found(state, IvonState)
    if len(found) != 1:
        raise ValueError(
            f"`ivon_beliefs` needs a state with one `ivon` in it. Got {len(found)}, in a "
            f"{type(state).__name__}."
        )
    own, (means, form) = found[0], jax.tree.flatten(params)
    beliefs = [
        Factorized(m, (1 / (own.ess * (h + own.weight_decay))).astype(m.dtype))
        for m, h in zip(means, jax.tree.leaves(own.hessian), strict=True)
    ]
    return jax.tree.unflatten(form, beliefs)


def ivon_draw(state: Any, params: Any, key: Array) -> Any:
    """The weights at which to take the next gradient, one draw of `ivon_beliefs`, a tree like params.

    Its arrays are of single precision at least.
    """
    if any(_found(x.inner_opt_state, IvonState) for x in _found(state, optax.MultiStepsState)):
        raise ValueError(
            "`ivon` needs all parts of a gradient at one draw: of k draws variances are k times too "
            "large. Got the state of optax.MultiSteps, which averages gradients of several draws. "
            "Draw once, average the gradients of all parts at it, and call update once."
        )
    wide = jax.tree.map(lambda x: x.astype(_wide(x)), params)
    beliefs, form = jax.tree.flatten(
        ivon_beliefs(state, wide), is_leaf=lambda x: isinstance(x, Factorized)
    )
    # Small arrays share one call of the generator: its overhead is that of some thousand numbers.
    small = [i for i, belief in enumerate(beliefs) if belief.mean.size <= SMALL]
    ends = np.cumsum([0, *(beliefs[i].mean.size for i in small)])
    keys = jax.random.split(key, len(beliefs) + 1)
    noise = jax.random.normal(keys[-1], (ends[-1],), jnp.float32)
    drawn = [None if i in small else belief.sample(keys[i]) for i, belief in enumerate(beliefs)]
    for i, first, last in zip(small, ends, ends[1:], strict=False):
        mean, sd = beliefs[i].mean, jnp.sqrt(beliefs[i].variance)
        drawn[i] = mean + sd * noise[first:last].reshape(mean.shape).astype(mean.dtype)
    # Stored, or XLA for CPU draws a bias anew for every token that it is added to.
    return materialized(jax.tree.unflatten(form, drawn))


def _found(state: Any, kind: Any) -> list[Any]:
    """All states of this kind in the state of an optimiser."""
    kept = jax.tree.leaves(nnx.as_pure(state), is_leaf=lambda x: isinstance(x, kind))
    return [x for x in kept if isinstance(x, kind)]


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
