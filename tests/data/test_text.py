"""Texts of a table: the held-out part, labels, and what is said or refused."""

from pathlib import Path

import numpy as np
import pytest

from mxtrain.data.bags import Features, features
from mxtrain.data.settings import DataConfig
from mxtrain.data.text import open_texts
from mxtrain.data.text_settings import TextConfig
from mxtrain.errors import UserError

SMS = Path(__file__).parents[3] / "shared" / "data" / "sms_spam.tsv"


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
    louder = [(label, text.upper() + " ") for label, text in made_up()]
    rows = [*made_up(), *made_up(), *louder, ("ham", "win number 0")]
    data = opened(table(tmp_path, rows))
    assert not {x for x, _ in rows_of(data.train)} & {x for x, _ in rows_of(data.val)}
    assert any("401 of 601 texts repeat" in note for note in data.notes)
    several = "1 texts occur with different labels, the first in lines 2, 202, 402, 602"
    assert any(several in note for note in data.notes)


def test_small_classes_are_in_both_parts(tmp_path):
    for text in range(20):  # wherever their hashes fall
        rows = [*made_up(50), ("rare", f"a {text}"), ("rare", f"b {text}"), ("single", f"c {text}")]
        data = opened(table(tmp_path, rows))
        assert [(part.y == 1).sum() for part in (data.train, data.val)] == [1, 1]
        assert [(part.y == 2).sum() for part in (data.train, data.val)] == [1, 0]
        assert any("no validation texts of class 'single'" in note for note in data.notes)


def test_a_class_that_is_held_out_whole_is_named(tmp_path):
    """Its only text is another class's too, and held out with that one's."""
    spoken = []
    for i in range(40):
        data = opened(table(tmp_path, [*made_up(50), ("ham", f"both {i}"), ("odd", f"both {i}")]), val_split=0.5)
        held = not (data.train.y == 1).any()
        assert any("no training texts of class 'odd'" in note for note in data.notes) == held
        spoken.append(held)
    assert 5 < sum(spoken) < 35  # a fair coin's, but for one in a million


def test_no_validation(tmp_path):
    data = opened(table(tmp_path, made_up()), val_split=0.0)
    assert data.val is None and len(data.train) == 200


def test_a_table_of_its_own_for_validation(tmp_path):
    val = [("spam", "win number 0"), ("spam", "other"), (" spam ", "labels are stripped")]
    data = opened(table(tmp_path, made_up()), val=table(tmp_path, val, "val.tsv"))
    assert (len(data.train), data.val.y.tolist()) == (200, [1, 1, 1])
    assert any("1 of 3 validation texts are training texts too" in note for note in data.notes)
    assert any("val.tsv: no validation texts of class 'ham'" in note for note in data.notes)
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
                                      {"text_column": " "}, {"positive": ""}, {"encoding": "utf9"},
                                      {"encoding": "rot13"}])
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
