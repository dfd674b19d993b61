"""Bad input: errors that name the leaf and the fix."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.optim.layer_blocks import flatten, infer_blocks
from tests.optim.networks import CLASSES, Everything, Perceptron, capture, classify, dense_batch

optim = mj.optim
PARAMS = {"layer": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}}
FACTOR = optim.KroneckerFactor(jnp.eye(5)[None], jnp.eye(3)[None], jnp.ones(()))
NARROW = {"layer": FACTOR._replace(inputs=jnp.eye(4)[None])}
ROWS = optim.RowFactor(jnp.ones((1, 6, 1, 5)), jnp.ones((1, 6, 1, 3)), jnp.ones(()))
MAKERS = (optim.cg_fac, optim.kfac)
BATCH, OTHERS = dense_batch(), optim.find_blocks(Perceptron())


class Idle(nnx.Module):
    """A layer that is called, and one that is not."""

    def __init__(self):
        self.used = nnx.Linear(4, CLASSES, rngs=nnx.Rngs(0))
        self.idle = nnx.Linear(4, CLASSES, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.used(x)


class Twice(Idle):
    def __call__(self, x):
        return self.used(x) + self.used(2 * x) + self.idle(x)


def update(factors, make=optim.kfac, **settings):
    tx = make(0.1, **settings)
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS, factors=factors)


def start(params, **settings):
    return optim.kfac(0.1, **settings).init(params)


def eager(fn):
    return fn


def captured(loss=classify, model=Perceptron, batch=BATCH, wrap=eager, **settings):
    return wrap(optim.value_grad_and_factors(loss, **settings))(model(), *batch)


MISFITS = [
    ({}, ValueError, r"layer 'layer' \(layer/kernel, layer/bias\) are missing"),
    (NARROW, ValueError, r"'inputs' of layer 'layer' needs the shape \(1, 5, 5\)"),
    ({"layer": tuple(FACTOR)}, TypeError, "a factor of mj.optim. Got tuple"),
    ([FACTOR], TypeError, "value_grad_and_factors"),
]
UNTAPPED = [(r, w) for r in (optim.KroneckerExpand(), optim.PerSample()) for w in (nnx.jit, eager)]
FIRST_ORDER = (optax.adam, optax.adam(0.1), "kfac")
NEEDS_BLOCKS = r"takes blocks=.*functools.partial\(mj.optim.kfac"
VALUE_ERRORS = [
    (partial(update, None, optim.cg_fac, decay=None), "factors at every step"),
    (
        partial(start, {**PARAMS, "position": jnp.ones(3)}),
        "'position' belongs to no layer.*for_model",
    ),
    (partial(start, PARAMS, blocks=OTHERS), "Layer 'hidden' .* 'hidden/kernel'.*find_blocks"),
    (partial(optim.for_model, nnx.Dropout(0.1)), "find_blocks"),
    (partial(optim.cg_fac, damping=-1.0), "damping >= 0"),
    (partial(optim.cg_fac, max_iterations=0), "max_iterations >= 1"),
    (partial(optim.cg_fac, tolerance=-0.1), "tolerance >= 0"),
    (partial(optim.cg_fac, momentum=1.0), "momentum >= 0 and < 1"),
    (partial(optim.kfac, decay=1.5), "decay >= 0 and < 1"),
    (partial(optim.kfac, refresh_every=0), "refresh_every >= 1"),
    (partial(optim.kfac, kl_bound=-1.0), "kl_bound >= 0"),
    (partial(optim.kfac, damping=float("nan")), "damping >= 0"),
    (partial(optim.AdaptiveDamping, initial=1e9), "smallest <= initial <= largest"),
    (partial(optim.TrustRegion, rate=-1.0), "a rate >= 0"),
    (partial(captured, lambda *args: (jnp.ones(2), classify(*args)[1])), "must be a scalar"),
    (partial(captured, model=partial(nnx.Dropout, 0.1)), "supported layers"),
    (partial(captured, lambda model: classify(model, *BATCH), batch=()), "axis of examples"),
    (
        partial(captured, model=Twice, reading=optim.PerSample()),
        "'used' is called 2 times.*Kronecker",
    ),
    *((partial(captured, model=Idle, reading=r, wrap=wrap), "'idle'") for r, wrap in UNTAPPED),
]
TYPE_ERRORS = [
    (partial(update, {"layer": ROWS}, optim.cg_fac), "decay=None"),
    (partial(update, {"layer": ROWS}, decay=None), "KroneckerExpand.* or cg_fac"),
    (partial(optim.cg_fac, precondition="jacobi"), "precondition True or False"),
    (partial(captured, reading=optim.PerSample), "KroneckerExpand"),
    (partial(captured, lambda *args: classify(*args)[0]), "CategoricalPrediction.*EmpiricalFisher"),
    *((partial(optim.for_model, Perceptron(), method), NEEDS_BLOCKS) for method in FIRST_ORDER),
]
CASES = [
    *((partial(update, factors, make), *rest) for make in MAKERS for factors, *rest in MISFITS),
    *((call, ValueError, message) for call, message in VALUE_ERRORS),
    *((call, TypeError, message) for call, message in TYPE_ERRORS),
]


@pytest.mark.parametrize(("call", "error", "message"), CASES)
def test_what_is_wrong_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_layer_called_twice_has_the_average_of_both_calls():
    x, labels = BATCH
    factors = capture()(Twice(), x, labels)[2]
    expected = (x.T @ x) * 5 / (2 * x.shape[0])
    assert jnp.allclose(factors["used"].inputs[0, :4, :4], expected, rtol=1e-5)


def test_names_and_models_agree_on_blocks():
    """What is inferred from Flax's names is what a model says."""
    model = Everything()
    shapes = {block.name: block for block in optim.find_blocks(model)}
    assert "general" in shapes  # LinearGeneral's split cannot be told from a name alone
    del model.general
    jax.eval_shape(optim.kfac(0.1).init, nnx.as_pure(nnx.state(model, nnx.Param)))
    inferred = infer_blocks({k: v.shape for k, v in flatten(nnx.state(model, nnx.Param)).items()})
    assert {block.name: block for block in inferred} == {
        name: block for name, block in shapes.items() if name != "general"
    }
