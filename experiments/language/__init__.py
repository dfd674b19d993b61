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
from flax import nnx

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
from experiments.training import fit_saved

NUM_VALIDATION = 100  # windows by which the plain network is stopped
LENGTH = 200  # of the continuation
SAVE_EVERY = 250  # updates of either network
KNOWN = "test"
Results = dict[str, dict[str, Scores]]


def add_arguments(parser: Parser) -> None:
    """The options of the language experiment."""
    parser.out("runs/language")
    parser.resume()
    parser.seed("random seed of weights, batches and samples; never of the split")
    parser.choice(
        "--structure", mj.STRUCTURES, "Diagonal", "covariance structure (Diagonal is the fastest)"
    )
    parser.whole("--steps", 150, "updates of the Bayesian network")
    parser.whole("--plain-steps", 2000, "updates of the plain network")
    parser.whole("--batch-size", 16, "windows for each update, of both networks")
    parser.real(
        "--kl-weight", 0.3, "final weight of the KL: 1 is Bayes' rule, less is cold", least=0
    )
    parser.whole("--samples", 10, "sampled networks to compare with", least=2)
    parser.whole("--windows", 100, "windows of each text to score, at most", least=2)


def run(args: argparse.Namespace) -> None:
    """Train and compare both networks; write the results."""
    start = time.perf_counter()
    out = run_folder(args)
    texts, vocabulary = load()
    train = vocabulary.encode(texts.train)
    plain, plain_seconds = _train_plain(args, train, texts, vocabulary)
    network, bayesian_seconds = _train_bayesian(args, train, plain, vocabulary)
    results = _predict(args, plain, network, texts, vocabulary)
    sample = _continue(args, network, texts, vocabulary)
    metrics = {
        "settings": {**vars(args), "python": platform.python_version()},
        "characters": {
            "train": len(texts.train),
            "validation": len(texts.validation),
            "test": len(texts.test),
            "vocabulary": len(vocabulary.characters),
        },
        "kl": float(network.kl()),
        **_compare(results),
        "continuation": sample,
    }
    texts_of = results["Bayesian, analytic"]
    parts = {
        p: {t: getattr(s, p) for t, s in texts_of.items()} for p in ("epistemic", "total", "bits")
    }
    save(histograms(parts, "nats; bits per character"), out / "uncertainty.png")
    metrics["seconds"] = {
        "plain": plain_seconds,
        "bayesian": bayesian_seconds,
        "total": time.perf_counter() - start,
    }
    write_json(out / "metrics.json", metrics)
    _print(out, metrics)


def _train_plain(
    args: argparse.Namespace, train: np.ndarray, texts: Texts, vocabulary: Vocabulary
) -> tuple[PlainCharacterModel, float]:
    start = time.perf_counter()
    count = len(vocabulary.characters)
    untrained: Any = language_model.bayesian_network(count, args.structure, args.seed)
    graph, params = nnx.split(untrained.mean_network())
    validation = windows(vocabulary.encode(texts.validation), CONTEXT, NUM_VALIDATION)
    options = {"num_steps": args.plain_steps, "batch_size": args.batch_size}
    given = jnp.asarray(train), jnp.asarray(validation)
    task = language_model.plain_task(graph, *given, **options)
    state = fit_saved(task, params, args, "plain", options, args.seed, SAVE_EVERY)
    assert state.best is not None
    return nnx.merge(graph, state.best.params), time.perf_counter() - start


def _train_bayesian(
    args: argparse.Namespace, train: np.ndarray, plain: PlainCharacterModel, vocabulary: Vocabulary
) -> tuple[CharacterModel, float]:
    """Start at the trained plain network's weights, with small spreads, and maximise the ELBO."""
    start = time.perf_counter()
    network = language_model.bayesian_network(len(vocabulary.characters), args.structure, args.seed)
    network.load(plain)
    graph, params = nnx.split(network)
    options = {"num_steps": args.steps, "batch_size": args.batch_size, "kl_weight": args.kl_weight}
    task = language_model.bayesian_task(graph, jnp.asarray(train), **options)
    settings = {"structure": args.structure, "plain_steps": args.plain_steps, **options}
    state = fit_saved(task, params, args, "bayesian", settings, args.seed + 1, SAVE_EVERY)
    return nnx.merge(graph, state.params), time.perf_counter() - start


def _predict(
    args: argparse.Namespace,
    plain: PlainCharacterModel,
    network: CharacterModel,
    texts: Texts,
    vocabulary: Vocabulary,
) -> Results:
    """Scores of every network on every text, the test first."""
    cut = {}
    for name, text in {KNOWN: texts.test, **texts.foreign}.items():
        cut[name] = windows(vocabulary.encode(text), CONTEXT, args.windows)
    key = jax.random.key(args.seed + 2)
    predictors = {
        "plain network": lambda w: language_predictions.plain(plain, w),
        "Bayesian, analytic": lambda w: language_predictions.analytic(network, w),
        f"Bayesian, {args.samples} samples": lambda w: language_predictions.sampled(
            network, w, key, args.samples
        ),
    }
    every = np.concatenate(list(cut.values()))  # together, for one compilation
    ends = np.cumsum([len(w) for w in cut.values()])[:-1]
    return {
        name: dict(zip(cut, language_predictions.split(predict(every), ends), strict=True))
        for name, predict in predictors.items()
    }


def _continue(
    args: argparse.Namespace, network: CharacterModel, texts: Texts, vocabulary: Vocabulary
) -> dict[str, str]:
    prompt = texts.test[: CONTEXT + 1]
    key = jax.random.key(args.seed + 3)
    tokens, _ = language_predictions.continuation(network, vocabulary.encode(prompt), key, LENGTH)
    return {"prompt": prompt, "drawn": vocabulary.decode(tokens)}


def _compare(results: Results) -> dict[str, Any]:
    """Average scores, and the AUROC of each score for foreign windows."""
    averages = {
        name: {
            text: {part: float(value.mean()) for part, value in scores._asdict().items()}
            for text, scores in texts.items()
        }
        for name, texts in results.items()
    }
    detected = {
        name: {
            foreign: {
                part: auroc(getattr(texts[KNOWN], part), getattr(scores, part))
                for part in Scores._fields
            }
            for foreign, scores in texts.items()
            if foreign != KNOWN
        }
        for name, texts in results.items()
    }
    plain = averages["plain network"][KNOWN]["bits"]
    ratio = averages["Bayesian, analytic"][KNOWN]["bits"] / plain
    return {"averages": averages, "auroc": detected, "bits_over_plain": ratio}


def _print(out: Path, metrics: dict[str, Any]) -> None:
    rows = [["bits per character", *next(iter(metrics["averages"].values()))]]
    for name, texts in metrics["averages"].items():
        rows.append([name, *(f"{scores['bits']:.3f}" for scores in texts.values())])
    print(aligned(rows))
    rows = [["AUROC against the test", *Scores._fields]]
    for name, texts in metrics["auroc"].items():
        for text, parts in texts.items():
            rows.append([f"{name}: {text}", *(f"{value:.3f}" for value in parts.values())])
    print(f"\n{aligned(rows)}\n")
    drawn = metrics["continuation"]
    print(f"{drawn['prompt']}|{drawn['drawn']}\n")
    print(f"bits over those of the plain network: {metrics['bits_over_plain']:.4f}; KL weight "
          f"{metrics['settings']['kl_weight']:g}; {metrics['seconds']['total']:.0f} s in all; all of it "
          f"in {out}")  # fmt: skip
