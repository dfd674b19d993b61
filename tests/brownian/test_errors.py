"""Each error states the rule and what came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax import brownian as b

ONES, ROW, SWAP = jnp.ones((2, 2)), jnp.ones(3), np.array([[0.0, 1.0], [1.0, 0.0]])


def heat(dx, dt):
    return b.heat_step(jnp.ones(4), diffusivity=1.0, dx=dx, dt=dt)


CASES = [
    (lambda: b.diffusion_map(jnp.ones((1, 2)), bandwidth=1.0), "two points"),
    (lambda: b.diffusion_map(jnp.eye(4), bandwidth=0.0), "bandwidth > 0"),
    (lambda: b.diffusion_map(jnp.eye(4), bandwidth=1.0, count=4), "T - 1"),
    (lambda: b.ito(lambda t, x: x, diffusion=lambda t, x: ONES)(0.0, ROW), "of the shape of x"),
    (lambda: b.ito(lambda t, x: x, drift=lambda t, x: ONES[0])(0.0, ROW), "drift of the shape"),
    (lambda: b.gaussian_kernel(ONES, ONES, bandwidth=0.0), "> 0"),
    (lambda: b.gaussian_kernel(ONES, jnp.ones((2, 3))), "same number"),
    (lambda: b.transition_matrix(ONES[None]), "vmap"),
    (lambda: b.row_normalize(jnp.array([[1.0, -0.1]])), "none negative"),
    (lambda: b.row_normalize(jnp.array([[1.0, 1.0], [0.0, 0.0]])), "none in row 1"),
    (lambda: b.attention_scores(jnp.ones((2, 3)), ONES, ONES), "D the features"),
    (lambda: b.to_sphere(ONES[:, :1]), "D >= 2"),
    (lambda: b.stationary(np.array([[0.5, 0.4], [0.5, 0.5]])), "Got 0.9 for row 0"),
    (lambda: b.stationary(np.array([[1.5, -0.5], [0.5, 0.5]])), "none negative"),
    (lambda: b.stationary(np.array([[np.nan, 1.0], [0.5, 0.5]])), "finite"),
    (lambda: b.stationary(np.ones((2, 3))), r"\(T, T\)"),
    (lambda: b.detailed_balance_gap(SWAP, np.ones(3)), "law"),
    (lambda: b.mixing_time(SWAP, distance=1.5), "distance < 1"),
    (lambda: b.brownian_increments(jax.random.key(0), 0, dt=1.0), "needs"),
    (lambda: b.brownian_increments(jax.random.key(0), 2, dt=0.0), "needs"),
    (lambda: b.brownian_path(jnp.zeros(())), "needs"),
    (lambda: heat(1.0, 0.6), "1/2.*as many steps"),
    (lambda: heat(0.0, 0.6), "dx > 0"),
]


@pytest.mark.parametrize(("call", "words"), CASES)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
