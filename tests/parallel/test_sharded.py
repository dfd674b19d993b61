"""Sharded is unsharded: loss, gradients, an update and moments, over data and model together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import moment_jax as mj
from tests.builders import ALL_STRUCTURES

SIZES = {"data": 2, "model": 4}


def test_eight_devices_are_one():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",  # of a process, which cannot be told later
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_ENABLE_X64": "1",
        "PYTHONWARNINGS": "error",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.program"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert len(results) == 2
    assert all(value < 1e-10 for value in results.values()), results


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        (("query", "kernel", "mean"), (8, 8), ("data", "model")),
        (("query", "kernel", "raw", "scale"), (8, 8), ("data", "model")),
        (("hidden", "bias", "mean"), (8,), ("model",)),
        (("out", "kernel", "mean"), (8, 6), ("model", "data")),
        (("out", "bias", "mean"), (8,), ()),
        (("query", "kernel", "raw", "scale"), (8,), ("model",)),  # OutputShared
        (("query", "kernel", "raw", "rows"), (8, 8), ("data", None)),
        (("query", "kernel", "raw", "columns"), (8, 8), ("model", None)),
        (("query", "kernel", "mean"), (7, 8), (None, "model")),  # 7 rows on 2 devices
        (("table", "mean"), (12, 8), ("model", "data")),
        (("query", "kernel", "prior_log_scale"), (), ()),
        (("norm1", "scale", "mean"), (8,), ()),
        ((0, "mu", "hidden", "kernel", "mean"), (8, 8), ("data", "model")),  # of an optimizer
        ((0, "count"), (), ()),
    ],
)
def test_rules(path, shape, expected):
    assert mj.parallel.partition_spec(path, shape, SIZES) == PartitionSpec(*expected)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_every_structure_says_where_its_fields_lie(structure):
    cov = jax.vmap(lambda _: structure.zeros((3, 4)))(jnp.arange(2))
    specs = mj.parallel.moment_specs(cov)
    for leaf, spec in zip(jax.tree.leaves(cov), jax.tree.leaves(specs), strict=True):
        assert len(spec) == leaf.ndim
        assert spec[0] == "data"


def test_messages():
    mesh = mj.parallel.make_mesh(1, 1, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="number of devices"):
        mj.parallel.make_mesh(3, 5)
    with pytest.raises(ValueError, match="at batch"):
        mj.parallel.shard_batch(jnp.ones(()), mesh)
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    mj.parallel.shard(model, mesh)
    assert model.kernel[...].sharding.mesh == mesh
