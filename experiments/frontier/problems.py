"""Problems and their truths, from the output folder where they are there already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from experiments import data
from experiments.frontier import storage, variational
from experiments.frontier.problem import Problem, Spec
from experiments.frontier.random_posterior import random_problem
from experiments.frontier.storage import Store
from experiments.frontier.truth import Truth, sample
from experiments.training import fit


class Problems:
    """Makes what is missing in a folder, and reads what is not.

    `trained/NAME.npz` are case files for `accuracy`: the posterior, its inputs, and the truth once it
    has been sampled. `random/NAME.npz` hold the truth alone, for the posteriors come from the seed.

    Args:
      out: the folder.
      samples: networks drawn for a truth, or None for each network's own number.
      seed: of random posteriors, and of the draws.
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
        """The network and its inputs; trained now, if it has to be."""
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
        """Its sampled truth; sampled now, if it has to be."""
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
