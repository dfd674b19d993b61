"""Part `export`: a predictive function as one file for CPU, CUDA and TPU, for any size of batch."""

import importlib.util
import subprocess
import sys
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

PLATFORMS = ("cpu", "cuda", "tpu")
BATCHES = (3, 8)
IMAGE_SIZE = 8
TOLERANCE = 1e-6
FILE = "predictive.jax"


def can_save() -> bool:
    """Whether there is the package with which JAX writes and reads such files."""
    return importlib.util.find_spec("flatbuffers") is not None


def predictive(network: Any) -> Callable[[Array], Array]:
    """Images (N, height, width) -> probabilities of the classes (N, C), the weights within."""

    def probabilities(images: Array) -> Array:
        return jax.vmap(mj.objectives.class_probabilities)(*network(images))

    return probabilities


def small_network(structure: str) -> mj.nn.VisionTransformer:
    """A network of the main job's kind, untrained."""
    return mj.nn.VisionTransformer(
        image_size=IMAGE_SIZE,
        patch_size=2,
        num_classes=10,
        num_features=16,
        num_blocks=1,
        rngs=nnx.Rngs(0),
        structure=mj.STRUCTURES[structure],
    )


def exported(function: Callable[[Array], Array], image_size: int) -> export.Exported:
    """The function of images, (b, height, width) with any b, lowered for all platforms."""
    (count,) = export.symbolic_shape("b")
    images = jax.ShapeDtypeStruct((count, image_size, image_size), jnp.float32)
    return export.export(jax.jit(function), platforms=PLATFORMS)(images)


def run(structure: str, out: Path | None) -> dict[str, Any]:
    """Export, save, load in a process that knows no `moment_jax`, and compare with the direct call."""
    function = predictive(small_network(structure))
    whole = exported(function, IMAGE_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / FILE if out is None else out / FILE
        with whole_file(file) as temporary:
            temporary.write_bytes(whole.serialize())
        size = file.stat().st_size
        errors = {}
        for count in BATCHES:
            images = np.asarray(
                jax.random.uniform(jax.random.key(count), (count, IMAGE_SIZE, IMAGE_SIZE)),
                np.float32,
            )
            loaded = call_elsewhere(file, images, Path(folder))
            errors[str(count)] = float(np.max(np.abs(loaded - jax.jit(function)(images))))
    record = {
        "structure": structure,
        "platforms": list(whole.platforms),
        "bytes": size,
        "differences": errors,
        "file": None if out is None else str(file),
    }
    sizes = ", ".join(f"{error:.1e} at {count} images" for count, error in errors.items())
    print(f"export for {', '.join(whole.platforms)}: {size / 1e3:.0f} kB; loaded - direct: {sizes}")
    if not max(errors.values()) < TOLERANCE:
        raise PartError(f"export: the loaded function differs from the direct call by {sizes}")
    return record


def call_elsewhere(file: Path, images: np.ndarray, folder: Path) -> np.ndarray:
    """What the saved function gives in a fresh process."""
    inputs, outputs = folder / "images.npy", folder / "probabilities.npy"
    np.save(inputs, images)
    script = Path(__file__).with_name("call_exported.py")
    done = subprocess.run(
        [sys.executable, str(script), str(file), str(inputs), str(outputs)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise PartError(f"export: the saved function failed when loaded: {done.stderr[-800:]}")
    return np.asarray(np.load(outputs))
