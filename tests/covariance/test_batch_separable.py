"""`BatchSeparable` is `Separable` without a batch; in a batch, the feature correlation is shared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import assert_close, random_block

pytestmark = pytest.mark.slow

BATCH, TOKENS, FEATURES, HEADS = 3, 5, 16, 2  # more features than `NARROW`
KEY = jax.random.key(0)

Moments = tuple[jax.Array, Any]
Layer = Callable[[type[mj.Covariance], jax.Array, mj.EncoderBlockParams], Moments]


@partial(jax.jit, static_argnums=0)
def block(structure: type[mj.Covariance], x: jax.Array, params: mj.EncoderBlockParams) -> Moments:
    """An encoder block and the mean over the tokens."""
    mean, cov = x, structure.independent(0.01 * jnp.ones(x.shape, x.dtype))
    mean, cov = mj.encoder_block(
        mean, cov, params, num_heads=HEADS, norm_first=True, activation=mj.gelu
    )
    return mj.mean_pool(mean, cov)


@partial(jax.jit, static_argnums=0)
def attended(
    structure: type[mj.Covariance], x: jax.Array, params: mj.EncoderBlockParams
) -> Moments:
    """Attention, which has every use of a family's covariance, and the mean over the tokens."""
    cov = structure.independent(0.01 * jnp.ones(x.shape, x.dtype))
    return mj.mean_pool(*mj.attention(x, cov, params.attention, num_heads=HEADS))


@partial(jax.jit, static_argnums=(0, 3))
def in_batch(
    structure: type[mj.Covariance], x: jax.Array, params: Any, layer: Layer = block
) -> Moments:
    return jax.vmap(lambda one: layer(structure, one, params), axis_name="batch")(x)


@jax.jit
def with_slopes(x: jax.Array, params: Any) -> tuple[jax.Array, Moments]:
    """Slopes of the first sequence's variance in the inputs of all, and the moments of all."""

    def variance(x: jax.Array) -> tuple[jax.Array, Moments]:
        moments = in_batch(mj.BatchSeparable, x, params, attended)
        return jnp.sum(moments[1].variance()[0]), moments

    return jax.grad(variance, has_aux=True)(x)


@pytest.fixture
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (BATCH, TOKENS, FEATURES))


FACTORIZED, MATRIX_NORMAL = (
    random_block(KEY, FEATURES, 2 * FEATURES, family=family)
    for family in (mj.posterior.Factorized, mj.posterior.MatrixNormal)
)


@pytest.mark.parametrize(
    ("params", "layer", "moments"),
    [
        (FACTORIZED, block, lambda *given: in_batch(mj.BatchSeparable, *given)),
        (MATRIX_NORMAL, attended, lambda *given: with_slopes(*given)[1]),  # compiled anyway
    ],
)
def test_a_batch_of_equal_sequences_is_separable(
    x: jax.Array,
    params: mj.EncoderBlockParams,
    layer: Layer,
    moments: Callable[[jax.Array, Any], Moments],
) -> None:
    mean, cov = layer(mj.Separable, x[0], params)
    shared_mean, shared = moments(jnp.broadcast_to(x[0], x.shape), params)
    for i in range(BATCH):
        assert_close(shared_mean[i], mean)
        assert_close(shared.variance()[i], cov.variance())
        assert_close(shared.feature_correlation[i], cov.feature_correlation)


def test_without_a_batch_it_is_separable(x: jax.Array) -> None:
    """Or after `own`, which gives each sequence its own features."""
    mean, cov = block(mj.Separable, x[0], FACTORIZED)
    own_mean, own = block(mj.BatchSeparable, x[0], FACTORIZED)
    assert isinstance(own, mj.BatchSeparable)
    assert type(own.own()) is mj.Separable
    assert_close(own_mean, mean)
    for same in (own, own.own()):
        assert_close(same.to_dense(), cov.to_dense())


def test_sequences_that_differ_in_the_size_of_their_noise_keep_it(x: jax.Array) -> None:
    params = random_block(KEY, FEATURES, 2 * FEATURES, family=mj.posterior.Point)
    sizes = jnp.array([0.01, 0.1, 1.0])

    def run(structure: type[mj.Covariance]) -> Any:
        def one(size: jax.Array) -> Any:
            cov = structure.independent(size * jnp.ones_like(x[0]))
            mean, cov = mj.layer_norm(x[0], cov, params.norm1, order=1)
            return mj.mean_pool(*mj.dense(mean, cov, params.attention.query))[1]

        return jax.jit(jax.vmap(one, axis_name="batch"))(sizes)

    shared, own = run(mj.BatchSeparable), run(mj.Separable)
    assert_close(shared.variance(), own.variance())
    assert_close(shared.feature_correlation, own.feature_correlation)
    assert_close(
        shared.variance() / shared.variance()[:1],
        jnp.ones((1, 1, FEATURES)) * sizes[:, None, None] / 0.01,
    )


def test_matrices_of_the_features_are_multiplied_once_a_batch() -> None:
    features, params = 64, random_block(KEY, 64, 128)

    def flops(structure: type[mj.Covariance], batch: int) -> float:
        x = jnp.zeros((batch, 2, features))
        cost: Any = in_batch.lower(structure, x, params).cost_analysis()  # before any optimisation
        return float(cost["flops"])

    assert flops(mj.BatchSeparable, 4) < 0.5 * flops(mj.Separable, 4)


def test_gradients_pass_the_average(x: jax.Array) -> None:
    slopes, _ = with_slopes(x, MATRIX_NORMAL)
    assert bool(jnp.all(jnp.isfinite(slopes)))
    assert float(jnp.abs(slopes[1:]).max()) > 0  # a sequence's result depends on the others


def test_a_module_trains_in_it_and_predicts_in_separable(x: jax.Array) -> None:
    def encoder(structure: type[mj.Covariance]) -> mj.nn.Encoder:
        return mj.nn.Encoder(1, FEATURES, HEADS, structure=structure, rngs=nnx.Rngs(0))

    training = encoder(mj.BatchSeparable)
    predicting = mj.nn.with_structure(training, mj.Separable)
    run = nnx.jit(lambda model, x: model(x)[1])
    expected, cov = run(encoder(mj.Separable), x), run(predicting, x)
    assert type(cov) is mj.Separable
    assert_close(cov.variance(), expected.variance())
    assert type(nnx.eval_shape(run, training, x)) is mj.BatchSeparable
    for a, b in zip(
        jax.tree.leaves(nnx.state(training)), jax.tree.leaves(nnx.state(predicting)), strict=True
    ):
        assert a is b
    others = run(predicting, x.at[1:].multiply(3))  # a prediction depends on no other input
    assert_close(cov.variance()[:1], others.variance()[:1])
