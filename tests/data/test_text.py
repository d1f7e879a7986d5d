"""Texts: features by hand, ragged storage, the held-out part, labels, and what is said or refused."""

import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from mxtrain.data.settings import DataConfig
from mxtrain.data.text import Bags, Features, TextDataset, encode, features, open_texts, words
from mxtrain.data.text_settings import TextConfig
from mxtrain.errors import UserError

SMS = Path(__file__).parents[3] / "shared" / "data" / "sms_spam.tsv"
HOW = Features(ngrams=2, buckets=1000, max_tokens=8)


def id_of(run, buckets=1000):
    return 1 + zlib.crc32(run.encode()) % buckets


def table(folder, rows, name="mails.tsv"):
    path = folder / name
    path.write_text("".join(f"{label}\t{text}\n" for label, text in [("label", "text"), *rows]), encoding="utf-8")
    return str(path)


def made_up(count=200):
    """Every fifth is spam; all texts are different."""
    return [("spam" if i % 5 == 0 else "ham", f"{'win' if i % 5 == 0 else 'see'} number {i}") for i in range(count)]


def opened(path, **settings):
    data = {name: settings.pop(name) for name in ("val", "val_split", "label_column") if name in settings}
    return open_texts(DataConfig(data=path, **data), TextConfig(**settings))


def rows_of(dataset):
    ids, y = dataset.rows(np.arange(len(dataset)))
    return [(tuple(row[row > 0]), label) for row, label in zip(ids, y)]


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
    program = "from mxtrain.data.text import *; print(features('Win a prize', Features(2, 1000, 8)))"
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


def test_parts_are_a_share_of_each_class_without_a_text_lost_or_twice(tmp_path):
    rows = made_up(2000)
    data = opened(table(tmp_path, rows), val_split=0.2, ngrams=3)
    assert data.classes == ["ham", "spam"] and data.columns == ("text", "label")
    assert len(data.train) + len(data.val) == 2000
    for label, count in ((0, 1600), (1, 400)):
        held = (data.val.y == label).sum()
        assert abs(held - 0.2 * count) < 4 * np.sqrt(count * 0.2 * 0.8)  # four deviations of a fair draw
    how = Features(3, 2**15, 256)
    expected = sorted((tuple(features(text, how)), ["ham", "spam"].index(label)) for label, text in rows)
    assert sorted(rows_of(data.train) + rows_of(data.val)) == expected


def test_the_split_depends_on_the_texts_alone(tmp_path):
    rows = made_up()
    data = opened(table(tmp_path, rows))
    turned = opened(table(tmp_path, rows[::-1], "turned.tsv"))
    more = opened(table(tmp_path, [*rows, ("ham", "one more")], "more.tsv"))
    assert sorted(rows_of(data.val)) == sorted(rows_of(turned.val))
    assert set(rows_of(data.val)) <= set(rows_of(more.val)) and set(rows_of(data.train)) <= set(rows_of(more.train))


def test_equal_texts_are_in_one_part_and_counted(tmp_path):
    rows = [*made_up(), *made_up(), *((label, text.upper() + " ") for label, text in made_up()), ("ham", "win number 0")]
    data = opened(table(tmp_path, rows))
    assert not {x for x, _ in rows_of(data.train)} & {x for x, _ in rows_of(data.val)}
    assert any("401 of 601 texts repeat" in note for note in data.notes)
    assert any("1 texts occur with different labels, the first in lines 2, 202, 402, 602" in note for note in data.notes)


def test_small_classes_are_in_both_parts(tmp_path):
    for text in range(20):  # wherever their hashes fall
        rows = [*made_up(50), ("rare", f"a {text}"), ("rare", f"b {text}"), ("single", f"c {text}")]
        data = opened(table(tmp_path, rows))
        assert [(part.y == 1).sum() for part in (data.train, data.val)] == [1, 1]
        assert [(part.y == 2).sum() for part in (data.train, data.val)] == [1, 0]


