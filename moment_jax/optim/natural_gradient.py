"""K-FAC and CG-FAC as Optax transformations, and the optimiser of a whole model."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from moment_jax.optim import adaptation, blocks, capture, curvature
from moment_jax.optim.adaptation import LastStep, Number, Schedule, check_range, current
from moment_jax.optim.blocks import Blocks, Matrices
from moment_jax.optim.curvature import Factors


class SecondOrderState(NamedTuple):
    """State of `scale_by_kfac` and `scale_by_cg_fac`."""

    factors: Factors  # running averages by group of layers, packed with their inverses
    steps: Array  # taken
    age: Array  # steps since the newest factors
    due: Array  # whether the next step wants new factors
    inverses: curvature.Inverses  # none if nothing is inverted
    last: LastStep


def scale_by_kfac(
    *, blocks: Blocks, damping: Number | Schedule = 3e-4, decay: Number = 0.96,
    curvature_every: int | Array = 5,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """The direction (A + ..)^-1 grad (G + ..)^-1 of K-FAC.

    A + pi sqrt(damping) I and G + sqrt(damping) / pi I are inverted by Cholesky factors; a layer whose
    inversion fails keeps its old inverse. Tables have diag(frequencies) for A, each at least their mean;
    normalisations are divided by their diagonal. Layers of one shape are solved together.

    Call `update(grads, state, params, factors=factors)` with those of `value_grad_and_factors`. Factors
    that are not finite or of weight 0 are left out; without any yet, the direction is zero.

    Args:
      blocks: of `find_blocks`. Other parameters go to another optimiser, by `for_model`;
        `optax.masked` would add their raw gradients to them.
      damping: gamma, a number or a schedule; that of `adapt_damping` takes its place.
      decay: of the running averages of the factors, for each step, also those without curvature: .96
        reaches back 25 steps. 0 to use each batch on its own.
      curvature_every: steps between new curvature and inverses; the first so many all have them.

    Raises:
      ValueError: if a number is out of range, or (from init and update) parameters or factors do not
        match; the leaf is named. TypeError: if factors are of another type, or none.

    Source: Brownian document, Eq. 16 to 18; Martens and Grosse, Optimizing neural networks with
    Kronecker-factored approximate curvature, 2015 (factored Tikhonov damping: section 6.3).
    """
    settings = damping, decay, curvature_every
    return _scale_by_curvature("kfac", curvature.apply_inverse, True, blocks, *settings)


def scale_by_cg_fac(
    *, blocks: Blocks, damping: Number | Schedule = 3e-4, max_iterations: int | Array = 5,
    tolerance: Number = 0.1, precondition: bool = True, decay: Number = 0.96,
    curvature_every: int | Array = 5,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """The direction x of (F + damping I) x = grad, by conjugate gradients: F is not formed or inverted.

    F is the operator A V G of the factors; damping 0 and zero gradients are harmless.

    Args, `update` and errors are those of `scale_by_kfac`, and:
      max_iterations: m, the most iterations.
      tolerance: iterations stop when |residual| <= tolerance |grad|.
      precondition: by K-FAC's inverses, a few steps old, so that one to three iterations do instead of
        dozens. False for Algorithm 1 as printed.

    Source: Brownian document, Algorithm 1, Eq. 16 to 18 (the step is subtracted).
    """
    check_range("cg_fac", least=1, whole=True, max_iterations=max_iterations)
    check_range("cg_fac", tolerance=tolerance)
    settings = damping, decay, curvature_every
    solve = partial(curvature.iterated, max_iterations=max_iterations, tolerance=tolerance)
    return _scale_by_curvature("cg_fac", solve, precondition, blocks, *settings)


def _scale_by_curvature(
    name: str, solve: Callable[..., Array], inverts: bool, given: Blocks,
    damping: Number | Schedule, decay: Number, curvature_every: int | Array,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """What K-FAC and CG-FAC share; `solve` finds the direction of a group."""
    check_range(name, damping=damping)
    check_range(name, below=1, decay=decay)
    check_range(name, 1, whole=True, curvature_every=curvature_every)

    def init(params: optax.Params) -> SecondOrderState:
        dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(params))
        groups = blocks.groups_of(params, given).items()
        none = {k: each[0].no_factor(dtype, sum(b.count for b in each)) for k, each in groups}
        none, inverses = curvature.packed(none, curvature.no_inverses(none if inverts else {}))
        last = LastStep(*(jnp.zeros((), jnp.float32) for _ in LastStep._fields))
        return SecondOrderState(none, jnp.int32(0), jnp.int32(0), jnp.bool_(True), inverses, last)

    def update(updates: Any, state: SecondOrderState, params: Any = None, **extra: Any) -> Any:
        groups = blocks.groups_of(updates, given)
        gamma = extra.get("damping", current(damping, state.steps))
        kept = jnp.asarray(decay, jnp.float32) ** (state.age + 1)

        def renewed(turn: Any, old: Any) -> tuple[Factors, curvature.Inverses, Array]:
            factors, pairs = curvature.unpacked(*old[:2])
            # What does not depend on the turn would be moved out of the loop, to every step.
            given, _ = jax.lax.optimization_barrier((extra.get("factors"), turn))
            new, fresh = blocks.stack_factors(groups, given)
            factors = curvature.averaged(factors, new, kept, fresh)
            pairs = {k: curvature.inverted(factors[k], gamma, pair) for k, pair in pairs.items()}
            return *curvature.packed(factors, pairs), fresh

        # A loop of one round or none: a conditional would copy what a step without curvature leaves.
        rounds = curvature.any_weight(extra.get("factors")).astype(jnp.int32)
        old = state.factors, state.inverses, jnp.bool_(False)
        *stored, fresh = jax.lax.fori_loop(0, rounds, renewed, old)
        factors, inverses = curvature.unpacked(*stored)
        known = jnp.all(jnp.stack([factor.weight > 0 for factor in factors.values()]))
        steps, every = state.steps + known, jnp.asarray(curvature_every, jnp.int32)
        due = (steps < every) | (steps % every == 0) | ~known

        def direction(key: str, grad: Array) -> Array:
            factor = factors[key]
            if isinstance(factor, curvature.DiagonalFactor):
                by = factor.squares + gamma  # zero without curvature and damping: no step
                return jnp.where(by > 0, grad / jnp.where(by > 0, by, 1), 0)
            return solve(inverses.get(key), factor, grad, gamma)

        grads = {
            key: jnp.where(known, grad, 0).astype(jnp.promote_types(grad.dtype, jnp.float32))
            for key, grad in blocks.stack(groups, updates).items()
        }
        x = {key: direction(key, grad) for key, grad in grads.items()}
        # If x is exact; the residual of conjugate gradients is orthogonal to x, so theirs is.
        size = _inner(x, grads)
        x, size = jax.tree.map(lambda part: jnp.where(jnp.isfinite(size), part, 0), (x, size))
        last = state.last._replace(quadratic=jnp.maximum(size, 0))
        if "last_step" in extra:
            s = blocks.stack(groups, extra["last_step"])
            last = _judged(last, s, x, grads, stored, gamma, fresh)
        step = blocks.unstack(groups, x, updates)
        age = jnp.where(fresh, 0, state.age + known)
        return step, SecondOrderState(stored[0], steps, age, due, stored[1], last)

    return optax.GradientTransformationExtraArgs(init, update)


def _judged(
    last: LastStep, s: Matrices, x: Matrices, g: Matrices, stored: Any, gamma: Array, fresh: Array,
) -> LastStep:  # fmt: skip
    """Judge the last step s; between fresh curvatures, s^T F s is `ratio` <s, s> of an earlier step."""
    length = _inner(s, s)

    def measured() -> Array:
        factors, _ = curvature.unpacked(*stored)
        each = [curvature.quadratic_form(factors[key], part) for key, part in s.items()]
        return jnp.sum(jnp.stack(each).astype(jnp.float32))

    curved = jax.lax.cond(fresh, measured, lambda: last.ratio * length)
    ratio = jnp.where(length > 0, curved / jnp.where(length > 0, length, 1), last.ratio)
    size = curved + gamma * length
    return LastStep(_inner(g, s), _inner(x, s), length, ratio, size, last.quadratic)


def _inner(left: Matrices, right: Matrices) -> Array:
    """The inner product over all groups, in float32, the state's precision."""
    return jnp.sum(jnp.stack([jnp.sum(left[key] * right[key]).astype(jnp.float32) for key in left]))


