"""Hashed bags of words: how a text becomes ids, and a dataset of them in memory.

A text is its lower-cased words and signs, and runs of neighbouring ones. Each becomes the number of a bucket by a hash
of its letters (Weinberger et al. 2009, "Feature Hashing"), so that there is no vocabulary to build or to keep.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from array import array
from typing import Iterable, List, NamedTuple, Optional, Tuple

import numpy as np
from mxnet import gluon

WORD = re.compile(r"\w+|[^\w\s]")


class Features(NamedTuple):
    """How a text becomes ids; saved with a run, so that predictions see what training saw."""

    ngrams: int
    buckets: int
    max_tokens: int


class Bags(NamedTuple):
    """The ids of some texts, one after the other, and where each text begins and the last ends."""

    ids: np.ndarray
    """int32, from 1 on."""
    starts: np.ndarray
    """int64, one more than there are texts."""
    cut: int
    """Number of texts of which only the first features were taken."""

    @property
    def empty(self) -> int:
        """Number of texts without any words."""
        return int((np.diff(self.starts) == 0).sum())


class TextDataset(gluon.data.Dataset):
    """Bags of words in memory. y: (n,) integers, the labels.

    An item has its ids first, and 0 in the rest of `width`, which no text is longer than. The epoch of a key plays no
    part. path, lines: where the texts come from, for messages.
    """

    def __init__(self, bags: Bags, y: np.ndarray, width: int, path: str = "texts", lines: Optional[List[int]] = None):
        self.y, self._width, self._ids, self._starts = y, width, bags.ids, bags.starts
        self._path, self._lines = path, lines or range(1, len(y) + 1)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, key: Tuple[int, int]) -> Tuple[np.ndarray, np.int32]:
        ids, y = self.rows(np.array([key[1]]))
        return ids[0], y[0]

    def rows(self, indices: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """A whole batch at once: (k,) integers -> ids: (k, width) int32, y: (k,) int32."""
        starts = self._starts[indices][:, np.newaxis]
        places = np.arange(self._width)
        used = places < self._starts[indices + 1][:, np.newaxis] - starts
        ids = np.zeros(used.shape, np.int32)
        ids[used] = self._ids[(starts + places)[used]]
        return ids, self.y[indices]

    def describe(self, index: int) -> str:
        """The text's place, for messages."""
        return f"{self._path}, line {self._lines[index]}"


def words(text: str) -> List[str]:
    """The words and signs of a text, lower-cased, with one spelling for what Unicode holds to be the same (NFKC)."""
    return WORD.findall(unicodedata.normalize("NFKC", text).lower())


def features(text: str, how: Features) -> List[int]:
    """The ids of a text, all of them: of its words, then of its pairs, and so on; from 1 to how.buckets."""
    found = words(text)
    runs = (" ".join(found[i:i + length]) for length in range(1, how.ngrams + 1)
            for i in range(len(found) - length + 1))
    # Not Python's hash, which is another one in every process.
    return [1 + zlib.crc32(run.encode("utf-8", "surrogatepass")) % how.buckets for run in runs]


def encode(texts: Iterable[str], how: Features) -> Bags:
    """The ids of texts, at most how.max_tokens of each."""
    ids, ends, cut = array("i"), [0], 0  # and not a list: Python's numbers take ten times the memory
    for text in texts:
        own = features(text, how)
        cut += len(own) > how.max_tokens
        ids.extend(own[:how.max_tokens])
        ends.append(len(ids))
    return Bags(np.array(ids, np.int32), np.array(ends, np.int64), cut)
