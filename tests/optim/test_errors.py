"""Bad input: errors that name the leaf and the fix."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.optim.layer_blocks import flatten, infer_blocks
from tests.optim.networks import Everything, Perceptron, capture, classify, dense_batch

optim = mj.optim
PARAMS = {"layer": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}}
FACTOR = optim.KroneckerFactor(jnp.eye(5)[None], jnp.eye(3)[None], jnp.ones(()))
NARROW = {"layer": FACTOR._replace(inputs=jnp.eye(4)[None])}
ROWS = optim.RowFactor(jnp.ones((1, 6, 1, 5)), jnp.ones((1, 6, 1, 3)), jnp.ones(()))
MAKERS = (optim.cg_fac, optim.kfac)
BATCH, OTHERS = dense_batch(), optim.find_blocks(Perceptron())


def idle(model, x, labels):
    """A loss that calls one layer of two."""
    return classify(model.hidden, x, labels)


def twice(model, x, labels):
    """A loss that calls a layer twice."""
    return classify(lambda x: model(x) + model(2 * x), x, labels)


def update(factors, make=optim.kfac, **settings):
    tx = make(0.1, **settings)
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS, factors=factors)


def start(params, **settings):
    return optim.kfac(0.1, **settings).init(params)


class Net(nnx.Module):
    """A layer like that of `PARAMS`."""

    def __init__(self):
        self.layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0))


def masked(**settings):
    """An optimiser of kernels alone."""
    tx = optax.masked(optim.kfac(**settings), lambda t: jax.tree.map(lambda x: x.ndim > 1, t))
    tx.init(PARAMS)


def eager(fn):
    return fn


def captured(loss=classify, model=Perceptron, batch=BATCH, wrap=eager, **settings):
    return wrap(optim.value_grad_and_factors(loss, **settings))(model(), *batch)


MISFITS = [
    ({}, ValueError, r"layer 'layer' \(layer/kernel, layer/bias\) are missing"),
    (NARROW, ValueError, r"'inputs' of layer 'layer' needs the shape \(1, 5, 5\)"),
    ({"layer": tuple(FACTOR)}, TypeError, "a factor of mj.optim. Got tuple"),
    ([FACTOR], TypeError, "value_grad_and_factors"),
    (None, ValueError, r"factors\) at every step.*would be zero.*curvature_due"),
]
NEEDS_WHOLE = "layer/kernel, layer/bias, and a mask hides 'layer/bias'. Mask whole layers"
UNTAPPED = [(r, w) for r in (optim.KroneckerExpand(), optim.PerSample()) for w in (nnx.jit, eager)]
FIRST_ORDER = (optax.adam, optax.adam(0.1), "kfac")
NEEDS_BLOCKS = r"takes blocks=.*functools.partial\(mj.optim.kfac"
VALUE_ERRORS = [
    (partial(start, {}), "needs a layer with curvature factors. Got parameters none"),
    *((partial(masked, blocks=blocks), NEEDS_WHOLE) for blocks in (None, optim.find_blocks(Net()))),
    (
        partial(start, {**PARAMS, "position": jnp.ones(3)}),
        "'position' belongs to no layer.*for_model",
    ),
    (
        lambda: optim.kfac().update(PARAMS, start(PARAMS)),
        r"update\(grads, state, params, factors=f",
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
    (partial(optim.kfac, -0.1), "learning rate >= 0. Got -0.1"),
    (partial(optim.kfac, damping=jnp.float32(-1)), "damping >= 0"),
    (partial(optim.cg_fac, curvature_every=1.5), "curvature_every >= 1, whole. Got 1.5"),
    (partial(optim.AdaptiveDamping, initial=1e9), "smallest <= initial <= largest"),
    (partial(optim.TrustRegion, rate=-1.0), "a rate >= 0"),
    (partial(captured, lambda *args: (jnp.ones(2), classify(*args)[1])), "must be a scalar"),
    (partial(captured, model=partial(nnx.Dropout, 0.1)), "supported layers"),
    (partial(captured, lambda model: classify(model, *BATCH), batch=()), "axis of examples"),
    (partial(captured, twice, reading=optim.PerSample()), "'hidden' is called 2 times.*Kronecker"),
    *((partial(captured, idle, reading=r, wrap=wrap), "layer 'out'") for r, wrap in UNTAPPED),
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
    factors = capture(twice)(Perceptron(), x, labels)[2]
    expected = (x.T @ x) * 5 / (2 * x.shape[0])
    assert jnp.allclose(factors["hidden"].inputs[0, :4, :4], expected, rtol=1e-5)


def test_names_and_models_agree_on_blocks():
    """What is inferred from Flax's names is what a model says."""
    model = Everything()
    del model.general  # LinearGeneral's split cannot be told from a name alone
    params = nnx.state(model, nnx.Param)
    jax.eval_shape(optim.kfac(0.1).init, nnx.as_pure(params))
    inferred = infer_blocks({path: leaf.shape for path, leaf in flatten(params).items()})
    assert set(inferred) == set(optim.find_blocks(model))
