"""Selective prediction: of one and the same posterior, which prediction ranks best, at what price.

The networks answer the predictions whose largest averaged probability is highest, and leave the rest.
Scored are the area under the risk-coverage curve (AURC: the mean share of errors over all coverages,
lower is better), and the coverage at a risk: the largest share that is answered with so few errors.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import draws, predictions
from experiments.classify import methods
from experiments.classify.compared import KL_WEIGHT, Part
from experiments.classify.methods import Answers, Trainer
from experiments.command_line import Parser
from experiments.outputs import aligned, over_seeds, with_error, write_json
from experiments.programs import interleaved

SAMPLES = 4, 8, 32  # drawn networks
RISKS = 0.005, 0.01
WARM = 64  # inputs, without labels, from which `corrected` finds its factor
REPEATS = 7
SCORES = {
    "aurc": "AURC x 1000",
    **{f"coverage_{risk:g}": f"coverage at {risk:.1%}" for risk in RISKS},
}
SCORES |= {"accuracy": "accuracy", "nll": "NLL"}


def add_flag(parser: Parser) -> None:
    """`--selective`."""
    what = "only compare how posteriors, by the ELBO and by IVON, tell predictions to be trusted"
    parser.add_argument("--selective", action="store_true", help=what)


def run(
    trainer: Trainer, args: argparse.Namespace, some: np.ndarray, test: Part, out: Path
) -> None:
    """Train plain networks and two posteriors of each seed, compare and write; see `compare`."""
    first, every = trainer.first(args.seeds), trainer.plain()
    learned = first.elbo(KL_WEIGHT, every.first(args.seeds).models, "ELBO")
    posteriors = {"ELBO": learned.models, "IVON": first.ivon().models}
    found = compare(posteriors, every.members(args.seeds), first.keys, some, test)
    write_json(out / "selective.json", {"settings": vars(args), "ways": found})
    print(table(found))


def compare(
    posteriors: dict[str, list[mj.Bayesian]], members: list[list[mj.Bayesian]], keys: Array,
    some: np.ndarray, test: Part,
) -> dict[str, Any]:  # fmt: skip
    """Scores and price of every way to predict.

    Args:
      posteriors: by name, for each seed.
      members: plain networks of each seed, at the means.
      keys: of each seed.
      some: inputs without labels (L, N, ...), see `WARM`.
      test: inputs (L, N, ...) and labels (L, N).
    """
    first = [own[:1] for own in members]
    ways = {"a plain network": Answers(methods.mean_softmax, first, keys)}
    ways[f"{len(members[0])} plain"] = Answers(methods.mean_softmax, members, keys)
    for name, models in posteriors.items():
        ways |= {f"{name}: {way}": x for way, x in _ways(models, keys, some[:, :WARM]).items()}
    prices = _prices(ways, test[0][0, : methods.CHUNK])
    found = {}
    for name, answers in ways.items():
        each = [scored(*pair) for pair in zip(answers(test[0]), test[1], strict=True)]
        found[name] = {**over_seeds(each), "price": prices[name]}
    return found


def _ways(models: list[mj.Bayesian], keys: Array, some: np.ndarray) -> dict[str, Answers]:
    """The ways to predict by a posterior."""

    def alone(forward: methods.Forward, models: list[mj.Bayesian], *last: Any) -> Answers:
        return Answers(forward, [[model] for model in models], keys, *last)

    analytic = methods.moments, methods.expected_softmax
    diagonal, whole = (
        [model.replace(structure=structure) for model in models]
        for structure in (mj.Diagonal, mj.Separable)
    )
    corrected = [m.corrected(jnp.asarray(x)) for m, x in zip(diagonal, some, strict=True)]
    found = {"the mean network": alone(methods.mean_softmax, models)}
    of = {"Diagonal": diagonal, "Diagonal, corrected": corrected, "Separable": whole}
    found |= {way: alone(analytic[0], own, analytic[1]) for way, own in of.items()}
    kinds = {count: methods.mean_of_draws(draws.weights, count) for count in SAMPLES}
    return found | {f"{count} draws": alone(kind, models) for count, kind in kinds.items()}


def scored(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The scores of class probabilities (N, C)."""
    risk = predictions.risk(probabilities, labels, -probabilities.max(axis=1))
    kept = {f"coverage_{r:g}": np.max(np.nonzero(risk <= r)[0] + 1, initial=0) for r in RISKS}
    coverage = {name: float(count / len(labels)) for name, count in kept.items()}
    return {"aurc": float(risk.mean()), **coverage, **predictions.scores(probabilities, labels)}


def _prices(ways: dict[str, Answers], inputs: np.ndarray) -> dict[str, float]:
    """Time of each way over that of a plain network, of one compiled batch."""

    def run(answers: Answers) -> Any:
        graph, state = nnx.split(answers.copies[0])

        def program(state: Any, key: Array, x: Array) -> Array:
            each = [answers.forward(model, key, x) for model in nnx.merge(graph, state)]
            return answers.last(jax.tree.map(lambda *x: sum(x) / len(x), *each))

        given = state, answers.keys[0], jnp.asarray(inputs)
        compiled = jax.jit(program).lower(*given).compile()
        return lambda: jax.block_until_ready(compiled(*given))

    times = interleaved({name: run(answers) for name, answers in ways.items()}, REPEATS)
    return {name: seconds / times["a plain network"] for name, seconds in times.items()}


def table(found: dict[str, Any]) -> str:
    """The results, one way a row."""
    rows = [["", *SCORES.values(), "price (plain forwards)"]]
    for name, record in found.items():
        scale = {"aurc": 1000.0}
        cells = {
            key: {k: scale.get(key, 1.0) * x for k, x in record[key].items()} for key in SCORES
        }
        rows.append([name, *map(with_error, cells.values()), f"{record['price']:.1f}"])
    return aligned(rows)
