"""Every rule of `propagate`, broken by hand, and what the two laws of `check` see of it."""

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.nn.check import LITTLE, WRONG
from moment_jax.nn.law import as_function, without_noise
from moment_jax.posterior.base import mean_params
from moment_jax.propagation import law, propagator

T, D = 4, 6
X = jax.random.normal(jax.random.key(0), (T, D), jnp.float32)
IDS = jnp.array([3, 1, 4, 1])


class Attending(nnx.Module):
    """Attention by hand with a bias, in a block of its own norm, and a gated second half."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.q, self.k, self.v, self.out, self.gate, self.up, self.down = (
            nnx.Linear(D, D, rngs=rngs, bias_init=nnx.initializers.normal(0.5)) for _ in range(8)
        )
        self.norm, self.root = nnx.LayerNorm(D, rngs=rngs), nnx.RMSNorm(D, rngs=rngs)
        self.slopes = nnx.Param(jnp.full((2, 1, 1), 0.3))

    def __call__(self, x):
        x = self.embed(x)
        y = self.norm(x)
        q, k, v = (f(y).reshape(T, 2, D // 2).swapaxes(0, 1) for f in (self.q, self.k, self.v))
        away = -jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)).astype(jnp.float32)
        weights = nnx.softmax(q @ k.swapaxes(-1, -2) + self.slopes * away)
        x = x + self.out((weights @ v).swapaxes(0, 1).reshape(T, D))
        y = self.root(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Reader(nnx.Module):
    """Ids, learned places, a class token, two blocks in a loop, a cap, a read-out."""

    def __init__(self):
        rngs = nnx.Rngs(1)
        self.table, self.places = nnx.Embed(9, D, rngs=rngs), nnx.Param(X / 4)
        self.token = nnx.Param(X[:1])
        self.stack = nnx.vmap(lambda rngs: nnx.Linear(D, D, rngs=rngs))(rngs.split(2))
        self.head = nnx.Linear(D, 3, rngs=rngs)

    def __call__(self, ids):
        x = jnp.concatenate([self.token, self.table(ids) + self.places])

        def block(x, layer):
            return x + jnp.tanh(layer(x))

        x = nnx.scan(block, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stack)
        return self.head(jnp.clip(x, -1, 1)[:2].sum(axis=0, keepdims=True))


class Branches(nnx.Module):
    """A convolution of patches, a masked row, halves that are swapped, a factor for each feature."""

    def __init__(self):
        rngs = nnx.Rngs(2)
        self.patches = nnx.Conv(1, D, kernel_size=(2, 2), strides=(2, 2), rngs=rngs)
        self.gain = nnx.Param(jnp.linspace(0.5, 1.5, D))
        self.up, self.down = nnx.Linear(D, 2 * D, rngs=rngs), nnx.Linear(2 * D, D, rngs=rngs)

    def __call__(self, image):
        x = self.patches(image[..., None]).reshape(T, D)
        x = jnp.where(jnp.arange(T)[:, None] < 3, x, 0.0) * self.gain
        x = x + self.down(nnx.relu(self.up(x)))
        left, right = jnp.split(x, 2, axis=1)
        x = jnp.concatenate([right * 2.0, left - right], axis=1)
        return (x * jnp.arange(T)[:, None]).sum(axis=0, keepdims=True)


IMAGE = jnp.arange(16, dtype=jnp.float32).reshape(4, 4) / 8 - 1
NETWORKS = [
    (Attending, X, mj.Full), (Reader, IDS, mj.Full), (Branches, IMAGE, mj.Full),
    (Branches, IMAGE, mj.Separable),
]  # fmt: skip
RIGHT = jnp.array([-1, -1])
MEANS = ("1.01 times", "tokens reversed", "a feature lost")
SPREADS = ("twice the variance", "no variance", "no covariance with its input")


def bend_means(numbers, fault, mine):
    """The moments of a rule, with a fault of its mean."""
    mean, cov, *carries = numbers
    wrong = 1.01 * mean, mean[::-1], mean.at[:, 0].set(0)
    return jnp.select([mine & (fault == i) for i in range(3)], wrong, mean), cov, *carries


def bend_spreads(numbers, fault, mine):
    """The moments of a rule, with a fault of its covariances."""
    mean, cov, *carries = numbers
    size = jnp.select([mine & (fault == 0), mine & (fault == 1)], [2**0.5, 0.0], 1.0)
    own = jnp.where(mine & (fault == 2), 0.0, 1.0)

    def bent(carry):
        return lambda cross: carry(cross).rescale(own[None, None])

    return mean, cov.rescale(size[None, None]), *(c if c is None else bent(c) for c in carries)


def mutants(fn, x, structure, bend, beliefs, monkeypatch):
    """The pass as a function of (rule, fault), compiled once, and the names of the rules in it."""
    names = []

    def wrapped(rule, at):
        def other(planner, node):
            found = rule(planner, node)
            if found is not None and found.base.node is None:  # no view of what was known
                names.extend({rule.__name__} - {*names})
                compute, number = found.base.compute, names.index(rule.__name__)
                found.base.compute = lambda: bend(compute(), at[1], at[0] == number)
            return found

        return other

    @jax.jit
    def run(at):
        with monkeypatch.context() as patch:
            rules = {k: [wrapped(r, at) for r in v] for k, v in propagator.RULES.items()}
            patch.setattr(propagator, "PATTERNS", [wrapped(r, at) for r in propagator.PATTERNS])
            patch.setattr(propagator, "RULES", defaultdict(list, rules))
            mean, cov = mj.propagate(fn, structure=structure)(beliefs, x)
            return mean, cov.sd()

    run(RIGHT)
    return run, names


def survivors(bend, faults, model_of, off, bound, networks, monkeypatch):
    """The faults of a rule that no network shows, and how many there were."""
    all_of, caught = set(), set()
    with jax.numpy_rank_promotion("allow"):
        for make, x, structure in networks:
            model = model_of(mj.Bayesian(make(), structure=mj.Full))
            fn = as_function(model, {})
            run, names = mutants(fn, x, structure, bend, model.beliefs, monkeypatch)
            figure = off(fn, model.beliefs, x)
            assert figure(run(RIGHT)) < bound / 3
            for i, name in enumerate(names):
                for j, fault in enumerate(faults):
                    all_of.add((name, fault))
                    if figure(run(jnp.array([i, j]))) > bound:
                        caught.add((name, fault))
    return all_of - caught, len(all_of)


@pytest.mark.slow
def test_the_first_law_sees_every_fault_of_a_mean(monkeypatch):
    def off(fn, beliefs, x):
        plain = fn(mean_params(beliefs), x)
        return lambda found: law.deviation(found[0].reshape(plain.shape), plain)

    given = bend_means, MEANS, without_noise, off, law.CLOSE, NETWORKS
    unseen, count = survivors(*given, monkeypatch)
    assert count == 36
    assert unseen == {("_total", "tokens reversed")}  # one token is left of a sum


@pytest.mark.slow
def test_the_second_law_sees_most_faults_of_a_covariance(monkeypatch):
    def off(fn, beliefs, x):
        linear = np.asarray(mj.linearised(fn, structure=mj.Full)(beliefs, x)[1].sd())
        varies = linear > 0
        return lambda found: np.abs(np.asarray(found[1])[varies] / linear[varies] - 1).mean()

    unseen, count = survivors(
        bend_spreads, SPREADS, lambda m: m.scaled(LITTLE), off, WRONG, NETWORKS[:3], monkeypatch
    )
    assert count == 33
    variances = {(name, fault) for name, fault in unseen if fault != SPREADS[2]}
    assert variances == {("_rows", fault) for fault in SPREADS[:2]}  # of little weight there
    assert len(unseen) <= 10
