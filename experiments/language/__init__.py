"""Train a Bayesian language model of characters on Python's own documentation by the analytic ELBO.

Compares it with the same plain network, and asks whether its uncertainty tells foreign text from
held-out text. Writes metrics.json and a figure, and prints two tables and a continuation.
"""

import argparse
import platform
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moment_jax as mj
from experiments.checkpoints import run_folder
from experiments.command_line import Parser
from experiments.figures import histograms, save
from experiments.language import model as language_model
from experiments.language import predictions as language_predictions
from experiments.language.model import CONTEXT, CharacterModel, PlainCharacterModel
from experiments.language.predictions import Scores, auroc
from experiments.language.text import Texts, Vocabulary, load, windows
from experiments.outputs import write_json
from experiments.report import aligned
from experiments.training import fit_network

NUM_VALIDATION = 100  # windows by which the plain network is stopped
LENGTH = 200  # of the continuation
SAVE_EVERY = 250  # updates of either network
KNOWN = "test"
Results = dict[str, dict[str, Scores]]


def add_arguments(parser: Parser) -> None:
    """The options of the language experiment."""
    parser.training("runs/language", mj.STRUCTURES, steps=150, batch_size=16, kl_weight=0.3)
    parser.whole("--plain-steps", 2000, "updates of the plain network")
    parser.whole("--samples", 10, "sampled networks to compare with", least=2)
    parser.whole("--windows", 100, "windows of each text to score, at most", least=2)


def run(args: argparse.Namespace) -> None:
    """Train and compare both networks; write the results."""
    start = time.perf_counter()
    out = run_folder(args)
    texts, vocabulary = load()
    plain, network, seconds = _train(args, texts, vocabulary)
    results = _predict(args, plain, network, texts, vocabulary)
    prompt, key = texts.test[: CONTEXT + 1], jax.random.key(args.seed + 3)
    drawn, _ = language_predictions.continuation(network, vocabulary.encode(prompt), key, LENGTH)
    sizes = {name: len(getattr(texts, name)) for name in ("train", "validation", "test")}
    metrics = {
        "settings": {**vars(args), "python": platform.python_version()},
        "characters": {**sizes, "vocabulary": len(vocabulary.characters)},
        "kl": float(network.kl()),
        **_compare(results),
        "continuation": {"prompt": prompt, "drawn": vocabulary.decode(drawn)},
        "seconds": {**seconds, "total": time.perf_counter() - start},
    }
    parts = {
        part: {of: getattr(scores, part) for of, scores in results["Bayesian, analytic"].items()}
        for part in ("epistemic", "total", "bits")
    }
    save(histograms(parts, "nats; bits per character"), out / "uncertainty.png")
    write_json(out / "metrics.json", metrics)
    _print(out, metrics)


def _train(
    args: argparse.Namespace, texts: Texts, vocabulary: Vocabulary
) -> tuple[PlainCharacterModel, CharacterModel, dict[str, float]]:
    """The plain network, and the Bayesian one that starts at its weights; and the seconds of each."""
    times = [time.perf_counter()]
    train = jnp.asarray(vocabulary.encode(texts.train))
    validation = windows(vocabulary.encode(texts.validation), CONTEXT, NUM_VALIDATION)
    network = language_model.bayesian_network(len(vocabulary.characters), args.structure, args.seed)
    options = {"num_steps": args.plain_steps, "batch_size": args.batch_size}
    task = language_model.plain_task(train, jnp.asarray(validation), **options)
    saved = args, "plain", options, args.seed, SAVE_EVERY
    plain, _ = fit_network(task, network.mean_network(), *saved)
    times.append(time.perf_counter())
    network.load(plain)
    options = options | {"num_steps": args.steps, "kl_weight": args.kl_weight}
    task = language_model.bayesian_task(train, **options)
    settings = {"structure": args.structure, "plain_steps": args.plain_steps, **options}
    saved = args, "bayesian", settings, args.seed + 1, SAVE_EVERY
    network, _ = fit_network(task, network, *saved)
    times.append(time.perf_counter())
    return plain, network, dict(zip(("plain", "bayesian"), np.diff(times), strict=True))


def _predict(
    args: argparse.Namespace,
    plain: PlainCharacterModel,
    network: CharacterModel,
    texts: Texts,
    vocabulary: Vocabulary,
) -> Results:
    """Scores of every network on every text, the test first."""
    given = {KNOWN: texts.test, **texts.foreign}
    cut = [windows(vocabulary.encode(text), CONTEXT, args.windows) for text in given.values()]
    every = np.concatenate(cut)  # together, for one compilation
    ends = np.cumsum([len(part) for part in cut])[:-1]
    key = jax.random.key(args.seed + 2)
    scores = {
        "plain network": language_predictions.plain(plain, every),
        "Bayesian, analytic": language_predictions.analytic(network, every),
        f"Bayesian, {args.samples} samples": language_predictions.sampled(
            network, every, key, args.samples
        ),
    }
    return {
        name: dict(zip(given, language_predictions.split(each, ends), strict=True))
        for name, each in scores.items()
    }


def _compare(results: Results) -> dict[str, Any]:
    """Average scores, and the AUROC of each score for foreign windows."""
    averages, detected = {}, {}
    for name, (known, *foreign) in ((name, texts.items()) for name, texts in results.items()):
        averages[name] = {
            text: jax.tree.map(lambda part: float(part.mean()), scores)
            for text, scores in (known, *foreign)
        }
        detected[name] = {text: jax.tree.map(auroc, known[1], scores) for text, scores in foreign}
    plain, analytic = (averages[n][KNOWN].bits for n in ("plain network", "Bayesian, analytic"))
    return {"averages": averages, "auroc": detected, "bits_over_plain": analytic / plain}


def _print(out: Path, metrics: dict[str, Any]) -> None:
    rows = [["bits per character", *next(iter(metrics["averages"].values()))]]
    for name, texts in metrics["averages"].items():
        rows.append([name, *(f"{scores.bits:.3f}" for scores in texts.values())])
    print(aligned(rows))
    rows = [["AUROC against the test", *Scores._fields]]
    for name, texts in metrics["auroc"].items():
        for text, parts in texts.items():
            rows.append([f"{name}: {text}", *(f"{value:.3f}" for value in parts)])
    print(f"\n{aligned(rows)}\n")
    drawn = metrics["continuation"]
    print(f"{drawn['prompt']}|{drawn['drawn']}\n")
    print(f"bits over those of the plain network: {metrics['bits_over_plain']:.4f}; KL weight "
          f"{metrics['settings']['kl_weight']:g}; {metrics['seconds']['total']:.0f} s in all; all of it "
          f"in {out}")  # fmt: skip
