"""Measure one network: a record for every structure."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import moment_jax as mj
from experiments.frontier import competitors, passes
from experiments.frontier.passes import Moments
from experiments.frontier.problem import Problem, Spec
from experiments.frontier.truth import Sampled, Truth
from experiments.programs import GIB, Program, Skip, check_memory, failure, interleaved

Record = dict[str, Any]

BYTES = 4  # float32
SLOW = 30.0  # seconds for all timed runs of one kind


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits beyond which a program is skipped."""

    repeats: int  # the most timed runs of each function
    array_gib: float  # the largest array that a structure may need
    memory_gib: float  # the most that a compiled function may need


class Programs(NamedTuple):
    """Forward and train step."""

    forward: Program
    step: Program


class Accuracy(NamedTuple):
    """Agreement of one output's moments with its truth."""

    agreement: mj.reference.Agreement  # the library's four figures
    rms_sd_error: float  # of sd / true sd - 1, less the truth's own noise; never below that
    resolution: float  # that noise (rms of the truth's relative standard errors)
    at_resolution: bool  # whether the error is within the truth's noise

    @classmethod
    def of(cls, mean: np.ndarray, sd: np.ndarray, truth: Sampled) -> Accuracy:
        """Compare arrays of one shape."""
        if not (np.isfinite(mean).all() and np.isfinite(sd).all()):
            raise ValueError("a moment is not finite")
        agreement = mj.reference.Agreement.of(mean, sd, truth.mean, truth.sd)
        true_sd = truth.sd.astype(np.float64)
        noise = float(np.mean((truth.sd_error / true_sd) ** 2))
        square = float(np.mean((sd / true_sd - 1) ** 2)) - noise
        error = max(square, noise) ** 0.5
        return cls(agreement, error, noise**0.5, square <= noise)


class Advantage(NamedTuple):
    """What Monte Carlo needs for the same root mean square relative sd error e."""

    formula: float  # 1 + 1/(2 e^2), the number of Gaussian draws
    samples: float  # by subsamples of the truth's draws, extrapolated as 1 / sqrt(N - 1)
    ratio: float  # samples over the cost of a moment pass in plain forwards


def advantage(error: float, sizes: np.ndarray, curve: np.ndarray, cost: float) -> Advantage:
    """The advantage at a relative sd error, from the errors (`curve`) of subsamples of `sizes`."""
    # In these terms the curve of Gaussian draws is the straight line n - 1 = 1 / (2 e^2).
    precision = np.maximum.accumulate(1 / (2 * curve**2))
    wanted = 1 / (2 * error**2)
    if wanted <= precision[0]:
        samples = 1 + (sizes[0] - 1) * wanted / precision[0]
    elif wanted >= precision[-1]:
        samples = 1 + (sizes[-1] - 1) * wanted / precision[-1]
    else:
        samples = 1 + float(np.interp(wanted, precision, sizes - 1))
    samples = max(2.0, float(samples))
    return Advantage(1 + wanted, samples, samples / cost)


def largest_array_gib(spec: Spec, structure: type[mj.Covariance]) -> float:
    """The largest array that a structure has to hold, in GiB.

    That of `Full` is the covariance of all hidden units, (T F)^2, or of all scores, H^2 T^4, of one
    sequence; that of `TokenBlock` each token's covariance of the hidden units; else the scores.
    """
    tokens, hidden = spec.num_tokens, spec.hidden_features
    if structure is mj.Full:
        numbers = max((tokens * hidden) ** 2, spec.num_heads**2 * tokens**4)
    elif structure is mj.TokenBlock:
        numbers = spec.batch * tokens * hidden**2
    else:
        numbers = spec.batch * spec.num_heads * tokens**2
    return numbers * BYTES / GIB


def measure(
    problem: Problem,
    truth: Truth,
    structures: dict[str, type[mj.Covariance]],
    limits: Limits,
    seed: int,
) -> list[Record]:
    """One record for each structure, in their order, and one for each competitor."""
    spec = problem.spec
    plain = Programs(passes.plain_forward(problem), passes.plain_step(problem))
    records: dict[str, Record] = {}
    programs: dict[str, Programs] = {}
    for name, structure in structures.items():
        record: Record = {"network": spec.name, "structure": name, "status": "ok"}
        records[name] = record
        try:
            programs[name] = _programs(problem, structure, limits)
            record |= _accuracies(programs[name].forward.run(), truth, problem)
        except Exception as error:  # keep the other structures' figures
            record |= failure(error)
            programs.pop(name, None)
    times = _times({"": plain, **programs}, limits.repeats)
    for name, these in programs.items():
        records[name]["cost"] = _cost(these, plain, times, name)
        _add_advantages(records[name], truth)
    return [*records.values(), *_competitors(problem, truth, plain.forward, limits, seed)]


