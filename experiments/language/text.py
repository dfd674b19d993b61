"""Python's own documentation of its topics, and foreign text to compare with."""

from __future__ import annotations

import argparse
import codecs
import dataclasses
import inspect
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

TRAIN, VALIDATION = 0.90, 0.05  # shares of the text, in its order; the rest is the test
PLAIN_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u2013", "''\"\"-")
SOURCE = argparse  # a module of the standard library of about the test's length or more


class Texts(NamedTuple):
    """Parts of one text, and foreign texts of the test's length at most."""

    train: str
    validation: str
    test: str
    foreign: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Characters, each with its place as its token.

    >>> Vocabulary.of("banana").encode("nab").tolist()
    [2, 0, 1]
    """

    characters: str

    @classmethod
    def of(cls, text: str) -> Vocabulary:
        """Those that occur in the text."""
        return cls("".join(sorted(set(text))))

    def encode(self, text: str) -> np.ndarray:
        """Tokens, int32."""
        tokens = {character: i for i, character in enumerate(self.characters)}
        for place, character in enumerate(text):
            if character not in tokens:
                raise ValueError(
                    f"`encode` needs text of the {len(tokens)} characters of the vocabulary. Got "
                    f"{character!r} at {place}. Drop such characters by `keep`, or map them first."
                )
        return np.fromiter((tokens[character] for character in text), np.int32, len(text))

    def decode(self, tokens: np.ndarray) -> str:
        """The text of these tokens; negative ones, which are padding, are left out."""
        return "".join(self.characters[int(token)] for token in tokens if token >= 0)

    def keep(self, text: str) -> str:
        """The text without the characters that are not in the vocabulary."""
        return "".join(character for character in text if character in self.characters)


def load() -> tuple[Texts, Vocabulary]:
    """All topics in the order of their names, in ASCII, cut by place; no download.

    The vocabulary is of the training part. What else occurs in the others is dropped.
    """
    text = "\n".join(topics[name] for name in sorted(topics)).translate(PLAIN_QUOTES)
    text = text.encode("ascii", "ignore").decode()
    first, second = int(TRAIN * len(text)), int((TRAIN + VALIDATION) * len(text))
    vocabulary = Vocabulary.of(text[:first])
    test = vocabulary.keep(text[second:])
    foreign = {
        "Python source": vocabulary.keep(inspect.getsource(SOURCE))[: len(test)],
        "rot13 of the test": codecs.encode(test, "rot13"),
    }
    validation = vocabulary.keep(text[first:second])
    return Texts(text[:first], validation, test, foreign), vocabulary


def windows(tokens: np.ndarray, length: int, most: int | None = None) -> np.ndarray:
    """Windows (N, length + 1) of a text, each beginning with the last token of the one before it.

    All tokens but the first of each are predicted, so every token of the text is predicted once, except
    for a remainder. At most `most` of them, evenly spread.
    """
    count = (len(tokens) - 1) // length
    starts = length * np.arange(count)
    if most is not None and count > most:
        starts = starts[np.linspace(0, count - 1, most).round().astype(int)]
    return tokens[starts[:, None] + np.arange(length + 1)[None, :]]