def curvature_due(state: Any) -> Array:
    """Whether the optimiser of a state wants new curvature now; `when` of `value_grad_and_factors`."""
    due = [leaf for _, leaf in optax.tree.get_all_with_path(state, "due")]
    if not due:
        raise ValueError(
            "`curvature_due` needs the state of an optimiser with kfac or cg_fac in it. Got "
            f"{type(state).__name__}."
        )
    return jnp.any(jnp.stack(jax.tree.leaves(due)))


def kfac(
    learning_rate: Number | Schedule = 1.0, *, blocks: Blocks,
    damping: Number | Schedule | None = None, kl_bound: Number | Schedule | None = None,
    momentum: Number = 0.8, weight_decay: Number = 0.0, decay: Number = 0.96,
    curvature_every: int | Array = 5,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """Kronecker-factored approximate curvature, without tuning.

    `scale_by_kfac`, whose arguments are described there, in `trust_region` and `adapt_damping`, then
    `optax.ema`, `optax.add_decayed_weights` and `optax.scale_by_learning_rate`; `optax.apply_if_finite`
    leaves out gradients that are not finite, `undo_bad_steps` takes back a step after which the loss is
    far above its average; `optax.tree.get(state, "total_notfinite")` and "taken_back" count them. Call
    `update(grads, state, params, factors=factors, value=value)` with the loss at `params`.

    What the chain adds:
      learning_rate: a number or a schedule. An adapted bound compensates for much of a decreasing rate;
        for steps that fall to zero give a schedule of `kl_bound` too. Where negative, steps are zero.
      damping: a number or a schedule; None adapts it by `adapt_damping`.
      kl_bound: of 1/2 step^T (F + damping I) step, nats per example: a number (infinite for none) or a
        schedule; None adapts it by `trust_region`, assuming a learning rate of 1. Blocks ignore
        correlations between tokens and so underestimate F: a fixed bound may have to be far lower.
      momentum: of the running average of the directions; 0 for none.
      weight_decay: decoupled, as in AdamW: also subtracts learning_rate weight_decay params.
    """
    scale_by = partial(scale_by_kfac, blocks=blocks, decay=decay, curvature_every=curvature_every)
    return _chain("kfac", scale_by, learning_rate, damping, kl_bound, momentum, weight_decay)


def cg_fac(
    learning_rate: Number | Schedule = 1.0, *, blocks: Blocks,
    damping: Number | Schedule | None = None, kl_bound: Number | Schedule | None = None,
    momentum: Number = 0.8, weight_decay: Number = 0.0, max_iterations: int | Array = 5,
    tolerance: Number = 0.1, precondition: bool = True, decay: Number = 0.96,
    curvature_every: int | Array = 5,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """The natural gradient by conjugate gradients: `kfac` with `scale_by_cg_fac` in its chain.

    The arguments are described there; `update` is called likewise.
    """
    scale_by = partial(
        scale_by_cg_fac, blocks=blocks, max_iterations=max_iterations, tolerance=tolerance,
        precondition=precondition, decay=decay, curvature_every=curvature_every,
    )  # fmt: skip
    return _chain("cg_fac", scale_by, learning_rate, damping, kl_bound, momentum, weight_decay)


def _chain(
    name: str, scale_by: Callable[..., Any], learning_rate: Number | Schedule,
    damping: Any, kl_bound: Any, momentum: Number, weight_decay: Number,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    check_range(name, learning_rate=learning_rate, kl_bound=kl_bound, weight_decay=weight_decay)
    check_range(name, below=1, momentum=momentum)

    def rate_at(count: Array) -> Array:
        return jnp.maximum(current(learning_rate, count), 0)

    def of_direction(count: Array) -> Array:
        """The bound of a direction that is within `kl_bound` after scaling by the learning rate."""
        rate = rate_at(count)
        return current(kl_bound, count) / jnp.where(rate == 0, 1, rate) ** 2

    direction = scale_by(damping=3e-4 if damping is None else damping)
    direction = adaptation.trust_region(direction, None if kl_bound is None else of_direction)
    chain = optax.chain(
        adaptation.adapt_damping(direction) if damping is None else direction,
        optax.ema(momentum),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate_at if callable(learning_rate) else learning_rate),
        # A rate that is an array widens narrow steps, and a step left out is as narrow as gradients.
        optax.stateless_with_tree_map(lambda step, param: step.astype(param.dtype)),
    )
    never = jnp.iinfo(jnp.int32).max  # steps in a row that are not finite, after which one is taken
    return adaptation.undo_bad_steps(optax.apply_if_finite(chain, max_consecutive_errors=never))


def for_model(
    loss_fn: Callable[..., Any], model: Any, *batch: Any, wrt: Any = nnx.Param,
    method: Callable[..., optax.GradientTransformation] = kfac,
    others: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """The `optax.partition` of all parameters of a model: layers by curvature, the others by Adam.

    Others are class tokens, parts of positions; spreads, learned priors and noise of an `mj.Bayesian`.

    Args:
      loss_fn: that of `value_grad_and_factors`, in which the layers are found.
      model: an NNX module, an `mj.Bayesian`, a module of such, or a tree of parameters, such as linen's.
      batch: arguments of the loss; of these and of the model shapes are enough, see `find_blocks`.
      others: None for Adam with a learning rate of 1e-2; gradients that are not finite are zero to it.
        The spreads of a Bayesian model start far from where they end: give `optax.adam(0.1)`.
      method: called as method(blocks=...): `kfac` (default), `cg_fac`, or a functools.partial of either.
      wrt: filter of the trained parameters.

    ValueError if no layer of the model has curvature factors, TypeError if `method` takes no `blocks`.
    """
    try:
        inspect.signature(method).bind(blocks=())
    except TypeError as error:
        raise TypeError(
            "`for_model` needs a second-order method that takes blocks=..., such as "
            f"functools.partial(mj.optim.kfac, momentum=0.5). Got {method!r}. First-order methods such "
            "as Adam go by themselves, or into others=."
        ) from error
    found = capture.find_blocks(loss_fn, model, *batch, wrt=wrt)
    in_layers = {leaf for block in found for leaf in block.leaves}

    def label(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "layers" if blocks.path_name(path) in in_layers else "others", params
        )

    finite = optax.stateless_with_tree_map(lambda grad, _: jnp.where(jnp.isfinite(grad), grad, 0))
    rest = optax.chain(finite, others or optax.adam(1e-2))
    return optax.partition({"layers": method(blocks=found), "others": rest}, label)