def test_no_validation(tmp_path):
    data = opened(table(tmp_path, made_up()), val_split=0.0)
    assert data.val is None and len(data.train) == 200


def test_a_table_of_its_own_for_validation(tmp_path):
    val = [("spam", "win number 0"), ("spam", "other"), (" spam ", "labels are stripped")]
    data = opened(table(tmp_path, made_up()), val=table(tmp_path, val, "val.tsv"))
    assert (len(data.train), data.val.y.tolist()) == (200, [1, 1, 1])
    assert any("1 of 3 validation texts are training texts too" in note for note in data.notes)
    with pytest.raises(UserError, match="val.tsv, line 3: label 'phish' is none of the classes"):
        opened(table(tmp_path, made_up()), val=table(tmp_path, [val[0], ("phish", "x")], "val.tsv"))


def test_the_fingerprint_follows_texts_labels_and_split_not_the_place(tmp_path):
    rows = made_up()
    print_of = {}
    (tmp_path / "other").mkdir()
    for name, path, settings in [
        ("data", table(tmp_path, rows), {}), ("moved", table(tmp_path / "other", rows, "x.tsv"), {}),
        ("text", table(tmp_path, [*rows[:-1], (rows[-1][0], "changed")], "a.tsv"), {}),
        ("label", table(tmp_path, [*rows[:-1], ("spam", rows[-1][1])], "b.tsv"), {}),
        ("split", table(tmp_path, rows), {"val_split": 0.3}),
    ]:
        print_of[name] = opened(path, **settings).fingerprint
    assert print_of["data"] == print_of["moved"] and len(set(print_of.values())) == 4


def test_labels_that_look_alike_are_named(tmp_path):
    rows = [*made_up(), ("Spam", "a"), ("1", "b"), ("1.0", "c"), ("01", "d")]
    notes = " ".join(opened(table(tmp_path, rows)).notes)
    assert "differ only in case are kept apart: 'Spam', 'spam'" in notes
    assert "the same number are kept apart: '01', '1', '1.0'" in notes


@pytest.mark.parametrize("rows, settings, says", [
    ([("ham", "a"), ("", "b"), ("spam", "c"), (" ", "d")], {}, "in 2 of 4 rows (lines 3, 5)"),
    ([("ham", "a"), ("ham", "b")], {}, "only the label 'ham'"),
    (made_up(), {"text_column": "label", "label_column": "text"}, "200 different labels in 200 rows"),
    (made_up(), {"label_column": "text"}, "--text-column and --label-column are both 'text'"),
    (made_up(), {"text_column": "body"}, "--text-column body"),
    ([("ham", "a"), ("spam", "b")], {}, "no class has two different texts"),
])
def test_what_is_refused(tmp_path, rows, settings, says):
    with pytest.raises(UserError) as error:
        opened(table(tmp_path, rows), **settings)
    assert says in str(error.value)


@pytest.mark.parametrize("settings", [{"ngrams": 0}, {"buckets": 0}, {"buckets": 2**24}, {"max_tokens": 0},
                                      {"text_column": " "}, {"positive": ""}, {"encoding": "utf9"}, {"encoding": "rot13"}])
def test_settings_are_checked(settings):
    with pytest.raises(UserError, match="--" + next(iter(settings)).replace("_", "-")):
        TextConfig(**settings)


@pytest.mark.skipif(not SMS.exists(), reason="the folder shared/data with sms_spam.tsv is not here")
def test_the_sms_data():
    data = opened(str(SMS))
    assert len(data.train) + len(data.val) == 5574
    assert (data.train.y == 1).sum() + (data.val.y == 1).sum() == 747
    texts = [line.split("\t")[1] for line in SMS.read_text(encoding="utf-8").split("\n")[1:-1]]
    assert len(texts) - len(set(texts)) == 416  # and 15 more differ in capitals or spaces only
    assert any("431 of 5574 texts repeat" in note for note in data.notes)
