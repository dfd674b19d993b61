"""Trained posteriors and sampled truths on disk, in the form of the case files of `accuracy`."""

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moment_jax as mj
from experiments import draws
from experiments.frontier.problem import Problem, Spec, factorized, tree_of
from experiments.frontier.truth import Sampled, Truth
from experiments.outputs import whole_file

Arrays = dict[str, np.ndarray]

SETTINGS = "settings"
# A block's beliefs in a case file, in the order of the leaves of `EncoderBlockParams`.
NAMES = (
    "Wq", "bq", "Wk", "bk", "Wv", "bv", "Wo", "bo", "ln1_g", "ln1_b",
    "Wf1", "bf1", "Wf2", "bf2", "ln2_g", "ln2_b",
)  # fmt: skip


class Store:
    """The `.npz` files of one folder, each with the settings that it was made with.

    A file of other settings, or one that cannot be read, counts as none: it is made anew.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Where the arrays of that name are."""
        return self.folder / f"{name}.npz"

    def load(self, name: str, settings: dict[str, Any]) -> Arrays | None:
        """The arrays, or None where there are none of these settings."""
        try:
            # numpy leaves a truncated file open that it has opened itself
            with self.path(name).open("rb") as file, np.load(file, allow_pickle=False) as stored:
                arrays = {key: stored[key] for key in stored.files}
            kept = json.loads(str(arrays.pop(SETTINGS)))
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
            return None
        return arrays if all(kept.get(key) == value for key, value in settings.items()) else None

    def save(self, name: str, settings: dict[str, Any], arrays: Arrays) -> None:
        """Write the arrays atomically."""
        with whole_file(self.path(name)) as temporary:
            stored: dict[str, Any] = {**arrays, SETTINGS: np.array(json.dumps(settings))}
            np.savez(temporary, **stored)


def posterior_settings(spec: Spec) -> dict[str, Any]:
    """The settings that a trained posterior depends on."""
    return {"network": dataclasses.asdict(spec) | {"samples": 0}}


def problem_arrays(problem: Problem) -> Arrays:
    """A problem as the arrays of a case file."""
    arrays: Arrays = {
        "X": problem.inputs,
        "label": problem.labels,
        "heads": np.array(problem.spec.num_heads),
        "head_W": problem.head[0].T,
        "head_b": problem.head[1],
    }
    for i, block in enumerate(problem.each_block()):
        for name, belief in zip(NAMES, draws.beliefs(block), strict=True):
            arrays[f"L{i}_{name}"] = np.asarray(belief.mean).T
            arrays[f"L{i}_{name}_s"] = np.sqrt(np.asarray(belief.marginal_variance())).T
    return arrays


def problem_of(spec: Spec, arrays: Arrays) -> Problem:
    """The problem that these arrays are of."""

    def belief(name: str) -> mj.posterior.Factorized:
        return factorized(arrays[name].T, arrays[f"{name}_s"].T)

    form = jax.tree.structure(tree_of(1, 1, *[lambda *sizes: 0] * 3))
    each = [
        jax.tree.unflatten(form, [belief(f"L{i}_{name}") for name in NAMES])
        for i in range(spec.num_blocks)
    ]
    blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    head = arrays["head_W"].T, arrays["head_b"]
    return Problem(spec, blocks, head, arrays["X"], arrays["label"])


def truth_arrays(truth: Truth) -> Arrays:
    """A truth as the arrays of a case file, with the standard errors and the subsamples' errors."""
    arrays: Arrays = {
        "subsamples": truth.sizes,
        "logit_cov": truth.logit_cov,
        "probabilities": truth.probabilities,
    }
    for prefix, moments, curve in (
        ("mc", truth.tokens, truth.token_curve),
        ("logit", truth.logits, truth.logit_curve),
    ):
        arrays |= {
            f"{prefix}_mean": moments.mean,
            f"{prefix}_std": moments.sd,
            f"{prefix}_mean_error": moments.mean_error,
            f"{prefix}_std_error": moments.sd_error,
            f"{prefix}_subsampled_error": curve,
        }
    return arrays


def truth_of(arrays: Arrays) -> Truth:
    """The truth that these arrays are of."""

    def moments(prefix: str) -> Sampled:
        parts = ("mean", "std", "mean_error", "std_error")
        return Sampled(*(arrays[f"{prefix}_{part}"] for part in parts))

    curves = (arrays[f"{prefix}_subsampled_error"] for prefix in ("mc", "logit"))
    each = (arrays[name] for name in ("logit_cov", "probabilities", "subsamples"))
    return Truth(moments("mc"), moments("logit"), *each, *curves)
