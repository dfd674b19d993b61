"""CLINC150's JSON files: texts with their intents, and texts that have none of these.

An object with the keys train, val, test, oos_train, oos_val and oos_test; each is a list of [text,
intent] pairs. Texts out of scope, `oos_*`, have a label ("oos") that is no intent of train.

Source: Larson et al. (2019), An evaluation dataset for intent classification and out-of-scope
prediction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.command_line import InputError

IN_SCOPE = ("train", "val", "test")
OUT_OF_SCOPE = ("oos_train", "oos_val", "oos_test")
KEYS = (*IN_SCOPE, *OUT_OF_SCOPE)


Part = tuple[np.ndarray, np.ndarray]
"""Texts, or what they are encoded as, (N, ...), and the numbers of their intents (N,)."""


class IntentSet(NamedTuple):
    """The content of one file; of the texts out of scope, the test part alone.

    Texts are arrays (N,) of strings, or (N, ...) of what they are encoded as.
    """

    name: str
    intents: list[str]
    train: Part
    validation: Part
    test: Part
    outside: np.ndarray

    def encoded(self, encode: Callable[[np.ndarray], np.ndarray]) -> IntentSet:
        """The same with all texts encoded."""
        train, validation, test = (
            (encode(texts), labels) for texts, labels in (self.train, self.validation, self.test)
        )
        return IntentSet(self.name, self.intents, train, validation, test, encode(self.outside))


def read_set(folder: Path, name: str | None) -> IntentSet:
    """The named file (without .json), or the only one."""
    if not folder.is_dir():
        raise InputError(f"--data-dir {folder} is no folder; name one of CLINC150's .json files")
    there = sorted(path.stem for path in folder.glob("*.json"))
    if not there:
        raise InputError(
            f"--data-dir {folder} holds no .json files; see experiments intents --help"
        )
    if name is None and len(there) > 1:
        raise InputError(f"{folder} holds several sets; pass --set with one of {', '.join(there)}")
    if name is not None and name not in there:
        raise InputError(f"--set {name} is not in {folder}; take one of {', '.join(there)}")
    return _read(folder / f"{name or there[0]}.json")


def _read(path: Path) -> IntentSet:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} needs an object with {', '.join(KEYS)}; got {_kind(content)}")
    lacking = [key for key in KEYS if key not in content]
    if lacking:
        raise InputError(f"{path} has no {', '.join(lacking)}; it needs {', '.join(KEYS)}")
    for key in KEYS:
        _check_rows(path, key, content[key])
    if not any(re.search(r"\w", text) for text, _ in content["train"]):
        raise InputError(f"{path} has no word in the texts of train; it needs some to learn from")
    numbers = {intent: i for i, intent in enumerate(sorted({pair[1] for pair in content["train"]}))}
    if len(numbers) < 2:
        raise InputError(f"{path} needs two intents or more in train; got {', '.join(numbers)}")
    for key in KEYS:
        _check_intents(path, key, {pair[1] for pair in content[key]}, numbers)
    texts = {key: np.asarray([text for text, _ in content[key]], object) for key in KEYS}
    labels = {
        key: np.asarray([numbers[intent] for _, intent in content[key]], np.int32)
        for key in IN_SCOPE
    }
    train, validation, test = ((texts[key], labels[key]) for key in IN_SCOPE)
    return IntentSet(path.stem, list(numbers), train, validation, test, texts["oos_test"])


def _check_rows(path: Path, key: str, rows: Any) -> None:
    if not isinstance(rows, list) or not rows:
        came = "an empty one" if rows == [] else _kind(rows)
        raise InputError(f"{path} needs a list of [text, intent] pairs in {key}; got {came}")
    for number, row in enumerate(rows):
        pair = isinstance(row, list) and len(row) == 2
        if not pair or not all(isinstance(word, str) for word in row):
            raise InputError(
                f"{path} needs [text, intent], two strings, in {key}; row {number} is "
                f"{json.dumps(row)[:60]}"
            )


def _check_intents(path: Path, key: str, found: set[str], numbers: dict[str, int]) -> None:
    """Check that intents in scope are those of train, and that the others are not."""
    wrong = found - numbers.keys() if key in IN_SCOPE else found & numbers.keys()
    if wrong:
        rule = "does not have" if key in IN_SCOPE else "has too"
        raise InputError(f"{path} has the intent {min(wrong)!r} in {key}, which train {rule}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return names.get(type(value), "a number or boolean")
