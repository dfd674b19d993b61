"""One train step compiled for a TPU that is not here; `tpu` starts it as a separate process.

`python -m experiments.scale.tpu_program NETWORK STRUCTURE TOPOLOGY` prints a JSON object.
"""

import json
import os
import sys
from typing import Any

# What libtpu asks of a machine without a TPU; it reads them when it is loaded.
for name, value in {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
}.items():
    os.environ[name] = value

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402

import moment_jax as mj  # noqa: E402
from experiments.scale.compiled import compile_step  # noqa: E402
from experiments.scale.layout import Layout  # noqa: E402
from experiments.scale.networks import SIZES  # noqa: E402
from experiments.scale.work import roofline  # noqa: E402

COLUMNS = 2  # chips that share heads and hidden units


def main(arguments: list[str]) -> dict[str, Any]:
    """The record of one compilation."""
    network, structure, topology = arguments
    jax.config.update("jax_exec_time_optimization_effort", -1.0)  # 0 takes several times as long
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = mj.parallel.make_mesh(None, COLUMNS, devices=devices)
    record = compile_step(SIZES[network], structure, Layout(mesh))
    return {"network": network, "topology": topology, **record, **roofline(record)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
