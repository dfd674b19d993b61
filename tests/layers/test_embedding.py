"""Random rows of a table: the textbook covariance of what is looked up, ties, ids, positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import ALL_STRUCTURES, KERNEL_FAMILIES, assert_close, random_kernel
from tests.posterior.families import dense_kernel_cov

ROWS, FEATURES = 5, 3
IDS = jnp.array([3, 0, 3, 4, 0, 3])
KEY = jax.random.key(4)


@pytest.mark.parametrize("family", KERNEL_FAMILIES)
@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_the_covariance_is_that_of_the_rows(structure, family):
    """Cov[x_td, x_se] = Cov[w_(ids t)d, w_(ids s)e]: equal ids have equal rows."""
    table = random_kernel(KEY, family, (ROWS, FEATURES))
    mean, cov = mj.embedding(IDS, table, structure)
    ids = np.asarray(IDS)
    expected = dense_kernel_cov(table)[ids][:, :, ids]
    assert_close(mean, table.mean[IDS])
    assert_close(cov.to_dense(), structure.project(jnp.asarray(expected)).to_dense())
    # What the rows' and the features' correlations do not tell apart.
    assert_close(cov.variance(), jnp.einsum("tdtd->td", expected))


@pytest.mark.parametrize("family", KERNEL_FAMILIES)
def test_rows_and_transpose_of_a_belief(family):
    table = random_kernel(KEY, family, (ROWS, FEATURES))
    chosen, dense = np.array([4, 1, 2]), dense_kernel_cov(table)
    rows, turned = table.rows(chosen), table.transpose()
    assert_close(rows.mean, table.mean[chosen])
    assert_close(dense_kernel_cov(rows), dense[chosen][:, :, chosen])
    assert_close(turned.mean, table.mean.T)
    assert_close(dense_kernel_cov(turned), dense.transpose(1, 0, 3, 2))


def test_tied_logits_against_the_dense_formula():
    module = mj.nn.Embedding(ROWS, FEATURES, structure=mj.Full, rngs=nnx.Rngs(0))
    x = jax.random.normal(KEY, (2, 4, FEATURES), jnp.float32)
    mean, cov = module.attend(x)
    assert_close(mean, module.mean_network().attend(x), 1e-6)
    # Cov[(x E^T)_tv, (x E^T)_su] = [v = u] sum_d x_td x_sd Var[E_vd] for independent entries.
    variance = module.params.variance
    expected = jnp.einsum("btd,bsd,vd,vu->btvsu", x, x, variance, jnp.eye(ROWS))
    assert_close(jax.vmap(lambda c: c.to_dense())(cov), expected, 1e-6)


def test_modules_are_their_networks():
    embed = mj.nn.Embedding(ROWS, 4, structure=mj.TokenCorrelated, rngs=nnx.Rngs(0))
    places = mj.nn.LearnedPositions(8, 4, structure=mj.TokenCorrelated, rngs=nnx.Rngs(1))
    batch = jnp.stack([IDS, IDS[::-1]])
    mean, cov = embed(batch)
    single, single_cov = mj.embedding(IDS[::-1], embed.params, mj.TokenCorrelated)
    assert_close(mean, embed.mean_network()(batch))
    assert_close(mean[1], single)
    assert_close(cov.correlation[1], single_cov.correlation, 1e-6)
    moved, moved_cov = places(mean, cov)
    with jax.numpy_rank_promotion("allow"):
        assert_close(moved, places.mean_network()(mean))
        later = places.mean_network()(mean[:, 2:], 2)
    assert_close(places(mean[:, 2:], start=2)[0], later)
    assert_close(places(mean[:, 2:], start=jnp.array([2, 0]))[0][0], later[0])
    total = jax.vmap(lambda c: c.variance())(cov) + places.params.variance[None, : IDS.shape[0]]
    assert_close(jax.vmap(lambda c: c.variance())(moved_cov), total, 1e-6)
    # A sequence in another structure than the module's own keeps it.
    certain = mj.Full.zeros(mean.shape[1:])
    assert_close(
        places(mean[0], certain)[1].variance(), places.params.variance[: IDS.shape[0]], 1e-6
    )
    for module in (embed, places):
        again = type(module).from_deterministic(module.mean_network())
        assert_close(again.params.mean, module.params.mean)


def test_sinusoidal_positions():
    """The formula of the paper, entry by entry."""
    actual = mj.sinusoidal_positions(7, 6, dtype=jnp.float64)
    for place, feature in np.ndindex(7, 6):
        angle = place / 10_000 ** (2 * (feature // 2) / 6)
        wave = np.cos(angle) if feature % 2 else np.sin(angle)
        np.testing.assert_allclose(actual[place, feature], wave, atol=1e-12)


@pytest.mark.parametrize("family", [mj.posterior.Point, mj.posterior.Factorized])
@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_ids_out_of_range_are_nan_in_compiled_code(structure, family):
    table = random_kernel(KEY, family, (ROWS, FEATURES))
    look_up = jax.jit(lambda ids: mj.embedding(ids, table, structure))
    mean, cov = look_up(jnp.array([-1, 2, ROWS]))
    assert_close(mean[1], table.mean[2])
    assert jnp.isnan(mean[jnp.array([0, 2])]).all()
    assert not (cov.variance()[jnp.array([0, 2])] > 0).any()


def test_places_beyond_the_last_are_nan_in_compiled_code():
    places = mj.nn.LearnedPositions(4, 2, structure=mj.Diagonal, rngs=nnx.Rngs(0))
    mean, _ = nnx.jit(lambda p, s: p(jnp.ones((3, 2), jnp.float32), start=s))(places, jnp.array(2))
    assert list(jnp.isnan(mean[:, 0])) == [False, False, True]


TABLE = mj.posterior.Factorized(jnp.zeros((ROWS, 2)), jnp.ones((ROWS, 2)))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: mj.embedding(jnp.array([5]), TABLE, mj.Full), ValueError, "from 0 to 4"),
        (lambda: mj.embedding(jnp.array([-1]), TABLE, mj.Full), ValueError, "vocabulary"),
        (lambda: mj.embedding(jnp.array([1.0]), TABLE, mj.Full), ValueError, "integers"),
        (lambda: mj.embedding(jnp.zeros((2, 2), int), TABLE, mj.Full), ValueError, "mj.nn.Embed"),
        (lambda: mj.embedding(jnp.zeros(0, int), TABLE, mj.Full), ValueError, "one token"),
        (lambda: mj.embedding(jnp.array([0]), jnp.ones((3, 2)), mj.Full), TypeError, "Point"),
        (lambda: mj.embedding(jnp.array([0]), TABLE, "Full"), TypeError, "structure"),
        (lambda: mj.embedding([0], TABLE, mj.Full), TypeError, r"Got list. Use jnp.asarray"),
        (lambda: mj.nn.Embedding(0, 3, rngs=nnx.Rngs(0)), ValueError, ">= 1"),
        (lambda: mj.nn.Embedding(3, 2, rngs=nnx.Rngs(0))(jnp.array([[3]])), ValueError, "0 to 2"),
        (
            lambda: mj.nn.LearnedPositions(3, 2, rngs=nnx.Rngs(0))(jnp.ones((4, 2))),
            ValueError,
            "places 0 to 3",
        ),
        (lambda: mj.sinusoidal_positions(3, 5), ValueError, "even"),
    ],
)
def test_messages(call, error, words):
    with pytest.raises(error, match=words):
        call()
