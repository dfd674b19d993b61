"""Frozen feature correlations: statistics of batches are stored, and read by every later pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import tiny_vision

pytestmark = pytest.mark.slow

T, D, B = 5, 4, 3


def mlp(*widths):
    return mj.nn.MLP([3, *(widths or (D,)), 2], rngs=nnx.Rngs(0))


def inputs(count, seed=0):
    return jax.random.normal(jax.random.key(seed), (count, T, 3))


NETWORK, BATCHES = mlp(), [inputs(4), inputs(4, 1)]


@pytest.fixture(scope="module")
def frozen():
    return mj.nn.freeze_features(NETWORK, BATCHES)


run = nnx.jit(lambda network, *x: network(*x))


def close(got, want, rtol=2e-5):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * np.abs(other).max())


def test_frozen_on_a_batch_it_gives_that_batchs_own_moments():
    """Through the scan over blocks and `remat`."""
    network = tiny_vision(num_blocks=2, norm_first=False, remat=True, structure=mj.BatchSeparable)
    images = jax.random.normal(jax.random.key(0), (B, 4, 4))
    frozen = mj.nn.freeze_features(network, [images])

    @nnx.jit
    def both(network):
        def total(network):
            moments = network(images)
            return sum(jnp.sum(part**2) for part in moments), moments

        return nnx.grad(total, has_aux=True)(network)

    slopes, moments = both(frozen)
    close(moments, run(network, images))
    found = jax.tree.leaves(nnx.state(slopes, nnx.Param))
    assert all(jnp.all(jnp.isfinite(slope)) for slope in found)
    assert sum(bool(jnp.any(slope != 0)) for slope in found) > len(found) // 2


class Own(nnx.Module):
    """A user's module with several parts and inputs."""

    def __init__(self):
        settings = {"structure": mj.BatchSeparable, "rngs": nnx.Rngs(0)}
        self.embed = mj.nn.Dense(3, D, **settings)
        self.attention = mj.nn.MultiHeadAttention(D, 2, **settings)

    def __call__(self, x, shift):
        mean, cov = self.embed(x)
        return self.attention(mean + shift, cov)


def test_moments_and_gradients_of_a_module_of_ones_own():
    """Each part has statistics of its own, and the structure passes between them."""
    network, x, shift = Own(), inputs(B), jnp.ones((B, T, D))
    frozen = mj.nn.freeze_features(network, [(x, shift)])

    @nnx.jit
    def slopes(network):
        def total(network):
            mean, cov = network(x, shift)
            return jnp.sum(cov.variance()), (mean, cov)

        return nnx.grad(total, has_aux=True)(network)

    grads, (mean, cov) = slopes(frozen)
    own_mean, own = run(network, x, shift)
    assert isinstance(cov, mj.FrozenSeparable)
    close(mean, own_mean)
    close((cov.variance(), cov.token_correlation), (own.variance(), own.token_correlation))
    close(cov.feature_correlation, own.feature_correlation)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nnx.to_pure_dict(grads)))


def test_a_prediction_depends_on_no_other_input_of_its_batch(frozen):
    few = inputs(2, 2)
    together = run(frozen, jnp.concatenate([few, inputs(6, 3)]))
    close(jax.tree.map(lambda leaf: leaf[:2], together), run(frozen, few))
    close(run(frozen, few[0]), jax.tree.map(lambda leaf: leaf[0], together))


def statistics(network):
    return nnx.to_pure_dict(nnx.state(network, mj.nn.FeatureStatistics))


def test_statistics_are_averaged_over_the_batches(frozen):
    each = [statistics(mj.nn.freeze_features(NETWORK, [batch])) for batch in BATCHES]
    close(statistics(frozen), jax.tree.map(lambda a, b: (a + b) / 2, *each))


def test_statistics_are_state_and_no_parameters(frozen):
    assert jax.tree.leaves(statistics(frozen))
    assert not jax.tree.leaves(statistics(NETWORK))
    before, after = (nnx.to_pure_dict(nnx.state(n, nnx.Param)) for n in (NETWORK, frozen))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert frozen.layers[0].kernel.mean is NETWORK.layers[0].kernel.mean
    close(run(nnx.merge(*nnx.split(frozen)), inputs(2)), run(frozen, inputs(2)))


def test_no_product_of_feature_matrices_is_left_for_a_sequence():
    """The extra cost of a batch of 12 over one of 6, by XLA's count."""

    def flops(network, count):
        graph, state = nnx.split(network)
        last = jax.jit(lambda state: nnx.merge(graph, state)(inputs(count))[1].variance())
        return last.lower(state).cost_analysis()["flops"]

    own = mlp(64, 64)
    frozen = mj.nn.freeze_features(own, [inputs(2)])
    each = [flops(network, 12) - flops(network, 6) for network in (frozen, own)]
    assert each[0] < 0.35 * each[1]


def test_a_module_without_statistics_is_refused():
    network = mj.nn.with_structure(NETWORK, mj.FrozenSeparable)
    with pytest.raises(ValueError, match="freeze_features"):
        network(inputs(2))


def test_statistics_of_another_model_are_refused(frozen):
    other = nnx.clone(frozen)
    values = other.feature_statistics.get_value()
    wider = tuple(jax.tree.map(lambda leaf: jnp.zeros((*leaf.shape, 2)), values))
    for others in (values[:-1], (*values, values[0]), wider):
        other.feature_statistics = mj.nn.FeatureStatistics(others)
        with pytest.raises(ValueError, match="this very model"):
            jax.eval_shape(other, inputs(2))


def test_where_no_statistics_are_the_structure_is_refused():
    cov = mj.FrozenSeparable.zeros((T, D))
    with pytest.raises(ValueError, match="outside"):
        cov.map_features(jnp.ones((D, D)))

    class Scanned(mj.nn.Dense):
        def __call__(self, x):
            def layer(mean, cov):
                return jax.jit(lambda m, c: mj.dense(m, c, self.params))(mean, cov)

            return self._over_batch(layer, (x, None))

    with pytest.raises(ValueError, match="another transformation"):
        mj.nn.freeze_features(Scanned(3, D, rngs=nnx.Rngs(0)), [inputs(2)])


def test_no_input_and_a_module_called_twice_are_refused():
    with pytest.raises(ValueError, match="needs inputs"):
        mj.nn.freeze_features(NETWORK, [])

    class Twice(nnx.Module):
        def __init__(self):
            self.layer = mj.nn.Dense(D, D, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.layer(*self.layer(x))

    with pytest.raises(ValueError, match="second time"):
        mj.nn.freeze_features(Twice(), [jnp.ones((2, T, D))])
