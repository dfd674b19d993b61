"""Bad input: errors that name the leaf and the fix."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.optim.layer_blocks import infer_blocks
from moment_jax.optim.trees import flatten
from tests.optim.networks import CLASSES, Everything, Perceptron, capture, classify, dense_batch

optim = mj.optim
PARAMS = {"layer": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}}
FACTOR = optim.KroneckerFactor(jnp.eye(5)[None], jnp.eye(3)[None], jnp.ones(()))


def update(factors, tx=None, params=PARAMS):
    tx = optim.kfac(0.1) if tx is None else tx
    return tx.update(params, tx.init(params), params, factors=factors)


@pytest.mark.parametrize("make", [optim.cg_fac, optim.kfac])
def test_factors_that_do_not_fit(make):
    tx = make(0.1)
    with pytest.raises(ValueError, match=r"layer 'layer' \(layer/kernel, layer/bias\) are missing"):
        update({}, tx)
    other = FACTOR._replace(inputs=jnp.eye(4)[None])
    with pytest.raises(ValueError, match=r"'inputs' of layer 'layer' needs the shape \(1, 5, 5\)"):
        update({"layer": other}, tx)
    with pytest.raises(TypeError, match="value_grad_and_factors"):
        update([FACTOR], tx)


def test_a_parameter_without_a_layer():
    with pytest.raises(ValueError, match=r"'position' belongs to no layer.*for_model"):
        optim.kfac(0.1).init({**PARAMS, "position": jnp.ones((2, 3))})


def test_a_tree_of_another_model():
    blocks = optim.find_blocks(Perceptron())
    with pytest.raises(ValueError, match=r"Layer 'hidden' .* 'hidden/kernel'.*find_blocks"):
        optim.kfac(0.1, blocks=blocks).init(PARAMS)


@pytest.mark.parametrize("method", [optax.adam, optax.adam(0.1), "kfac"])
def test_a_method_of_first_order(method):
    with pytest.raises(TypeError, match=r"takes blocks=.*functools.partial\(mj.optim.kfac"):
        optim.for_model(Perceptron(), method)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (optim.cg_fac, {"damping": -1.0}, "damping >= 0"),
        (optim.cg_fac, {"max_iterations": 0}, "max_iterations >= 1"),
        (optim.cg_fac, {"tolerance": -0.1}, "tolerance >= 0"),
        (optim.cg_fac, {"momentum": 1.0}, "momentum >= 0 and < 1"),
        (optim.kfac, {"decay": 1.5}, "decay >= 0 and < 1"),
        (optim.kfac, {"refresh_every": 0}, "refresh_every >= 1"),
        (optim.kfac, {"kl_bound": -1.0}, "kl_bound >= 0"),
        (optim.kfac, {"damping": float("nan")}, "damping >= 0"),
        (optim.LevenbergMarquardt, {"factor": 0.5}, "factor > 1"),
        (optim.LevenbergMarquardt, {"initial": 1e9}, "smallest <= initial <= largest"),
    ],
)
def test_numbers_out_of_range(make, options, message):
    arguments = () if make is optim.LevenbergMarquardt else (0.1,)
    with pytest.raises(ValueError, match=message):
        make(*arguments, **options)


def test_kinds_that_do_not_go_together():
    rows = optim.RowFactor(jnp.ones((1, 6, 1, 5)), jnp.ones((1, 6, 1, 3)), jnp.ones(()))
    with pytest.raises(TypeError, match="decay=None"):
        update({"layer": rows}, optim.cg_fac(0.1))
    with pytest.raises(ValueError, match="factors at every step"):
        update(None, optim.cg_fac(0.1, decay=None))
    with pytest.raises(TypeError, match="Cholesky"):
        optim.kfac(0.1, inversion="cholesky")
    with pytest.raises(TypeError, match="KroneckerExpand"):
        optim.value_grad_and_factors(classify, reading=optim.PerSample)
    with pytest.raises(ValueError, match="examples >= 1"):
        optim.SampledFisher(0)


class Idle(nnx.Module):
    """A layer that is called, and one that is not."""

    def __init__(self):
        self.used = nnx.Linear(4, CLASSES, rngs=nnx.Rngs(0))
        self.idle = nnx.Linear(4, CLASSES, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.used(x)


@pytest.mark.parametrize("wrap", [nnx.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("reading", [optim.KroneckerExpand(), optim.PerSample()], ids=str)
def test_a_loss_that_does_not_call_a_layer(reading, wrap):
    x, labels = dense_batch()
    with pytest.raises(ValueError, match="'idle'"):
        wrap(optim.value_grad_and_factors(classify, reading=reading))(Idle(), x, labels)


def test_losses_that_do_not_fit():
    x, labels = dense_batch()
    scalar = optim.value_grad_and_factors(lambda model, x, y: classify(model, x, y)[0])
    with pytest.raises(TypeError, match=r"CategoricalPrediction.*EmpiricalFisher"):
        scalar(Perceptron(), x, labels)
    vector = optim.value_grad_and_factors(lambda model, x, y: (model(x), classify(model, x, y)[1]))
    with pytest.raises(ValueError, match="must be a scalar"):
        vector(Perceptron(), x, labels)
    with pytest.raises(ValueError, match="supported layers"):
        optim.value_grad_and_factors(classify)(nnx.Dropout(0.1), x, labels)
    with pytest.raises(ValueError, match="axis of examples"):
        optim.value_grad_and_factors(lambda model: classify(model, x, labels))(Perceptron())


def test_a_layer_called_twice_has_no_rows():
    class Twice(Idle):
        def __call__(self, x):
            return self.used(x) + self.used(2 * x) + self.idle(x)

    x, labels = dense_batch()
    with pytest.raises(ValueError, match=r"'used' is called 2 times.*KroneckerExpand"):
        optim.value_grad_and_factors(classify, reading=optim.PerSample())(Twice(), x, labels)
    factors = capture()(Twice(), x, labels)[2]
    expected = (x.T @ x) * 5 / (2 * x.shape[0])
    assert jnp.allclose(factors["used"].inputs[0, :4, :4], expected, rtol=1e-5)


def test_spreads_that_nobody_told_of():
    tx = optim.natural_scales(0.1, ())
    with pytest.raises(ValueError, match=r"'raw/scale'.*find_scales"):
        tx.init({"raw": {"scale": jnp.ones(3)}})
    with pytest.raises(ValueError, match="find_blocks"):
        optim.for_model(nnx.Dropout(0.1), lambda blocks: optim.kfac(0.1, blocks=blocks))


def test_names_and_models_agree_on_blocks():
    """What is inferred from Flax's names is what a model says."""
    model = Everything()
    shapes = {block.name: block for block in optim.find_blocks(model)}
    tx = optim.kfac(0.1)
    assert "general" in shapes  # LinearGeneral's split cannot be told from a name alone
    del model.general
    jax.eval_shape(tx.init, nnx.as_pure(nnx.state(model, nnx.Param)))
    inferred = infer_blocks({k: v.shape for k, v in flatten(nnx.state(model, nnx.Param)).items()})
    assert {block.name: block for block in inferred} == {
        name: block for name, block in shapes.items() if name != "general"
    }