def _competitors(
    problem: Problem, truth: Truth, plain: Program, limits: Limits, seed: int
) -> list[Record]:
    """Records of the linearised network and of a few sampled ones; they have no train step."""
    records = [_linearised(problem, truth, plain, limits)]
    for count in competitors.NETWORKS:
        moments, drawn = competitors.sampled(problem, count, seed)
        found = _accuracies(moments, truth, problem, drawn.probabilities)
        # A sampled network costs a plain forward; drawing its weights is not counted.
        forward = {"time_ratio": float(count), "memory_ratio": 1.0}
        records.append(found | {"structure": f"{count} sampled", "cost": {"forward": forward}})
    for record in records:
        record.update({"network": problem.spec.name, "status": record.get("status", "ok")})
        if record["status"] == "ok":
            _add_advantages(record, truth)
    return records


def _linearised(problem: Problem, truth: Truth, plain: Program, limits: Limits) -> Record:
    record: Record = {"structure": "linearised"}
    if problem.inputs.size > competitors.MOST_OUTPUTS:
        return record | {"status": "skipped", "reason": f"{problem.inputs.size} backward passes"}
    program = competitors.linearised(problem)
    output = Moments(*competitors.linearised_tokens(problem), *program.run())
    record |= _accuracies(output, truth, problem)
    times = interleaved({"plain": plain.run, "own": program.run}, min(limits.repeats, 5))
    ratios = {
        "seconds": times["own"],
        "time_ratio": times["own"] / times["plain"],
        "memory_ratio": program.bytes / plain.bytes,
    }
    return record | {"cost": {"forward": ratios}}


def _programs(problem: Problem, structure: type[mj.Covariance], limits: Limits) -> Programs:
    size = largest_array_gib(problem.spec, structure)
    if size > limits.array_gib:
        raise Skip(f"one array of {size:.2g} GiB is over --array-limit {limits.array_gib:g}")
    forward = passes.moment_forward(problem, structure)
    check_memory(forward.bytes, limits.memory_gib)
    step = passes.moment_step(problem, structure)
    check_memory(step.bytes, limits.memory_gib)
    if not passes.all_finite(step.run()):
        raise FloatingPointError("a train step gives numbers that are not finite")
    return Programs(forward, step)


def _accuracies(
    output: Moments, truth: Truth, problem: Problem, probabilities: np.ndarray | None = None
) -> Record:
    """Errors of tokens, logits, the logits' class covariance, and predictive probabilities."""
    cov = np.asarray(output.logit_cov)
    pairs = {
        "tokens": (output.mean, output.sd, truth.tokens),
        "logits": (output.logit_mean, np.sqrt(np.einsum("ncc->nc", cov)), truth.logits),
    }
    record = {name: _accuracy(*pair) for name, pair in pairs.items()}
    wrong = np.linalg.norm(cov - truth.logit_cov, axis=(1, 2))
    record["logits"]["cov_error"] = float(
        np.mean(wrong / np.linalg.norm(truth.logit_cov, axis=(1, 2)))
    )
    if probabilities is None:
        predict = jax.vmap(mj.objectives.class_probabilities)
        probabilities = np.asarray(predict(jnp.asarray(output.logit_mean), jnp.asarray(cov)))
    labels = problem.labels[:, None]
    chosen, best = (
        np.take_along_axis(p, labels, axis=1) for p in (probabilities, truth.probabilities)
    )
    record["predictive"] = {
        "probability_error": float(np.abs(probabilities - truth.probabilities).mean()),
        "nll": float(-np.log(np.maximum(chosen, 1e-30)).mean()),
        "sampled_nll": float(-np.log(np.maximum(best, 1e-30)).mean()),
    }
    return record


def _accuracy(mean: Any, sd: Any, truth: Sampled) -> Record:
    accuracy = Accuracy.of(np.asarray(mean), np.asarray(sd), truth)
    figures = accuracy._asdict()
    return {**figures.pop("agreement")._asdict(), **figures}


def _times(programs: dict[str, Programs], repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds by kind and structure; slow networks are run fewer times."""
    times = {}
    for kind in Programs._fields:
        functions = {name: getattr(these, kind).run for name, these in programs.items()}
        times[kind] = interleaved(functions, repeats, SLOW / len(functions))
    return times


def _cost(
    these: Programs, plain: Programs, times: dict[str, dict[str, float]], name: str
) -> Record:
    record: Record = {}
    for kind in Programs._fields:
        mine, yardstick = getattr(these, kind), getattr(plain, kind)
        taken = times[kind]
        record[kind] = {
            "seconds": taken[name],
            "time_ratio": taken[name] / taken[""],
            "bytes": mine.bytes,
            "memory_ratio": mine.bytes / yardstick.bytes,
            "compile_seconds": mine.seconds,
            "compile_ratio": mine.seconds / yardstick.seconds,
        }
    return record


def _add_advantages(record: Record, truth: Truth) -> None:
    ratio = record["cost"]["forward"]["time_ratio"]
    for name, curve in (("tokens", truth.token_curve), ("logits", truth.logit_curve)):
        found = advantage(record[name]["rms_sd_error"], truth.sizes, curve, ratio)
        record[name]["monte_carlo"] = found._asdict()
