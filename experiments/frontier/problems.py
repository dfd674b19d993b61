"""Problems and their truths: random posteriors, and trained ones kept in the output folder."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import data
from experiments.frontier import storage, variational
from experiments.frontier.problem import Problem, Spec, factorized, tree_of
from experiments.frontier.storage import Store
from experiments.frontier.truth import Truth, sample
from experiments.training import fit

RELATIVE_SD = 0.1
NUM_CLASSES = 10
# Spread of the means, and sd, of biases and of gains.
BIAS, BIAS_SD, GAIN, GAIN_SD = 0.02, 0.01, 0.1, 0.1
COMMON, OWN = 0.8, 0.6  # real tokens are alike: a part that they share, and their own


def random_problem(spec: Spec, seed: int) -> Problem:
    """Kernels N(0, 1/fan_in) with sd `RELATIVE_SD / sqrt(fan_in)`; inputs whose tokens are alike."""
    rng = np.random.default_rng([seed, spec.num_blocks, spec.num_tokens, spec.num_features])
    blocks, features = spec.num_blocks, spec.num_features

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def kernel(into: int, out: int) -> Any:
        mean = normal(blocks, into, out) / into**0.5
        return factorized(mean, np.full(mean.shape, RELATIVE_SD / into**0.5))

    def bias(size: int) -> Any:
        return factorized(BIAS * normal(blocks, size), np.full((blocks, size), BIAS_SD))

    def gain(size: int) -> Any:
        return factorized(1 + GAIN * normal(blocks, size), np.full((blocks, size), GAIN_SD))

    params = tree_of(features, spec.hidden_features, kernel, bias, gain)
    common = normal(spec.batch, 1, features)
    inputs = COMMON * common + OWN * normal(spec.batch, spec.num_tokens, features)
    head = normal(features, NUM_CLASSES) / np.float32(features**0.5)
    labels = rng.integers(0, NUM_CLASSES, spec.batch).astype(np.int32)
    return Problem(spec, params, (head, np.zeros(NUM_CLASSES, np.float32)), inputs, labels)


class Problems:
    """Reads problems and truths from a folder, and makes the missing ones.

    `trained/NAME.npz` are case files for `accuracy`: the posterior, its inputs, and the truth once it
    has been sampled. `random/NAME.npz` hold the truth alone, for the posteriors come from the seed.
    """

    def __init__(self, out: Path, samples: int | None, seed: int) -> None:
        self.out = out
        self.samples = samples
        self.seed = seed
        self.stores = {True: Store(out / "trained"), False: Store(out / "random")}

    def samples_of(self, spec: Spec) -> int:
        """Networks drawn for its truth."""
        return spec.samples if self.samples is None else self.samples

    def problem(self, spec: Spec) -> Problem:
        """The network and its inputs; trained now if necessary."""
        if spec.training is None:
            return random_problem(spec, self.seed)
        settings = storage.posterior_settings(spec)
        arrays = self.stores[True].load(spec.name, settings)
        if arrays is not None:
            return storage.problem_of(spec, arrays)
        problem = self._trained(spec)
        self.stores[True].save(spec.name, settings, storage.problem_arrays(problem))
        return problem

    def truth(self, problem: Problem) -> Truth:
        """Its sampled truth; sampled now if necessary."""
        spec = problem.spec
        store = self.stores[spec.training is not None]
        settings = storage.posterior_settings(spec)
        made = {"samples": self.samples_of(spec), "seed": self.seed, "fields": list(Truth._fields)}
        settings["truth"] = made
        arrays = store.load(spec.name, settings)
        if arrays is not None:
            return storage.truth_of(arrays)
        truth = sample(problem, self.samples_of(spec), self.seed)
        whole: dict[str, Any] = storage.truth_arrays(truth)
        if spec.training is not None:
            whole |= storage.problem_arrays(problem)
        store.save(spec.name, settings, whole)
        return truth

    def _trained(self, spec: Spec) -> Problem:
        assert spec.training is not None
        digits, seed = data.load(), spec.training.seed
        task = variational.task(spec, spec.training, digits)
        state = task.start(variational.initial(spec, seed), jax.random.key(seed))
        return variational.finished(spec, fit(task, state).params, digits)
