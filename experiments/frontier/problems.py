"""Problems and their truths: random posteriors, and trained ones kept in the output folder."""

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import data, draws
from experiments.frontier import variational
from experiments.frontier.problem import Problem, Spec, factorized, random_problem, tree_of
from experiments.frontier.truth import Sampled, Truth, sample
from experiments.outputs import whole_file
from experiments.training import fit

Arrays = dict[str, np.ndarray]

SETTINGS = "settings"
# A block's beliefs in a case file, in the order of the leaves of `EncoderBlockParams`.
NAMES = (
    "Wq", "bq", "Wk", "bk", "Wv", "bv", "Wo", "bo", "ln1_g", "ln1_b",
    "Wf1", "bf1", "Wf2", "bf2", "ln2_g", "ln2_b",
)  # fmt: skip
OUTPUTS = ("mc", "logit")  # the prefixes of a case file's truth, of tokens and logits


class Problems:
    """Reads problems and truths from a folder, and makes the missing ones.

    `trained/NAME.npz` are case files for `accuracy`: the posterior, its inputs, and the truth once it
    has been sampled. `random/NAME.npz` hold the truth alone, for the posteriors come from the seed.
    """

    def __init__(self, out: Path, samples: int | None, seed: int) -> None:
        self.out = out
        self.samples = samples
        self.seed = seed

    def problem(self, spec: Spec) -> Problem:
        """The network and its inputs; trained now if necessary."""
        if spec.training is None:
            return random_problem(spec, self.seed)
        arrays = load(self._path(spec), _settings(spec))
        if arrays is not None:
            return problem_of(spec, arrays)
        digits, seed = data.load(), spec.training.seed
        task = variational.task(spec, spec.training, digits)
        state = task.start(variational.initial(spec, seed), jax.random.key(seed))
        problem = variational.finished(spec, fit(task, state).params, digits)
        save(self._path(spec), _settings(spec), problem_arrays(problem))
        return problem

    def truth(self, problem: Problem) -> Truth:
        """Its sampled truth; sampled now if necessary."""
        spec = problem.spec
        samples = spec.samples if self.samples is None else self.samples
        made = {"samples": samples, "seed": self.seed, "fields": list(Truth._fields)}
        settings = _settings(spec) | {"truth": made}
        arrays = load(self._path(spec), settings)
        if arrays is not None:
            return truth_of(arrays)
        truth = sample(problem, samples, self.seed)
        posterior = {} if spec.training is None else problem_arrays(problem)
        save(self._path(spec), settings, posterior | truth_arrays(truth))
        return truth

    def _path(self, spec: Spec) -> Path:
        return self.out / ("random" if spec.training is None else "trained") / f"{spec.name}.npz"


def _settings(spec: Spec) -> dict[str, Any]:
    """The settings that a trained posterior depends on."""
    return {"network": dataclasses.asdict(spec) | {"samples": 0}}


def load(path: Path, settings: dict[str, Any]) -> Arrays | None:
    """The arrays, or None where there is no readable file of these settings."""
    try:
        # numpy leaves a truncated file open that it has opened itself
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in stored.files}
        kept = json.loads(str(arrays.pop(SETTINGS)))
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    return arrays if all(kept.get(key) == value for key, value in settings.items()) else None


def save(path: Path, settings: dict[str, Any], arrays: Arrays) -> None:
    """Write the arrays atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        stored: dict[str, Any] = {**arrays, SETTINGS: np.array(json.dumps(settings))}
        np.savez(temporary, **stored)


def problem_arrays(problem: Problem) -> Arrays:
    """A problem as the arrays of a case file."""
    arrays: Arrays = {
        "X": np.asarray(problem.inputs),
        "label": problem.labels,
        "heads": np.array(problem.spec.num_heads),
        "head_W": np.asarray(problem.head[0]).T,
        "head_b": np.asarray(problem.head[1]),
    }
    for i, block in enumerate(problem.each_block()):
        for name, belief in zip(NAMES, draws.beliefs(block), strict=True):
            arrays[f"L{i}_{name}"] = np.asarray(belief.mean).T
            arrays[f"L{i}_{name}_s"] = np.sqrt(np.asarray(belief.marginal_variance())).T
    return arrays


def problem_of(spec: Spec, arrays: Arrays) -> Problem:
    """The problem that these arrays are of."""

    def stacked(name: str) -> Any:
        return np.stack([arrays[f"L{i}_{name}"].T for i in range(spec.num_blocks)])

    form = jax.tree.structure(tree_of(spec, *[lambda *sizes: 0] * 3))
    beliefs = [factorized(stacked(name), stacked(f"{name}_s")) for name in NAMES]
    head = jnp.asarray(arrays["head_W"].T), jnp.asarray(arrays["head_b"])
    inputs, labels = jnp.asarray(arrays["X"]), arrays["label"]
    return Problem(spec, jax.tree.unflatten(form, beliefs), head, inputs, labels)


def truth_arrays(truth: Truth) -> Arrays:
    """A truth as the arrays of a case file, with the standard errors."""
    arrays: Arrays = {name: getattr(truth, name) for name in Truth._fields[2:]}
    for prefix, output in zip(OUTPUTS, truth[:2], strict=True):
        arrays |= {f"{prefix}_{name}": array for name, array in output._asdict().items()}
    return arrays


def truth_of(arrays: Arrays) -> Truth:
    """The truth that these arrays are of."""
    tokens, logits = (
        Sampled(*(arrays[f"{prefix}_{name}"] for name in Sampled._fields)) for prefix in OUTPUTS
    )
    return Truth(tokens, logits, *(arrays[name] for name in Truth._fields[2:]))
