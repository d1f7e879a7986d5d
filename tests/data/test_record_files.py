"""RecordIO framing against mxnet.recordio, and what is said about damage."""

import struct

import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxnet import recordio
from mxtrain.data.record_files import (
    MAGIC,
    BrokenRecord,
    RecordFile,
    frame,
    index_text,
    pack,
    paths_of,
    read_about,
    read_classes,
    read_index,
    unframe,
    unpack,
)
from mxtrain.errors import UserError

# The magic word at whole words, beside them, at the ends, doubled, and in a tail that is no whole word.
RECORDS = [
    b"",
    b"a",
    b"abcd",
    MAGIC,
    MAGIC * 3,
    b"a" + MAGIC + b"bcd" + MAGIC,
    b"abcd" + MAGIC + b"efgh" + MAGIC,
    b"abcd" + MAGIC + b"e",
    b"abcde" + MAGIC,
    b"abcd" + MAGIC[:3],
    bytes(1000) + MAGIC + bytes(1001),
]


def test_mxnet_writes_the_same_bytes(tmp_path):
    path = tmp_path / "a.rec"
    writer = recordio.MXRecordIO(str(path), "w")
    for record in RECORDS:
        writer.write(record)
    writer.close()
    assert path.read_bytes() == b"".join(frame(record) for record in RECORDS)


def test_mxnet_reads_what_is_written(tmp_path):
    path = tmp_path / "a.rec"
    path.write_bytes(b"".join(frame(record) for record in RECORDS))
    reader = recordio.MXRecordIO(str(path), "r")
    for record in RECORDS[1:]:
        if record == RECORDS[1]:
            reader.read()  # the empty record
        assert reader.read() == record


@pytest.mark.parametrize("record", RECORDS)
def test_unframe_is_the_opposite(record):
    assert unframe(frame(record)) == record
    assert len(frame(record)) % 4 == 0


def test_random_records_of_magic_and_other_words():
    rng = np.random.RandomState(0)
    for _ in range(300):
        others = [bytes(rng.randint(0, 256, rng.randint(1, 6)).tolist()) for _ in range(6)]
        record = b"".join(MAGIC if rng.rand() < 0.4 else other for other in others)
        assert unframe(frame(record)) == record


def test_the_image_header_is_that_of_mxnet():
    for label, expected in ((7.0, 7.0), ([3.0], 3.0)):
        packed = recordio.pack(recordio.IRHeader(0, label, 12, 0), b"content")
        head, content = unpack(packed)
        assert (head.label, head.number, content) == (expected, 12, b"content")
    assert pack(7, 12, b"content") == frame(recordio.pack(recordio.IRHeader(0, 7.0, 12, 0), b"content"))
    several = recordio.pack(recordio.IRHeader(0, [1.0, 2.0], 12, 0), b"content")
    assert unpack(several)[0].labels == 2 and unpack(several)[1] == b"content"


def test_heads_of_a_file_with_pieces_in_the_header(tmp_path):
    path = tmp_path / "a.rec"
    number = struct.unpack("<I", MAGIC)[0]  # the header of record 1 holds the magic word itself
    path.write_bytes(pack(1, 0, b"ab") + pack(2, number, b"x" * 9 + MAGIC) + pack(3, 2, b""))
    heads = list(RecordFile(str(path)).heads())
    assert [(head.label, head.number) for head in heads] == [(1, 0), (2, number), (3, 2)]
    assert heads[0].start == 0 and heads[-1].end == path.stat().st_size
    assert [head.end for head in heads[:-1]] == [head.start for head in heads[1:]]


@pytest.mark.parametrize("cut", [1, 7, 8, 20, 33, 40])
def test_a_file_cut_short_is_named_with_the_record(tmp_path, cut):
    path = tmp_path / "a.rec"
    whole = pack(1, 0, b"abcdefgh") + pack(1, 1, b"abcdefgh")
    path.write_bytes(whole[: len(whole) // 2 + cut] if cut < 40 else whole + b"\0" * 8)
    with pytest.raises(UserError, match=r"a\.rec: record [12], at byte 4?8?0? ?.*(cut short|no record begins)"):
        list(RecordFile(str(path)).heads())


def test_what_is_no_record_file_is_named(tmp_path):
    path = tmp_path / "a.rec"
    for content, text in (
        (b"\x89PNG and more than that" * 4, "no record begins here"),
        (frame(b"too short"), "9 bytes, too few for the header"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"a.rec: record 0, at byte 0 of .*{text}"):
            list(RecordFile(str(path)).heads())
    with pytest.raises(UserError, match="gone.rec: cannot be read: No such file"):
        RecordFile(str(tmp_path / "gone.rec"))


def test_a_record_and_its_place_must_agree():
    stored = frame(b"abcd" + MAGIC + b"efgh")
    for wrong in (stored[:-4], stored + bytes(4), stored[4:], stored[:5], b"", stored[12:]):
        with pytest.raises(BrokenRecord):
            unframe(wrong)


def test_an_index_is_read_and_written(tmp_path):
    path = tmp_path / "a.idx"
    path.write_text(index_text([0, 5, 12345678901], [0, 40, 2**40]))
    numbers, starts = read_index(str(path))
    assert numbers.tolist() == [0, 5, 12345678901] and starts.tolist() == [0, 40, 2**40]
    for text, line in (("0\t0\nx\t40\n", 2), ("0 0\n", 1), ("0\t0\t1\n", 1), ("0\t0\n1\t-4\n", 2), ("0\t0\n1\n2\n", 2)):
        path.write_text(text)
        with pytest.raises(UserError, match=f"a.idx, line {line}: "):
            read_index(str(path))


def test_paths_have_an_extension_or_not():
    assert paths_of("a/b") == paths_of("a/b.rec") == paths_of("a/b.idx")
    assert paths_of("a/b.rec").classes == "a/b.classes.txt"


def test_class_names_are_one_a_line(tmp_path):
    path = tmp_path / "classes.txt"
    assert read_classes(str(path)) is None
    path.write_text("ant\nbée bee\n", encoding="utf-8")
    assert read_classes(str(path)) == ["ant", "bée bee"]
    for content, text in (
        (b"ant\nant\n", "line 2: class 'ant' is there twice"),
        (b"ant\n\nbee\n", "line 2: no class name"),
        (b"\xff", "is not UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=text):
            read_classes(str(path))


def test_a_sidecar_that_cannot_be_read_is_not_used(tmp_path):
    paths = paths_of(str(tmp_path / "a"))
    assert read_about(paths, 10) == (None, None)
    unknown = ('{"format": 9}', "format 9 is not known")
    for content, text in (("{", "cannot be read"), ("[]", "cannot be read"), unknown):
        (tmp_path / "a.json").write_text(content)
        about, fault = read_about(paths, 10)
        assert about is None and text in fault
