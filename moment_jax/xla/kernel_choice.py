"""Whether attention takes a kernel of Pallas or the compiler's program, and what holds inside of one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Literal

import jax

Path = Literal["xla", "tpu", "interpret"]

_now = threading.local()


@contextlib.contextmanager
def kernels(path: Path | None) -> Iterator[None]:
    """What is traced inside takes this path; a function that `jit` has traced before stays as it is.

    Args:
      path: "xla" for the compiler's program, which has derivatives of every order and mode (a kernel has
        reverse mode alone, once); "tpu" for the kernel, where one process compiles for another's TPU or
        every device runs the program alone; "interpret" for the kernel run by XLA, for tests; None for
        the choice of `kernel_path`.
    """
    before, _now.path = getattr(_now, "path", None), path
    try:
        yield
    finally:
        _now.path = before


def kernel_path() -> Path:
    """The path that `kernels` names, or else the kernel where the only device is a TPU.

    With several devices the compiler may have to partition the program, and it leaves kernels whole.
    """
    path: Path | None = getattr(_now, "path", None)
    if path is not None:
        return path
    return "tpu" if jax.default_backend() == "tpu" and jax.device_count() == 1 else "xla"


@contextlib.contextmanager
def inside_a_kernel() -> Iterator[None]:
    """While the body of a kernel is traced: its arrays are on the chip, and its products in float32.

    A setting of `jax_default_matmul_precision` is kept: one pass of bfloat16, or float32.
    """
    # Mosaic knows no precision between them.
    asked = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    low = asked in ("bfloat16", "default", "fastest")
    before, _now.inside = on_chip(), True
    try:
        with jax.default_matmul_precision("default" if low else "highest"):
            yield
    finally:
        _now.inside = before


def on_chip() -> bool:
    """Whether the body of a kernel is being traced."""
    return getattr(_now, "inside", False)
