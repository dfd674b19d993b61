"""Tokens on several devices: the same moments, losses and gradients as on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import moment_jax as mj
from tests.builders import ALL_STRUCTURES

pytestmark = pytest.mark.slow

SPLIT = [structure for structure in ALL_STRUCTURES if structure is not mj.Full]


def test_eight_devices_compute_what_one_does():
    """Data, heads and tokens split; `experiments scale --part devices` does every structure."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_ENABLE_X64": "1",
        "PYTHONWARNINGS": "error",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.sequence_program"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    differences = {name: value for name, value in results.items() if not name.startswith("whole")}
    assert len(differences) == 5
    assert all(value < 1e-10 for value in differences.values()), results
    # arrays of all tokens by all tokens on one device, in the compiled program
    assert results["whole arrays alone"] > 0
    assert results["whole arrays"] == 0


@pytest.mark.parametrize("structure", SPLIT)
def test_rows_lie_over_sequence(structure):
    cov = jax.vmap(lambda _: structure.zeros((3, 4)))(jnp.arange(2))
    specs = mj.parallel.moment_specs(cov, sequence=True)
    leaves = zip(jax.tree.leaves(cov), jax.tree.leaves(specs), strict=True)
    by_tokens = [spec[1] == "sequence" for leaf, spec in leaves if leaf.shape[1] == 3]
    assert all(by_tokens)
    assert len(by_tokens) == {mj.TokenCorrelated: 2, mj.Separable: 2}.get(structure, 1)


def test_axes_of_the_mesh():
    devices = jax.devices()[:1]
    assert mj.parallel.make_mesh(1, 1, devices=devices).axis_names == ("data", "model")
    mesh = mj.parallel.make_mesh(sequence=1, devices=devices)
    assert mesh.axis_names == ("data", "sequence", "model")


def test_messages():
    plain = mj.parallel.make_mesh(1, 1, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="data \\* model \\* sequence == 1"):
        mj.parallel.make_mesh(1, 1, sequence=3, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="with an axis `sequence`"):
        mj.parallel.by_sequence(jnp.sin, plain)
    with pytest.raises(ValueError, match="with an axis `sequence`"):
        mj.parallel.shard_sequences(jnp.ones((2, 3)), plain)
    with pytest.raises(TypeError, match="Got Full"):
        mj.parallel.moment_specs(mj.Full.zeros((2, 2)), batched=False, sequence=True)
    mesh = mj.parallel.make_mesh(1, 1, sequence=1, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="number of tokens T"):
        mj.parallel.shard_sequences(jnp.ones(2), mesh)
    placed = mj.parallel.shard_sequences({"x": jnp.ones((2, 3, 4))}, mesh)
    assert placed["x"].sharding.mesh == mesh
