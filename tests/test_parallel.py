"""Where parameters and moments lie; what is computed there is in tests/experiments/test_scale.py."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import moment_jax as mj

SIZES = {"data": 2, "model": 4}


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        (("query", "kernel", "mean"), (8, 8), ("data", "model")),
        (("query", "kernel", "raw", "scale"), (8, 8), ("data", "model")),
        (("hidden", "bias", "mean"), (8,), ("model",)),
        (("out", "kernel", "mean"), (8, 6), ("model", "data")),
        (("out", "bias", "mean"), (8,), ()),
        (("query", "kernel", "raw", "scale"), (8,), ("model",)),  # OutputShared
        (("query", "kernel", "raw", "in_basis"), (8, 8), ("data", None)),
        (("query", "kernel", "raw", "out_basis"), (8, 8), ("model", None)),
        (("query", "kernel", "mean"), (7, 8), (None, "model")),  # 7 rows on 2 devices
        (("query", "kernel"), (8, 4, 2), ("data", "model", None)),  # Flax's, by heads
        (("weights", "query", "kernel", "mean"), (8, 4, 2), ("data", "model", None)),
        (("query", "bias"), (4, 2), ("model", None)),
        (("out", "kernel"), (4, 2, 8), ("model", None, "data")),
        (("table", "mean"), (12, 8), ("model", "data")),
        (("positions", "table", "mean"), (12, 8), ("data", "model")),
        (("query", "kernel", "prior_log_scale"), (), ()),
        (("norm1", "scale", "mean"), (8,), ()),
        ((0, "mu", "hidden", "kernel", "mean"), (8, 8), ("data", "model")),  # of an optimizer
        ((0, "count"), (), ()),
    ],
)
def test_rules(path, shape, expected):
    assert mj.parallel.partition_spec(path, shape, SIZES) == PartitionSpec(*expected)


@pytest.mark.parametrize("scan", [False, True])
def test_beliefs_lie_where_the_plain_network_does(scan, ranks_of_a_user):
    """Means and spreads alike, of stacked blocks too."""
    mesh = AbstractMesh((2, 4), ("data", "model"))
    network = mj.nn.TokenTransformer(6, 8, 8, num_blocks=2, scan=scan, rngs=nnx.Rngs(0))
    plain = mj.parallel.shardings(network, mesh)
    found = mj.parallel.shardings(mj.Bayesian(network, learn_prior=True), mesh)
    (path,) = (p for p in plain if p[-2:] == ("query", "kernel") and 1 not in p)
    assert plain[path].spec == PartitionSpec(*(None,) * scan, "data", "model", None)
    for path, place in plain.items():
        assert found["weights", *path, "mean"].spec == place.spec
        assert found["weights", *path, "raw", "scale"].spec == place.spec
        assert found["weights", *path, "prior_log_scale"].spec == PartitionSpec()


def test_messages():
    mesh = mj.parallel.make_mesh(1, 1, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="number of devices"):
        mj.parallel.make_mesh(3, 5)
    with pytest.raises(ValueError, match="at batch"):
        mj.parallel.shard_batch(jnp.ones(()), mesh)
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    mj.parallel.shard(model, mesh)
    assert model.kernel[...].sharding.mesh == mesh


@pytest.mark.slow
def test_explicit_axes_change_nothing():
    """Those of `jax.make_mesh`, which ask the plain network for nothing."""
    network = mj.nn.EncoderBlock(4, 2, hidden_features=4, rngs=nnx.Rngs(0))
    model = mj.Bayesian(network, structure=mj.Diagonal)
    x = jax.random.normal(jax.random.key(0), (2, 3, 4))
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    y = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    expected, found = (nnx.jit(lambda model, x: model(x).variance)(model, z) for z in (x, y))
    assert jnp.allclose(jnp.asarray(found), expected, rtol=1e-5)
