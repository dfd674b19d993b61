"""Texts as token ids: repeated training words have their own, others share hashed buckets."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from sklearn.utils import murmurhash3_32

PADDING = 0  # the id of places after the end of a text
BUCKETS = 64  # ids 1 to 64: words that training texts have once at most
LEAST = 2  # occurrences in training texts for a word to get its own id
LONGEST = 32  # words of a text that are read
WORD = re.compile(r"\w+(?:'\w+)*")


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
