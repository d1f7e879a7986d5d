"""Text files as sequences of bytes: which, which part, what is said, what is refused."""

import gzip
import re

import numpy as np
import pytest

from mxtrain.data import tokens
from mxtrain.data.settings import DataConfig
from mxtrain.data.tokens import encode, open_tokens
from mxtrain.errors import UserError


@pytest.fixture
def text(tmp_path):
    """Writes a file of bytes; returns its path."""

    def write(content, name="a.txt"):
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


def opened(path, length=5, **given):
    return open_tokens(DataConfig(data=path, **given), length)


CONTENT = bytes(range(100, 153))  # 53 bytes: 10 sequences of 5, and 2 bytes that fill none


@pytest.mark.parametrize("share, train, val", [(None, 9, 1), (0.1, 9, 1), (0.35, 7, 3), (0.05, 9, 1), (0.0, 10, 0)])
def test_sequences_are_those_of_the_file_and_the_last_are_held_out(text, share, train, val):
    data = opened(text(CONTENT), val_split=share)
    assert (len(data.train), 0 if data.val is None else len(data.val)) == (train, val)
    for dataset, first, count in ((data.train, 0, train), (data.val, train, val)):
        for i in range(count):
            x, y = dataset[7, i]
            start = 5 * (first + i)
            assert bytes(x.tolist()) == CONTENT[start:start + 5] and bytes(y.tolist()) == CONTENT[start + 1:start + 6]
    assert any("its last 2 bytes are not used" in note for note in data.notes)
    assert f"{train:,} for training" in data.notes[0]


def test_batches_are_rows_of_whole_numbers(text):
    data = opened(text(CONTENT), val_split=0.2)
    x, y = data.train.rows(np.array([3, 0, 3]))
    assert x.dtype == y.dtype == np.int32 and x.shape == y.shape == (3, 5)
    np.testing.assert_array_equal(x[:, 0], [115, 100, 115])
    np.testing.assert_array_equal(y[:, -1], [120, 105, 120])
    x, _ = data.val.rows(np.array([1]))
    np.testing.assert_array_equal(x, [[145, 146, 147, 148, 149]])


def test_a_file_for_validation(text):
    data = opened(text(CONTENT), val=text(CONTENT[::-1], "b.txt"))
    assert (len(data.train), len(data.val)) == (10, 10)
    assert bytes(data.val[0, 0][0].tolist()) == CONTENT[:-6:-1]
    path = text(CONTENT)
    assert any("is --data itself" in note for note in opened(path, val=path).notes)


def test_files_are_mapped_and_not_read(text, tmp_path):
    path = tmp_path / "large.txt"
    with open(path, "wb") as file:
        file.truncate(1 << 34)  # 16 GiB of nothing, which take no place
    data = opened(str(path), length=1024)
    assert len(data.train) + len(data.val) == (1 << 24) - 1
    assert not data.val[0, len(data.val) - 1][0].any()


def test_the_fingerprint_changes_with_what_is_trained_on_and_not_with_the_place(text, monkeypatch):
    monkeypatch.setattr(tokens, "_PIECES", 4)
    monkeypatch.setattr(tokens, "_PIECE", 8)  # 53 bytes are a large file then: known by 0-7, 15-22, 30-37 and 45-52
    of = opened(text(CONTENT)).fingerprint
    assert opened(text(CONTENT, "elsewhere.txt")).fingerprint == of
    changed = {i: opened(text(CONTENT[:i] + b"#" + CONTENT[i + 1:])).fingerprint != of for i in range(53)}
    assert [i for i, differs in changed.items() if not differs] == [*range(8, 15), *range(23, 30), *range(38, 45)]
    for other in (opened(text(CONTENT + b"#")), opened(text(CONTENT[:-1])), opened(text(CONTENT), length=4),
                  opened(text(CONTENT), val_split=0.2), opened(text(CONTENT), val=text(CONTENT, "b.txt"))):
        assert other.fingerprint != of


def test_a_small_file_is_known_by_all_its_bytes(text):
    of = opened(text(CONTENT)).fingerprint
    assert all(opened(text(CONTENT[:i] + b"#" + CONTENT[i + 1:])).fingerprint != of for i in range(53))


@pytest.mark.parametrize("size, given, says", [
    (0, {}, "has 0 bytes; a sequence of --context 5 needs 6"),
    (5, {}, "has 5 bytes; a sequence of --context 5 needs 6"),
    (10, {}, "one sequence to train on and one that is held out of --context 5 needs 11"),
    (10, {"val_split": 0.3}, "--val-split 0"),
])
def test_files_that_are_too_short(text, size, given, says):
    with pytest.raises(UserError, match=re.escape(says)):
        opened(text(CONTENT[:size]), **given)


def test_the_shortest_files(text):
    assert len(opened(text(CONTENT[:6]), val_split=0).train) == 1
    data = opened(text(CONTENT[:11]))
    assert (len(data.train), len(data.val)) == (1, 1)
    with pytest.raises(UserError, match="--val .*b.txt: has 5 bytes; a sequence"):
        opened(text(CONTENT), val=text(CONTENT[:5], "b.txt"))


def test_what_is_no_plain_text_is_refused(text, tmp_path):
    for content, says in ((gzip.compress(CONTENT), "is compressed (gzip)"),
                          (b"PK\3\4" + CONTENT, "is compressed (zip)"),
                          ("Text that is long enough".encode("utf-16"), "is UTF-16")):
        for given in ({}, {"val": text(content, "b.txt")}):
            with pytest.raises(UserError, match=re.escape(says)):
                opened(text(CONTENT if given else content), **given)
    with pytest.raises(UserError, match="is a folder; --task lm reads one text file"):
        opened(str(tmp_path))
    with pytest.raises(UserError, match="none.txt: cannot be read .No such file"):
        opened(str(tmp_path / "none.txt"))


def test_odd_bytes_are_learned_and_told(text):
    assert "holds NUL bytes" in opened(text(bytes(60))).notes[-1]
    assert "byte 0xe9 at 3 is not UTF-8" in opened(text(b"caf\xe9, " * 10)).notes[-1]
    for fine in ("caf\u00e9, ".encode() * 10, ("caf\u00e9" * 10).encode()[:-1], b"\xef\xbb\xbf" + 60 * b"a"):
        assert not any("UTF-8" in note for note in opened(text(fine)).notes)


def test_encoding():
    assert encode("h\u00e9").tolist() == [104, 0xc3, 0xa9] and encode("\udcff").tolist() == [255]
