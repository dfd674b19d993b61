"""A job that compiles in a second, and, as a program, a supervisor of it that takes its order."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import moment_jax as mj
from experiments.command_line import PREEMPTED, PreemptedError
from experiments.loop import Job, Order, supervise

FEATURES = 8


def job(settings):
    """A Bayesian dense layer learns a linear map; `noise` makes every update need its own key."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, FEATURES)).astype(np.float32)
    arrays = (x, x[:, : settings.get("out", 4)] * 2)

    def create(seed):
        return mj.nn.Dense(
            FEATURES, settings.get("out", 4), structure=mj.Diagonal, rngs=nnx.Rngs(seed)
        )

    def loss(module, batch, key, step):
        x, y = batch
        x = x[:, None, :] + settings.get("noise", 0.1) * jax.random.normal(key, x[:, None, :].shape)
        mean, cov = module(x)
        spread = jnp.mean(jax.vmap(lambda c: c.variance())(cov))
        fit = jnp.mean((mean[:, 0] - y) ** 2)
        value = fit + spread + 1e-3 * module.kl()
        if "poison" in settings:  # adds nothing, with a derivative that is not finite
            bias, now = jnp.sum(module.bias.mean[...]), step + 1 == settings["poison"]
            value += jax.lax.cond(now, lambda x: jnp.sqrt(x - x), lambda x: x - x, bias)
        return value, {"fit": fit}

    return Job(
        name="dense",
        create=create,
        loss=loss,
        optimizer=optax.adam(1e-2),
        arrays=arrays,
        batch_size=settings.get("batch_size", 8),
        num_steps=settings.get("steps", 6),
        accumulate=settings.get("accumulate", 1),
        settings={"noise": settings.get("noise", 0.1)},
    )


if __name__ == "__main__":
    try:
        supervise(Order.from_json(sys.argv[1]))
    except PreemptedError:
        sys.exit(PREEMPTED)
