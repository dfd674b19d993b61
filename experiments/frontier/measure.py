"""Measure one network: a record for every structure, and for the alternatives to moments."""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moment_jax as mj
from experiments.frontier import passes
from experiments.frontier.passes import Moments
from experiments.frontier.problem import Problem
from experiments.frontier.truth import Sampled, Truth, sample
from experiments.programs import Program, Skip, check_memory, failure, interleaved
from experiments.propagation import full_gib

Record = dict[str, Any]
Programs = dict[str, Program]  # "forward" and "step"

BYTES = 4  # float32
ARRAY_GIB = 0.3  # of one array, beyond which a structure is skipped
MEMORY_GIB = 12.0  # of a program
SLOW = 30.0  # seconds for all timed runs of one kind
SAMPLED = (10, 30, 100, 300)  # numbers of sampled networks


def records_of(problem: Problem, truth: Truth, args: argparse.Namespace) -> list[Record]:
    """One record for each structure, in their order, and one for each alternative."""
    plain = {"forward": passes.plain_forward(problem), "step": passes.plain_step(problem)}
    records: dict[str, Record] = {}
    programs: dict[str, Programs] = {}
    for name in dict.fromkeys(args.structure):
        try:
            these = _programs(problem, mj.STRUCTURES[name])
            records[name] = _errors(these["forward"].run(), truth)
            programs[name] = these
        except Exception as error:  # keep the other structures' figures
            records[name] = failure(error)
    _add_costs(records, plain, programs, args.repeats)
    linear = passes.linearised(problem)
    output = Moments(*passes.linearised_tokens(problem), *linear.run())
    records["linearised"] = _errors(output, truth)
    only = {"forward": plain["forward"]}
    _add_costs(records, only, {"linearised": {"forward": linear}}, min(args.repeats, 5))
    for count in SAMPLED:
        drawn = sample(problem, count, args.seed + 1)
        output = Moments(*drawn.tokens[:2], drawn.logits.mean, drawn.logit_cov)
        # A sampled network costs a plain forward; drawing its weights is not counted.
        cost = {"forward": {"time_ratio": float(count), "memory_ratio": 1.0}}
        found = _errors(output, truth, drawn.probabilities)
        records[f"{count} sampled"] = found | {"cost": cost}
    for record in records.values():
        for name in ("tokens", "logits") if "cost" in record else ():
            figures = record[name]
            samples = sampled_networks(figures["rms_sd_error"], figures["resolution"], truth)
            ratio = samples / record["cost"]["forward"]["time_ratio"]
            figures["monte_carlo"] = {"samples": samples, "ratio": ratio}
    first = {"network": problem.spec.name, "status": "ok"}
    return [first | {"structure": name} | record for name, record in records.items()]


def sampled_networks(error: float, resolution: float, truth: Truth) -> float:
    """How many sampled networks have this root mean square relative error of the sd.

    Errors of N draws fall as 1 / sqrt(N - 1), and `resolution` is the truth's own, whatever the
    distribution; of Gaussian draws these are 1 + 1 / (2 error^2).
    """
    return max(2.0, 1 + (float(truth.samples) - 1) * (resolution / error) ** 2)


def _programs(problem: Problem, structure: type[mj.Covariance]) -> Programs:
    spec = problem.spec
    size = full_gib(spec.num_tokens, spec.hidden_features, spec.num_heads)
    if structure is mj.Full and size > ARRAY_GIB:
        raise Skip(f"one array of {size:.2g} GiB is over the limit of {ARRAY_GIB:g}")
    forward = passes.moment_forward(problem, structure)
    check_memory(forward.bytes, MEMORY_GIB)
    step = passes.moment_step(problem, structure)
    check_memory(step.bytes, MEMORY_GIB)
    if not passes.all_finite(step.run()):
        raise FloatingPointError("a train step gives numbers that are not finite")
    return {"forward": forward, "step": step}


def _errors(output: Moments, truth: Truth, probabilities: np.ndarray | None = None) -> Record:
    """Errors of tokens, logits, the logits' class covariance, and predictive probabilities."""
    cov, true_cov = np.asarray(output.logit_cov), truth.logit_cov
    logits = accuracy(output.logit_mean, np.sqrt(np.einsum("ncc->nc", cov)), truth.logits)
    norm = partial(np.linalg.norm, axis=(1, 2))
    logits["cov_error"] = float(np.mean(norm(cov - true_cov) / norm(true_cov)))
    if probabilities is None:
        predict = jax.vmap(mj.objectives.class_probabilities)
        probabilities = np.asarray(predict(jnp.asarray(output.logit_mean), jnp.asarray(cov)))
    error = float(np.abs(probabilities - truth.probabilities).mean())
    tokens = accuracy(output.mean, output.sd, truth.tokens)
    return {"tokens": tokens, "logits": logits, "probability_error": error}


def accuracy(mean: Any, sd: Any, truth: Sampled) -> Record:
    """Agreement of moments with their truth.

    The library's four figures, and the root mean square of sd / true sd - 1, less the truth's own noise
    (`resolution`, of its relative standard errors) and never below that.
    """
    mean, sd = np.asarray(mean), np.asarray(sd)
    if not (np.isfinite(mean).all() and np.isfinite(sd).all()):
        raise ValueError("a moment is not finite")
    true_sd = truth.std.astype(np.float64)
    noise = float(np.mean((truth.std_error / true_sd) ** 2))
    square = float(np.mean((sd / true_sd - 1) ** 2)) - noise
    return {
        **mj.reference.Agreement.of(mean, sd, truth.mean, truth.std)._asdict(),
        "rms_sd_error": max(square, noise) ** 0.5,
        "resolution": noise**0.5,
        "at_resolution": square <= noise,
    }


def _add_costs(
    records: dict[str, Record], plain: Programs, programs: dict[str, Programs], repeats: int
) -> None:
    """Time, memory and compilation of the programs, and over the plain ones'."""
    for kind, other in plain.items():
        runs = {name: these[kind].run for name, these in programs.items()} | {"": other.run}
        times = interleaved(runs, repeats, SLOW / len(runs))  # slow networks run fewer times
        for name, these in programs.items():
            own = these[kind]
            records[name].setdefault("cost", {})[kind] = {
                "seconds": times[name],
                "time_ratio": times[name] / times[""],
                "bytes": own.bytes,
                "memory_ratio": own.bytes / other.bytes,
                "compile_seconds": own.seconds,
                "compile_ratio": own.seconds / other.seconds,
            }
