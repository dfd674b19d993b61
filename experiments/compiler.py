"""Keep XLA for CPU off a kind of fusion that some of its versions compile wrongly.

With jaxlib 0.10.2 to 0.12, `jnp.sum(x @ constant, axis=0)` gives garbage; without the fusions of the YNN
library it is right.
"""

from __future__ import annotations

import os
from importlib.metadata import version

FLAG = "--xla_cpu_experimental_ynn_fusion_type="


def without_faulty_fusions() -> None:
    """Set the flag where this jaxlib needs and knows it; call it before JAX computes anything."""
    parts = [*version("jaxlib").split("."), "0", "0"][:3]
    numbers = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
    given = os.environ.get("XLA_FLAGS", "")
    if (0, 10, 2) <= numbers < (0, 13, 0) and FLAG.split("=")[0] not in given:
        os.environ["XLA_FLAGS"] = f"{given} {FLAG}".strip()
