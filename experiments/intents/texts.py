"""CLINC150's JSON files: texts with their intents, and texts that have none; their words as ids.

An object with the keys train, val, test, oos_train, oos_val and oos_test; each is a list of [text,
intent] pairs. Texts out of scope, `oos_*`, have a label ("oos") that is no intent of train.

Source: Larson et al. (2019), An evaluation dataset for intent classification and out-of-scope
prediction.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from sklearn.utils import murmurhash3_32

from experiments.command_line import InputError

IN_SCOPE = ("train", "val", "test")
OUT_OF_SCOPE = ("oos_train", "oos_val", "oos_test")
KEYS = (*IN_SCOPE, *OUT_OF_SCOPE)
PADDING = 0  # the id of places after the end of a text
BUCKETS = 64  # ids 1 to 64: words that training texts have once at most
LEAST = 2  # occurrences in training texts for a word to get its own id
LONGEST = 32  # words of a text that are read
WORD = re.compile(r"\w+(?:'\w+)*")


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


def read_set(path: Path) -> IntentSet:
    """The content of a file; an `InputError` says what is wrong with it."""

    def need(right: bool, said: str) -> None:
        if not right:
            raise InputError(f"{path} {said}")

    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error})") from error
    is_object = isinstance(content, dict)
    need(is_object, f"needs an object with {', '.join(KEYS)}; got {_kind(content)}")
    lacking = ", ".join(key for key in KEYS if key not in content)
    need(not lacking, f"has no {lacking}; it needs {', '.join(KEYS)}")
    for key in KEYS:
        rows = content[key]
        right = isinstance(rows, list) and len(rows) > 0
        came = "an empty one" if rows == [] else _kind(rows)
        need(right, f"needs a list of [text, intent] pairs in {key}; got {came}")
        for number, row in enumerate(rows):
            pair = isinstance(row, list) and [type(word) for word in row] == [str, str]
            came = f"row {number} is {json.dumps(row)[:60]}"
            need(pair, f"needs [text, intent], two strings, in {key}; {came}")
    some = any(re.search(r"\w", text) for text, _ in content["train"])
    need(some, "has no word in the texts of train; it needs some to learn from")
    numbers = {intent: i for i, intent in enumerate(sorted({pair[1] for pair in content["train"]}))}
    need(len(numbers) > 1, f"needs two intents or more in train; got {', '.join(numbers)}")
    for key in KEYS:
        found, rule = {pair[1] for pair in content[key]}, "does not have"
        wrong = found - numbers.keys()
        if key in OUT_OF_SCOPE:
            wrong, rule = found & numbers.keys(), "has too"
        need(not wrong, f"has the intent {min(wrong, default='')!r} in {key}, which train {rule}")
    texts = {key: np.asarray([text for text, _ in content[key]], object) for key in KEYS}
    train, validation, test = (
        (texts[key], np.asarray([numbers[intent] for _, intent in content[key]], np.int32))
        for key in IN_SCOPE
    )
    return IntentSet(path.stem, list(numbers), train, validation, test, texts["oos_test"])


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return names.get(type(value), "a number or boolean")


def words(text: str) -> list[str]:
    """The words of a text in lower case; one empty word if there is none.

    >>> words("What's up, Doc?"), words("?!")
    (["what's", 'up', 'doc'], [''])
    """
    return WORD.findall(text.lower()) or [""]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Ids of words, and the length to which sequences are filled up or cut.

    A word of the training texts that is rare there shares its id with others, as in scikit-learn's
    `HashingVectorizer`; so there is something learned for words that only other texts have.

    >>> vocabulary = Vocabulary.of(["play a song", "play it"])
    >>> vocabulary.ids, vocabulary.length, vocabulary.size
    ({'play': 65}, 3, 66)
    >>> vocabulary.encode(["play"])
    array([[65,  0,  0]], dtype=int32)
    """

    ids: dict[str, int]
    length: int

    @classmethod
    def of(cls, texts: Iterable[str]) -> Vocabulary:
        """That of the training texts."""
        split = [words(text) for text in texts]
        counts = Counter(word for text in split for word in text)
        repeated = sorted(word for word, count in counts.items() if count >= LEAST)
        ids = {word: i for i, word in enumerate(repeated, 1 + BUCKETS)}
        return cls(ids, min(LONGEST, max(map(len, split))))

    @property
    def size(self) -> int:
        """Number of ids."""
        return 1 + BUCKETS + len(self.ids)

    def encode(self, texts: Sequence[str] | np.ndarray) -> np.ndarray:
        """Ids (N, length), int32."""
        result = np.full((len(texts), self.length), PADDING, np.int32)
        for row, text in zip(result, texts, strict=True):
            ids = [self._id(word) for word in words(text)[: self.length]]
            row[: len(ids)] = ids
        return result

    def _id(self, word: str) -> int:
        code = murmurhash3_32(word.encode("utf-8", "replace"), positive=True)
        return self.ids.get(word, 1 + code % BUCKETS)


def with_lost_words(key: Array, ids: Array, rate: float) -> Array:
    """Replace a share of the words by random buckets, as if they were rare."""
    choice, other = jax.random.split(key)
    lost = jax.random.bernoulli(choice, rate, ids.shape) & (ids != PADDING)
    return jnp.where(lost, jax.random.randint(other, ids.shape, 1, 1 + BUCKETS, ids.dtype), ids)
