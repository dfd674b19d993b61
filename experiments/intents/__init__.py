"""Classify the intents of texts, and detect texts out of scope: CLINC150's files.

Compares a small Bayesian Transformer over words, predicted by moments, with the plain one, an average of
several, MC dropout, and logistic regression on TF-IDF. Open settings are chosen on the validation part.
Of the texts out of scope only the test part is used, and detected by the entropy of the prediction.
Prints a table with means and standard errors over the seeds; writes metrics.json and a figure.
"""

import argparse
import time
from functools import partial
from typing import Any

import jax

from experiments import predictions
from experiments.classify import scores, selective
from experiments.classify.compared import Compared
from experiments.classify.methods import Budget, Trainer, stacked
from experiments.command_line import InputError, Parser, named_files, writable_folder
from experiments.intents.compared import logistic_regression, text_model, transformers
from experiments.intents.texts import IntentSet, Vocabulary, read_set, with_lost_words
from experiments.outputs import aligned, duration, over_seeds, with_error, write_json

LOST = 0.1  # share of a training text's words that are replaced by random buckets
COLUMNS = ("accuracy", "nll", "ece", "brier", "oos_auroc", "oos_aupr")


def add_arguments(parser: Parser) -> None:
    """The options of the comparison."""
    parser.sets("folder of CLINC150's data_full.json or others of this form", "the only one")
    parser.out("runs/intents", "metrics.json and the figure")
    parser.seed("random seed of weights, batches and samples")
    parser.whole("--seeds", 3, "how many times all is done")
    parser.whole("--plain-steps", 3000, "updates of a plain network, the best of which is kept")
    parser.whole("--steps", 1500, "updates of a Bayesian network")
    parser.whole("--samples", 30, "networks drawn by MC dropout to predict", least=2)
    selective.add_flag(parser)
    parser.whole("--members", 5, "plain networks that are averaged")


def run(args: argparse.Namespace) -> None:
    """Read the file, train all methods, and write the results."""
    start = time.perf_counter()
    paths = named_files(args, ".json")
    if len(paths) > 1:
        names = ", ".join(path.stem for path in paths)
        raise InputError(f"{args.data_dir} holds several sets; pass --set with one of {names}")
    given = read_set(paths[0])
    out = writable_folder(args.out, "--out")
    vocabulary = Vocabulary.of(given.train[0])
    encoded = given.encoded(vocabulary.encode)
    build = partial(text_model, vocabulary.size, vocabulary.length, len(given.intents))
    budget = Budget(args.plain_steps, steps=args.steps, batch_size=64, weight_decay=1e-2)
    count = args.seeds * args.members
    keys = jax.random.split(jax.random.key(args.seed), count)
    lose = partial(with_lost_words, rate=LOST)
    train = stacked(encoded.train, count)
    trainer = Trainer(build, train, budget, keys, lose, encoded.validation)
    if args.selective:
        some, _ = stacked(encoded.validation, args.seeds)
        selective.run(trainer, args, some, stacked(encoded.test, args.seeds), out)
        return
    name = "TF-IDF, logistic regression"
    records = {name: _measure(logistic_regression(given), given)}
    for name, method in transformers(trainer, args.seeds, encoded.validation, args.samples):
        records[name] = _measure(method, encoded)
    sizes: dict[str, Any] = {
        key: len(getattr(given, key)[1]) for key in ("train", "validation", "test")
    }
    sizes |= {"intents": len(given.intents), "oos_test": len(given.outside), "set": given.name}
    sizes |= {"token_ids": vocabulary.size, "longest": vocabulary.length}
    metrics = {
        "settings": vars(args),
        "data": sizes,
        "ece_bins": predictions.BINS,
        "oos_score": "entropy of the prediction; out of scope is positive",
        "methods": records,
        "seconds": time.perf_counter() - start,
    }
    write_json(out / "metrics.json", metrics)
    _print(records)
    print(f"{metrics['seconds']:.0f} s in all; metrics.json in {out}")


def _measure(method: Compared, given: IntentSet) -> dict[str, Any]:
    """All scores of one method."""
    texts, labels = given.test
    method.predict(texts[:50])  # compiled before it is timed
    start = time.perf_counter()
    test = method.predict(texts)
    seconds = (time.perf_counter() - start) / (len(test) * len(texts))
    outside = method.predict(given.outside)
    validation = [
        predictions.scores(p, given.validation[1]) for p in method.predict(given.validation[0])
    ]
    found = [
        predictions.scores(known, labels)
        | {f"oos_{key}": value for key, value in scores.detection(known, other).items()}
        for known, other in zip(test, outside, strict=True)
    ]
    return {
        "validation_nll": over_seeds(validation)["nll"],
        **over_seeds(found),
        "seconds_of_training": method.seconds / len(test),
        "seconds_per_text": seconds,
        "chosen": ", ".join(f"{key} {value:g}" for key, value in method.chosen.items()),
    }


def _print(records: dict[str, Any]) -> None:
    rows = [
        ["", "accuracy", "NLL", "ECE", "Brier", "AUROC", "AUPR", "training", "a text", "chosen"]
    ]
    for name, record in records.items():
        cells = [with_error(record[key]) for key in COLUMNS]
        times = [f"{record['seconds_of_training']:.0f} s", duration(record["seconds_per_text"])]
        rows.append([name, *cells, *times, record["chosen"]])
    print(aligned(rows))
