"""Call a saved function: `python call_exported.py FILE IMAGES.npy PROBABILITIES.npy`; JAX is enough."""

import sys
from pathlib import Path

import numpy as np
from jax import export


def main(file: str, inputs: str, outputs: str) -> None:
    """Load the function, call it, save what it gives."""
    function = export.deserialize(bytearray(Path(file).read_bytes()))
    np.save(outputs, np.asarray(function.call(np.load(inputs))))
    if "moment_jax" in sys.modules:
        raise RuntimeError("the saved function is to run without moment_jax")


if __name__ == "__main__":
    main(*sys.argv[1:])
