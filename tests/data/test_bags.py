"""Bags of words: features by hand, and their ragged storage."""

import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np

from mxtrain.data.bags import Bags, Features, TextDataset, encode, features, words

HOW = Features(ngrams=2, buckets=1000, max_tokens=8)


def id_of(run, buckets=1000):
    return 1 + zlib.crc32(run.encode()) % buckets


def test_words_are_unicode_words_and_signs_in_lower_case():
    assert words("Win £1,000 NOW!! ﬁne Ünder_score") == ["win", "£", "1", ",", "000", "now", "!", "!", "fine",
                                                         "ünder_score"]
    assert words("e\u0301") == words("\u00e9")  # one letter in two spellings
    assert words("  \n ") == []


def test_features_are_words_then_pairs():
    assert features("Win a prize", HOW) == [id_of(run) for run in ("win", "a", "prize", "win a", "a prize")]
    assert features("Win a prize", HOW._replace(ngrams=1)) == [id_of(run) for run in ("win", "a", "prize")]
    assert features("a b c", HOW._replace(ngrams=3))[-1] == id_of("a b c")
    assert features("", HOW) == []
    assert set(features("one two three", HOW._replace(buckets=1))) == {1}


def test_features_are_the_same_in_every_process():
    program = "from mxtrain.data.bags import *; print(features('Win a prize', Features(2, 1000, 8)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                          env={"PYTHONHASHSEED": "12345", "OMP_NUM_THREADS": "1",
                               "PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.stdout.strip() == str(features("Win a prize", HOW))


def test_long_and_empty_texts_are_counted():
    bags = encode(["a b c d e", "", "a", "?"], HOW)
    assert np.diff(bags.starts).tolist() == [8, 0, 1, 1] and (bags.cut, bags.empty) == (1, 1)
    assert bags.ids[:5].tolist() == [id_of(letter) for letter in "abcde"]  # the pairs are cut first


def test_rows_of_ragged_texts():
    bags = Bags(np.array([3, 1, 2, 2, 5, 9, 7], np.int32), np.array([0, 2, 2, 6, 7]), cut=0)
    data = TextDataset(bags, np.array([0, 1, 0, 1], np.int32), width=4)
    ids, y = data.rows(np.array([2, 0, 1, 2]))
    np.testing.assert_array_equal(ids, [[2, 2, 5, 9], [3, 1, 0, 0], [0, 0, 0, 0], [2, 2, 5, 9]])
    np.testing.assert_array_equal(y, [0, 0, 1, 0])
    assert (ids.dtype, y.dtype, len(data)) == (np.int32, np.int32, 4)
    x, label = data[(5, 3)]
    np.testing.assert_array_equal(x, [7, 0, 0, 0])
    assert label == 1
