"""Bad input: errors that name the leaf and the fix."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import moment_jax as mj
from tests.optim.networks import Perceptron, classify, dense_batch

optim = mj.optim
PARAMS = {"layer": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}}
FACTOR = optim.KroneckerFactor(jnp.eye(5)[None], jnp.eye(3)[None], jnp.ones(()))
NARROW = {"layer/kernel": FACTOR._replace(inputs=jnp.eye(4)[None])}
BATCH = dense_batch()
OTHERS = optim.find_blocks(classify, Perceptron(), *BATCH)


def linear(params, x, labels):
    """Of a layer of `PARAMS`."""
    return classify(lambda x: x @ params["layer"]["kernel"] + params["layer"]["bias"], x, labels)


BLOCKS = optim.find_blocks(linear, PARAMS, *BATCH)
IDLE = partial(nnx.Dropout, 0, deterministic=True)  # a network without parameters
KFAC, CG_FAC = partial(optim.kfac, blocks=BLOCKS), partial(optim.cg_fac, blocks=BLOCKS)


def update(factors, make=KFAC):
    tx = make(0.1)
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS, factors=factors)


def start(params, blocks=BLOCKS):
    return optim.kfac(0.1, blocks=blocks).init(params)


def masked():
    """An optimiser of kernels alone."""
    optax.masked(KFAC(), lambda t: jax.tree.map(lambda x: x.ndim > 1, t)).init(PARAMS)


def unwrapped(wrapper):
    """A wrapper without an `undo_bad_steps`."""
    tx = wrapper(optim.scale_by_kfac(blocks=BLOCKS))
    tx.update(PARAMS, tx.init(PARAMS), PARAMS, factors={"layer/kernel": FACTOR})


def captured(loss=classify, model=Perceptron):
    return optim.value_grad_and_factors(loss)(model(), *BATCH)


MISFITS = [
    (
        {},
        ValueError,
        r"'layer/kernel' \(layer/kernel, layer/bias\) needs a KroneckerFactor.*Got None",
    ),
    (NARROW, ValueError, r"\(1, 5, 5\).*Got KroneckerFactor\(inputs=\(1, 4, 4\).*find_blocks"),
    ({"layer/kernel": tuple(FACTOR)}, ValueError, r"Got \(\(1, 5, 5\).*value_grad_and_factors"),
    ([FACTOR], TypeError, "value_grad_and_factors"),
    (None, TypeError, r"factors\) at every step.*curvature_due"),
]
NEEDS_WHOLE = "layer/kernel, layer/bias, and a mask hides 'layer/bias'. Mask whole layers"
FIRST_ORDER = (optax.adam, optax.adam(0.1), "kfac")
NEEDS_BLOCKS = r"takes blocks=.*functools.partial\(mj.optim.kfac"
VALUE_ERRORS = [
    (partial(start, {}), "needs a layer with curvature factors. Got parameters none"),
    (masked, NEEDS_WHOLE),
    (
        partial(start, {**PARAMS, "position": jnp.ones(3)}),
        "'position' belongs to no layer.*for_model",
    ),
    (lambda: KFAC().update(PARAMS, start(PARAMS)), r"update\(grads, state, params, factors=f"),
    (partial(start, PARAMS, OTHERS), "Layer 'hidden/kernel' needs.*find_blocks"),
    *((partial(unwrapped, w), "undo_bad_steps") for w in (optim.adapt_damping, optim.trust_region)),
    (partial(optim.for_model, classify, IDLE(), *BATCH), "find_blocks.*Dropout"),
    (partial(CG_FAC, damping=-1.0), "damping >= 0"),
    (partial(CG_FAC, max_iterations=0), "max_iterations >= 1"),
    (partial(CG_FAC, tolerance=-0.1), "tolerance >= 0"),
    (partial(CG_FAC, momentum=1.0), "momentum >= 0 and < 1"),
    (partial(KFAC, decay=1.5), "decay >= 0 and < 1"),
    (partial(KFAC, kl_bound=-1.0), "kl_bound >= 0"),
    (partial(KFAC, damping=float("nan")), "damping >= 0"),
    (partial(KFAC, -0.1), "learning_rate >= 0. Got -0.1"),
    (partial(KFAC, lambda step: -0.1 * step), r"learning_rate >= 0. Got \[ ?-?0.  -0.1\]"),
    (partial(KFAC, damping=jnp.float32(-1)), "damping >= 0"),
    (partial(CG_FAC, curvature_every=1.5), "curvature_every >= 1, whole. Got 1.5"),
    (partial(optim.adapt_damping, KFAC(), initial=-1.0), "initial >= 0"),
    (partial(optim.trust_region, KFAC(), rate=-1.0), "rate >= 0"),
    (partial(captured, lambda *args: (jnp.ones(2), classify(*args)[1])), "must be a scalar"),
    (partial(captured, model=IDLE), "find_blocks.*Dropout"),
]
TYPE_ERRORS = [
    (partial(optim.for_model, Perceptron(), optim.cg_fac), "loss, model, .*Got Perceptron first"),
    (partial(captured, lambda *args: classify(*args)[0]), "CategoricalPrediction"),
    *(
        (partial(optim.for_model, classify, Perceptron(), *BATCH, method=method), NEEDS_BLOCKS)
        for method in FIRST_ORDER
    ),
]
CASES = [
    *(
        (partial(update, factors, make), *rest)
        for make in (KFAC, CG_FAC)
        for factors, *rest in MISFITS
    ),
    *((call, ValueError, message) for call, message in VALUE_ERRORS),
    *((call, TypeError, message) for call, message in TYPE_ERRORS),
]


@pytest.mark.parametrize(("call", "error", "message"), CASES)
def test_what_is_wrong_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
