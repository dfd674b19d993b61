"""The wrappers on numbers that a direction reports, and whole trainings of a perceptron."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.optim.adaptation import LastStep
from moment_jax.optim.natural_gradient import _judged
from tests.optim.networks import Perceptron, capture, classify, compiled, dense_batch, pure

optim = mj.optim
ONE = jnp.float32(1)
UNIT = LastStep(*(ONE,) * 6)


class Reported(NamedTuple):
    """State of `direction`."""

    last: Any


# A direction that is the gradient, and reports what a test says of the last step.
DIRECTION = optax.GradientTransformationExtraArgs(
    lambda params: Reported(UNIT),
    lambda updates, state, params, *, last, **extra: (updates, Reported(last)),
)


def after(tx, state, taken_back=False, **last):
    """Update and state after a step of which these numbers are reported."""
    told = UNIT._replace(**{key: jnp.float32(value) for key, value in last.items()})
    return tx.update(ONE, state, ONE, last=told, last_step=ONE, taken_back=jnp.array(taken_back))


def test_a_bound_follows_the_slope_and_scales_the_direction():
    """1/2 x^T (F + damping) x is 1/2 here, and the slope over the norms is `slope`."""
    tx = optim.trust_region(DIRECTION, initial=1e-2, rate=0.5, aim=0.1)
    step, start = after(tx, tx.init(ONE), slope=-0.9)
    np.testing.assert_allclose(start.bound, 1e-2, rtol=1e-5)  # no bound was active before it
    np.testing.assert_allclose([step, start.clip], np.sqrt(2 * start.bound), rtol=1e-6)
    # The first slope is its own root mean square, so that its size does not count.
    for slope, change in ((-0.9, 0.55), (-0.01, 0.55), (0.6, -0.9), (0, 0.05), (jnp.nan, 0.05)):
        state = after(tx, start, slope=slope)[1]
        expected = np.exp(change / np.sqrt(1 + 1 / 25))
        np.testing.assert_allclose(state.bound / start.bound, expected, rtol=1e-4)
    second = after(tx, after(tx, start, slope=-0.9)[1], slope=0.6)[1]
    np.testing.assert_allclose(second.square, (0.81 + 0.36) / 2, rtol=1e-6)
    assert after(tx, start, slope=-0.9, quadratic=1e-4)[1].clip == 1
    back = after(tx, start, True, slope=-0.9)[1]
    np.testing.assert_allclose(back.bound, start.bound / 4, rtol=1e-6)


def test_slopes_alone_take_the_bound_down_as_the_number_of_steps():
    """As those of batches without replacement do once noise prevails; dampings wait at that floor."""
    tx = optim.adapt_damping(optim.trust_region(DIRECTION))
    state, bounds, dampings, update = tx.init(ONE), [], [], jax.jit(lambda s: after(tx, s)[1])
    for _ in range(60):
        state = update(state)
        bounds.append(float(state.inner_state.bound))
        dampings.append(float(state.damping))
    assert bounds[10] < bounds[0] / 10  # early bounds are no floor
    late = np.arange(20, 60)
    np.testing.assert_allclose(np.asarray(bounds)[late] * (late + 1), bounds[20] * 21, rtol=1e-5)
    assert dampings[0] != dampings[10]
    assert dampings[20] == dampings[-1]


def test_fixed_bounds_and_schedules():
    for bound, most in ((0.125, 0.125), (optax.linear_schedule(0.125, 0.0, 4), 0.09375)):
        tx = optim.trust_region(DIRECTION, bound)
        np.testing.assert_allclose(after(tx, tx.init(ONE))[0], 0.5, rtol=1e-6)
        np.testing.assert_allclose(after(tx, after(tx, tx.init(ONE))[1])[1].bound, most)
    assert after(optim.trust_region(DIRECTION, jnp.inf), tx.init(ONE))[0] == 1


def test_damping_follows_the_slope_in_it():
    """(<s, s> <g, s> / (2 |s|^2) - <x, s>) damping over the norms."""
    tx = optim.adapt_damping(DIRECTION, initial=0.1, rate=3.0)
    state = after(tx, tx.init(ONE), slope=4, along=0.5, length=2, size=4)[1]
    np.testing.assert_allclose(state.damping, 0.1 * np.exp(-3 * 0.1 * 0.5 / 2), rtol=1e-6)
    np.testing.assert_allclose(after(tx, tx.init(ONE), True)[1].damping, 0.4, rtol=1e-6)
    assert after(tx, tx.init(ONE), quadratic=0)[1].damping == jnp.float32(0.1)


@pytest.mark.parametrize("bad", [1e3, jnp.inf, jnp.nan])
def test_a_step_that_raises_the_loss_is_taken_back(bad):
    """Once; with it goes the momentum, and the gradient at the bad place is not looked at."""
    tx = optim.undo_bad_steps(optax.chain(optax.ema(0.9), optax.scale(-0.1)))
    update = jax.jit(tx.update)
    params, state = {"w": jnp.ones(3)}, tx.init({"w": jnp.ones(3)})
    for _ in range(4):
        steps, state = update({"w": jnp.cos(params["w"])}, state, params, value=1.0)
        before, params = params, optax.apply_updates(params, steps)
    steps, back = update({"w": jnp.full(3, bad)}, state, params, value=bad)
    np.testing.assert_allclose(params["w"] + steps["w"], before["w"])
    assert back.taken_back == 1
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(back.inner_state))
    steps, again = update({"w": jnp.ones(3)}, back, before, value=bad)  # never two in a row
    np.testing.assert_allclose(steps["w"], -0.1)
    assert again.taken_back == 1
    steps, other = tx.update({"w": jnp.full(3, 1e6)}, state, params)  # without a value
    assert other.taken_back == 0


def solved(factor, damping, vector):
    """(F + damping)^-1 vector."""
    fisher = jnp.kron(factor.inputs[0], factor.outputs[0]) + damping * jnp.eye(vector.size)
    return jnp.linalg.solve(fisher, vector.ravel()).reshape(vector.shape)


def quadratic(seed):
    """A loss <v, F v> / 2 - <v, b> with a Kronecker F, as (loss, factor)."""
    rng = np.random.default_rng(seed)
    a, g, target = (rng.normal(size=size) for size in ((9, 4), (9, 3), (1, 4, 3)))
    a, g = (jnp.asarray(rows.T @ rows / 9)[None] for rows in (a, g))
    factor = optim.KroneckerFactor(a, g, jnp.ones(()))
    return lambda v: jnp.sum(v * (a @ v @ g / 2 - target)), factor


def test_the_slope_in_damping_is_the_derivative_of_the_next_loss():
    """Of a step of fixed length in F + damping; the next loss has another minimum and curvature.

    Between curvatures the last ratio stands for the product with F, exact for a multiple of the step.
    """
    (loss, factor), (next_loss, _) = quadratic(0), quadratic(1)
    length, damping, no = 0.3, 0.2, jnp.zeros((), bool)

    @jax.jit
    def both():
        start = jnp.ones((1, 4, 3), jnp.float64)
        grad = jax.grad(loss)(start)

        def step(damping):
            x = solved(factor, damping, grad)
            return -length * x / jnp.sqrt(jnp.sum(x * grad))

        derivative = jax.grad(lambda log: next_loss(start + step(jnp.exp(log))))(jnp.log(damping))
        g = jax.grad(next_loss)(start + step(damping))
        x = solved(factor, damping, g)
        told = UNIT._replace(quadratic=jnp.sum(x * g))
        args = {"": step(damping)}, {"": x}, {"": g}, ({"": factor}, {}), damping
        last = _judged(told, *args, ~no)
        double = _judged(last, {"": 2 * args[0][""]}, *args[1:], no)
        slope = last.slope_in_damping(damping) * length * jnp.sqrt(told.quadratic)
        return slope, derivative, 4 * last.size, double.size

    slope, derivative, exact, by_ratio = both()
    np.testing.assert_allclose(slope, derivative, rtol=1e-5)
    np.testing.assert_allclose(by_ratio, exact, rtol=1e-5)


def regress(model, x, y):
    """Half the squared error and the prediction."""
    output = model(x)
    return jnp.sum((output - y) ** 2) / (2 * x.shape[0]), optim.NormalPrediction(output)


def by_hand(scale_by):
    """The default chain, with all of what its two rules start from times a factor."""

    def make(blocks, factor):
        start = {"initial": 1e-4 * factor, "rate": 0.3 * factor}
        direction = optim.trust_region(scale_by(blocks=blocks), **start)
        direction = optim.adapt_damping(direction, initial=3e-4 * factor, rate=5.0 * factor)
        return optim.undo_bad_steps(optax.chain(direction, optax.ema(0.8), optax.scale(-1.0)))

    return make


MAKERS = {"kfac": by_hand(optim.scale_by_kfac), "cg_fac": by_hand(optim.scale_by_cg_fac)}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_loss_falls_without_a_setting(make):
    """Whatever the loss is measured in, and with rules that start a third or three times as large."""
    for loss, scale, factor in (
        (classify, 1.0, 1.0),
        (classify, 1.0, 1 / 3),
        (classify, 1.0, 3.0),
        (regress, 1e-3, 1.0),
        (regress, 1e3, 1.0),
    ):
        model, (x, labels) = Perceptron(), dense_batch(n=24)
        blocks, params, values = optim.find_blocks(classify, model, x, labels), pure(model), []
        y = labels if loss is classify else scale**0.5 * jnp.sin(x[:, :3])
        state, update = make(blocks, factor).init(params), compiled(make, blocks)
        for _ in range(80):
            nnx.update(model, params)
            due = optim.curvature_due(state)
            value, grads, factors = capture(loss)(model, x, y, when=due)
            told = {"factors": factors, "value": value}
            setting = {"factor": jnp.float32(factor)}
            steps, state = update(setting, pure(grads), state, params, **told)
            params = optax.apply_updates(params, steps)
            values.append(float(value))
        assert values[-1] < 0.3 * values[0], (loss, scale, factor)
