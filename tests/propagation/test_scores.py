"""What stands between the scores and the weights of attention is read, known while tracing or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from tests.propagation.test_propagate import belief

H, T, D = 2, 5, 4
NAMES = "query", "key", "value", "out"
WEIGHTS = {name: belief(i, D, D, scale=0.2) for i, name in enumerate(NAMES)}
TABLE = belief(7, H, 2 * T - 1, scale=0.5)
SLOPES = mj.posterior.Factorized(jnp.array([0.5, 0.25]), jnp.array([0.01, 0.01]))
X = jax.random.normal(jax.random.key(0), (T, D))
AWAY = np.abs(np.subtract.outer(np.arange(T), np.arange(T)))
BUCKETS = np.subtract.outer(np.arange(T), np.arange(T)) + T - 1
SEEN = np.arange(T) < 3
CAUSAL = np.tri(T, dtype=bool)
SOFT = np.random.default_rng(0).uniform(0.1, 1, (H, T, T))


def attend(
    p, x, given, scores=lambda p, z, c: z / 2, weights=lambda p, w, c: w, softmax=jax.nn.softmax
):
    """Two heads of two features; `scores` and `weights` change q k^T and its softmax, (H, T, T)."""
    q, k, v = ((x @ p[n]).reshape(T, H, D // H).transpose(1, 0, 2) for n in NAMES[:3])
    z = scores(p, 3 * q @ k.swapaxes(1, 2), given)
    w = weights(p, softmax(z), given)
    return (w @ v).transpose(1, 0, 2).reshape(T, D) @ p["out"]


def heads_first(array):
    return array[:, None, None]


SCORES = {  # what is done to the scores, and the certain array that it needs
    "bias of BERT's mask": (lambda p, z, c: z / 2 + jnp.where(c, 0, -1e9)[None, None], SEEN),
    "bias of a mask, -inf": (lambda p, z, c: z + jnp.where(c, 0, -jnp.inf)[None, None], SEEN),
    "bias (1 - m) * -1e4": (lambda p, z, c: z + (1.0 - c)[None, None] * -1e4, SEEN),
    "where": (lambda p, z, c: jnp.where(c[None], z, -1e9), CAUSAL),
    "where by head": (lambda p, z, c: jnp.where(c, z, -jnp.inf), SOFT > 0.5),
    "where -30": (lambda p, z, c: jnp.where(c[None], z, -30.0), CAUSAL),
    "a row that is masked": (lambda p, z, c: jnp.where(c[None], z, -1e9), CAUSAL & (AWAY > 0)),
    "two masks": (lambda p, z, c: jnp.where(c[None], jnp.where(c.T[None], z, -1e9), -2e9), AWAY < 2),
    "ALiBi": (lambda p, z, c: z - heads_first(c) * AWAY, np.array([0.5, 0.25])),
    "soft mask": (lambda p, z, c: z + jnp.log(c + 1e-9), SOFT),
    "a temperature of heads": (lambda p, z, c: z * heads_first(jnp.exp(c)), np.array([0.5, 0.0])),
    "a temperature of queries": (lambda p, z, c: z / c[None, :, :1], SOFT[0]),
    "a factor of each score": (lambda p, z, c: z * c, SOFT),
    "1 / d": (lambda p, z, c: z / c, np.array(3.0)),
    "turned": (lambda p, z, c: c[None] - z, AWAY / 2),
    "a cap": (lambda p, z, c: c * jnp.tanh(z / 2), 1.5),
    "a cap, then a mask": (lambda p, z, c: jnp.where(CAUSAL[None], 2 * jnp.tanh(z / 2), -1e9), None),
    "a cap, then a mask as a bias": (
        lambda p, z, c: jax.nn.softplus(z / 2) + jnp.where(c[None], 0, -1e9), CAUSAL,
    ),
    "a cap, then where -3": (lambda p, z, c: jnp.where(c[None], jax.nn.softplus(z), -3.0), CAUSAL),
    "a cap, then random slopes": (
        lambda p, z, c: 2 * jnp.tanh(z / 2) - p["slopes"][:, None, None] * AWAY, None,
    ),
    "a clip": (lambda p, z, c: jnp.clip(z, -1, 1), None),
    "a random table": (lambda p, z, c: z / 2 + p["table"][:, BUCKETS], None),
    "random slopes, a mask": (
        lambda p, z, c: jnp.where(c[None], z - p["slopes"][:, None, None] * AWAY, -1e9), CAUSAL,
    ),
    "a random temperature": (lambda p, z, c: z / 2 * heads_first(jnp.exp(p["slopes"])), None),
    "log softmax": (lambda p, z, c: jax.nn.log_softmax(z / 2), None),
}  # fmt: skip
GATES = {  # what is done to the weights
    "head mask": (lambda p, w, c: w * c[:, None, None], np.array([1.0, 0.0])),
    "a mask of queries": (lambda p, w, c: w * c[0, :, :1][None], SOFT),
}
STRUCTURES = [mj.Diagonal, mj.Separable, mj.Full]


def network(name):
    """The function, and the certain array that it needs."""
    change, given = {**SCORES, **GATES}[name]
    kind = "scores" if name in SCORES else "weights"
    return (lambda p, x, c: attend(p, x, c, **{kind: change})), given


def beliefs(name):
    extra = {"table": TABLE} if "table" in name else {"slopes": SLOPES} if "random" in name else {}
    return WEIGHTS | extra


@pytest.mark.parametrize("name", [*SCORES, *GATES])
def test_without_noise_it_is_the_network(name):
    """With all that is certain known while tracing, or an input; and gradients are finite.

    The structures take turns: what each makes of a scale, a bias or a cap is tested with the layers.
    """
    fn, given = network(name)
    p = {k: mj.posterior.Factorized(v.mean, 0 * v.variance) for k, v in beliefs(name).items()}
    turn = [*SCORES, *GATES].index(name) % len(STRUCTURES)
    moments = mj.propagate(fn, structure=STRUCTURES[turn])

    @jax.jit
    def every(p, traced):
        def total(p):
            known = moments(p, X, given)
            return known[0].sum(), known

        gradient, known = jax.grad(total, has_aux=True)(p)
        wanted = fn({k: v.mean for k, v in p.items()}, X, given)
        return wanted, gradient, [(m, c.variance()) for m, c in (known, moments(p, X, traced))]

    with jax.numpy_rank_promotion("allow"):
        wanted, gradient, found = every(p, given)
    for mean, variance in found:
        np.testing.assert_allclose(mean, wanted, atol=1e-10)
        assert np.abs(variance).max() < 1e-12
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_a_bias_of_all_heads_that_no_family_repeats_is_not_dropped():
    p = {k: mj.posterior.Factorized(w.mean, jnp.zeros_like(w.mean)) for k, w in WEIGHTS.items()}
    p["bias"] = mj.posterior.FullNormal(jnp.array([1.0, -2.0]), jnp.zeros((2, 2)))

    def fn(p):
        q, k, v = ((X @ p[n]).reshape(T, H, D // H) for n in ("query", "key", "value"))
        weights = jax.nn.softmax(jnp.einsum("thk,shk->hts", q + p["bias"], k))
        return jnp.einsum("hts,shk->thk", weights, v).reshape(T, D)

    with jax.numpy_rank_promotion("allow"):
        wanted = fn({k: w.mean for k, w in p.items()})
        np.testing.assert_allclose(jax.jit(mj.propagate(fn))(p)[0], wanted, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in SCORES if "random" in name), "head mask"])
def test_it_has_the_spread_of_sampled_networks(name):
    """Where what is read is random; the rest is a rule of `layers`, tested there."""
    fn, given = network(name)
    p = beliefs(name)
    with jax.numpy_rank_promotion("allow"):
        truth = mj.monte_carlo(lambda p: fn(p, X, given), p, jax.random.key(1), 20_000)
        mean, cov = jax.jit(mj.propagate(fn, structure=mj.Full))(p, X, given)
    some = truth.standard_deviation > 1e-6
    assert jnp.abs(cov.sd() / truth.standard_deviation - 1)[some].mean() < 0.06
    assert (jnp.abs(mean - truth.mean) / truth.standard_deviation)[some].mean() < 0.06


REFUSED = {
    "where=": ({"softmax": lambda z: jax.nn.softmax(z, where=CAUSAL[None])}, "no softmax"),
    "a log-softmax": ({"softmax": lambda z: jnp.exp(jax.nn.log_softmax(z))}, "no softmax"),
    "a sink": (
        {"softmax": lambda z: jnp.exp(z) / (jnp.exp(z).sum(-1, keepdims=True) + 1)}, "no softmax",
    ),
    "steps": ({"scores": lambda p, z, c: jnp.round(1e3 * z) / 1e3}, "a function that jumps"),
    "integers": ({"scores": lambda p, z, c: (1e4 * z).astype(int) / 1e4}, "jump"),
    "a threshold of the row": (
        {"scores": lambda p, z, c: jnp.where(z < z.max(-1, keepdims=True) - 20, -1e9, z)},
        "`select_n` between its scores",
    ),
    "an epsilon": (
        {"weights": lambda p, w, c: w / (w.sum(-1, keepdims=True) + 1e-9)}, "no softmax",
    ),
    "a mixture": ({"weights": lambda p, w, c: 0.7 * w + 0.3 * SOFT}, "no softmax"),
    "a bias of its own keys": (
        {"scores": lambda p, z, c: z + p["key"][0, 0]}, "weights that its inputs use",
    ),
    "a random gate": (
        {"weights": lambda p, w, c: w * p["mix"][0][:, None, None]}, "by random numbers",
    ),
    "other weights": ({"weights": lambda p, w, c: w * SOFT}, "key by key"),
    "talking heads": (
        {"scores": lambda p, z, c: jnp.einsum("hts,hg->gts", z, p["mix"])}, "`dot_general` of random",
    ),
    "two products": ({"scores": lambda p, z, c: z + z.swapaxes(1, 2)}, "`add` between its scores"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_with_its_line(name):
    options, words = REFUSED[name]
    p = WEIGHTS | {"mix": belief(9, H, H)}
    fn = mj.propagate(lambda p, x: attend(p, x, None, **options))
    with (
        jax.numpy_rank_promotion("allow"),
        pytest.raises(mj.PropagationError, match=rf"({words}).*test_scores.py"),
    ):
        jax.eval_shape(fn, p, X)
