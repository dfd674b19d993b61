"""The second table of the closure experiment: what users have without the library."""

import jax
import jax.numpy as jnp
from flax import nnx

import moment_jax as mj
from experiments import closure


def test_the_competitors_logits():
    network = mj.nn.VisionTransformer(
        image_size=4,
        patch_size=2,
        num_classes=3,
        num_features=4,
        num_heads=2,
        num_blocks=1,
        relative_scale=0.1,
        rngs=nnx.Rngs(0),
    )
    images = list(jax.random.normal(jax.random.key(0), (2, 4, 4)))
    keys = list(jax.random.split(jax.random.key(1), 2))
    with jax.numpy_rank_promotion("allow"):  # Flax's layers promote
        rows = closure._logits(network, images, keys, 2000)
    assert list(rows) == ["library", "linearised", *(f"{n} networks" for n in closure.NETWORKS)]
    assert rows["300 networks"]["mean_error"] < 0.2
    assert rows["library"]["sd_error"] < 0.1
    assert 0.5 < rows["linearised"]["sd_ratio"] < 2
    assert all(jnp.isfinite(jnp.asarray(list(row.values()))).all() for row in rows.values())
