"""Embeddings with random tables: covariance, tied logits, ids out of range, positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import ALL_STRUCTURES, KERNEL_FAMILIES, assert_close, random_kernel
from tests.posterior.families import dense_cov

ROWS, FEATURES = 5, 3
IDS = jnp.array([3, 0, 3, 4, 0, 3])
KEY = jax.random.key(4)
TABLES = {family: random_kernel(KEY, family, (ROWS, FEATURES)) for family in KERNEL_FAMILIES}


def _dense(table):
    """Cov[w_io, w_jp], (in, out, in, out)."""
    return dense_cov(table).reshape(*table.shape, *table.shape)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_the_covariance_is_that_of_the_rows(structure):
    """Cov[x_td, x_se] = Cov[w_(ids t)d, w_(ids s)e]: equal ids have equal rows."""
    ids = np.asarray(IDS)
    exact = [_dense(table)[ids][:, :, ids] for table in TABLES.values()]

    @jax.jit
    def both(tables, exact):
        found = [mj.embedding(IDS, table, structure) for table in tables]
        return [
            (mean, cov.to_dense(), cov.variance(), structure.project(dense).to_dense())
            for (mean, cov), dense in zip(found, exact, strict=True)
        ]

    found = both(list(TABLES.values()), exact)
    for table, dense, moments in zip(TABLES.values(), exact, found, strict=True):
        mean, cov, variance, expected = moments
        assert_close(mean, table.mean[IDS])
        assert_close(cov, expected)
        # Variances are exact even where the projection mixes correlations of rows and features.
        assert_close(variance, np.einsum("tdtd->td", dense))


@pytest.mark.parametrize("family", KERNEL_FAMILIES)
def test_rows_and_transpose_of_a_belief(family):
    table = TABLES[family]
    chosen, dense = np.array([4, 1, 2]), _dense(table)
    rows, turned = table.rows(chosen), table.transpose()
    assert_close(rows.mean, table.mean[chosen])
    assert_close(_dense(rows), dense[chosen][:, :, chosen])
    assert_close(turned.mean, table.mean.T)
    assert_close(_dense(turned), dense.transpose(1, 0, 3, 2))


class Logits(nnx.Module):
    """The transposed table of an embedding, as a read-out."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(ROWS, FEATURES, rngs=rngs)

    def __call__(self, x):
        return self.embed.attend(x)


def test_tied_logits_against_the_dense_formula():
    module = Logits(nnx.Rngs(0))
    model = mj.Bayesian(module, structure=mj.Full)
    x = jax.random.normal(KEY, (2, 4, FEATURES), jnp.float32)
    mean, cov = model(x)
    assert_close(mean, module(x), 1e-6)
    # Cov[(x E^T)_tv, (x E^T)_su] = [v = u] sum_d x_td x_sd Var[E_vd] for independent entries.
    variance = model.beliefs["embed"]["embedding"].variance
    expected = jnp.einsum("btd,bsd,vd,vu->btvsu", x, x, variance, jnp.eye(ROWS))
    assert_close(cov.to_dense(), expected, 1e-6)


@pytest.mark.usefixtures("ranks_of_a_user")
def test_models_of_tables_have_the_moments_of_their_rows():
    embed = mj.Bayesian(nnx.Embed(ROWS, 4, rngs=nnx.Rngs(0)))
    places = mj.Bayesian(mj.nn.LearnedPositions(8, 4, rngs=nnx.Rngs(1)))
    own = places.beliefs["table"]["embedding"].rows(np.arange(len(IDS)))

    @jax.jit
    def both(ids):
        """Triples of actual, expected and tolerance."""
        mean, cov = embed(ids[None])
        single, single_cov = mj.embedding(ids, embed.beliefs["embedding"], mj.Separable)
        moved, moved_cov = places((mean, cov))
        return [
            (mean[0], single, 1e-10),
            (cov.tokens[0], single_cov.tokens, 1e-6),
            (moved[0], single + own.mean, 1e-10),
            (moved_cov.variance()[0], cov.variance()[0] + own.variance, 1e-6),
        ]

    for actual, expected, tolerance in both(IDS):
        assert_close(actual, expected, tolerance)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_ids_out_of_range_are_nan_in_compiled_code(structure):
    tables = [TABLES[family] for family in (mj.posterior.Point, mj.posterior.Factorized)]

    @jax.jit
    def look_up(ids):
        found = [mj.embedding(ids, table, structure) for table in tables]
        return [(mean, cov.variance()) for mean, cov in found]

    for table, moments in zip(tables, look_up(np.array([-1, 2, ROWS])), strict=True):
        mean, variance = map(np.asarray, moments)
        assert_close(mean[1], table.mean[2])
        assert np.isnan(mean[[0, 2]]).all()
        assert not (variance[[0, 2]] > 0).any()


TABLE = mj.posterior.Factorized(jnp.zeros((ROWS, 2)), jnp.ones((ROWS, 2)))


def look_up(*ids, table=TABLE, structure=mj.Full):
    return mj.embedding(jnp.array(ids), table, structure)


def positions(count):
    return mj.nn.LearnedPositions(count, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: look_up(5), ValueError, "from 0 to 4"),
        (lambda: look_up(-1), ValueError, "vocabulary"),
        (lambda: look_up(1.0), ValueError, "integers"),
        (lambda: look_up([0, 0], [0, 0]), ValueError, "for a batch jax.vmap"),
        (lambda: mj.embedding(jnp.zeros(0, int), TABLE, mj.Full), ValueError, "one token"),
        (lambda: look_up(0, table=jnp.ones((3, 2))), TypeError, "Point"),
        (lambda: look_up(0, structure="Full"), TypeError, "structure"),
        (lambda: mj.embedding([0], TABLE, mj.Full), ValueError, "Got list. Use jnp.asarray"),
        (lambda: positions(3)(jnp.ones((4, 2))), ValueError, "Got 4 tokens"),
    ],
)
def test_messages(call, error, words):
    with pytest.raises(error, match=words):
        call()
