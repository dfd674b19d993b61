"""Part `export`: a predictive function as one file for CPU, CUDA and TPU, for any size of batch."""

import argparse
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, export

import moment_jax as mj
from experiments.command_line import PartError
from experiments.outputs import whole_file
from experiments.scale import fresh

PLATFORMS = ("cpu", "cuda", "tpu")
BATCHES = (3, 8)
IMAGE_SIZE = 8
TOLERANCE = 1e-6
FILE = "predictive.jax"
# `python -c CALL FILE IMAGES.npy PROBABILITIES.npy`; JAX is enough.
CALL = """
import sys
import numpy as np
from jax import export
file, inputs, outputs = sys.argv[1:]
function = export.deserialize(bytearray(open(file, "rb").read()))
np.save(outputs, np.asarray(function.call(np.load(inputs))))
assert "moment_jax" not in sys.modules, "the saved function is to run without moment_jax"
"""


def predictive() -> Callable[[Array], Array]:
    """Images (N, height, width) -> class probabilities (N, C) of an untrained network."""
    network = mj.nn.VisionTransformer(
        image_size=IMAGE_SIZE, patch_size=2, num_classes=10, num_features=16, num_blocks=1,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    model = mj.Bayesian(network, mj.Categorical())
    return jax.jit(lambda images: model.likelihood(model(images)).probs)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Export, save, load in a process that knows no `moment_jax`, and compare with the direct call."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise PartError("needs the package flatbuffers; pip install 'moment_jax[experiments]'")
    function: Any = predictive()
    (count,) = export.symbolic_shape("b")
    images = jax.ShapeDtypeStruct((count, IMAGE_SIZE, IMAGE_SIZE), jnp.float32)
    whole = export.export(function, platforms=PLATFORMS)(images)
    with tempfile.TemporaryDirectory() as folder:
        file = (args.out or Path(folder)) / FILE
        with whole_file(file) as temporary:
            temporary.write_bytes(whole.serialize())
        size = file.stat().st_size
        errors = {}
        for number in BATCHES:
            shape = number, IMAGE_SIZE, IMAGE_SIZE
            given = np.asarray(jax.random.uniform(jax.random.key(number), shape), np.float32)
            inputs, outputs = Path(folder) / "images.npy", Path(folder) / "probabilities.npy"
            np.save(inputs, given)
            fresh(["-c", CALL, str(file.absolute()), str(inputs), str(outputs)])
            errors[str(number)] = float(np.max(np.abs(np.load(outputs) - function(given))))
    sizes = ", ".join(f"{error:.1e} at {count} images" for count, error in errors.items())
    print(f"export for {', '.join(whole.platforms)}: {size / 1e3:.0f} kB; loaded - direct: {sizes}")
    if not max(errors.values()) < TOLERANCE:
        raise PartError(f"the loaded function differs from the direct call by {sizes}")
    kept = None if args.out is None else str(file)
    return {"platforms": whole.platforms, "bytes": size, "differences": errors, "file": kept}
