"""RecordIO files: records one after the other, an index of where they begin, and what lies beside them.

A record is one or more pieces, each a magic word, a word with the piece's kind (3 bits) and its length (29
bits), and its bytes, filled up with zeros to whole words of 4 bytes. Where the magic word occurs in a record at
a whole word, the record is cut there and the word left out, so that whoever finds it in a file has found the
head of a piece. Image records start with a header: number of further labels, label, number of the record. The
format is that of dmlc-core's recordio.h and of mxnet.recordio.
"""

from __future__ import annotations

import json
import os
import struct
from typing import Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from mxtrain import files
from mxtrain.errors import UserError

MAGIC = struct.pack("<I", 0xCED7230A)
MAX_PIECE = (1 << 29) - 1
FORMAT = 1

_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_HEAD = struct.Struct("<4sI")
_IMAGE = struct.Struct("<IfQQ")
_PEEK = _HEAD.size + _IMAGE.size + 4


class Paths(NamedTuple):
    """A record file and what lies beside it: index, list of names, class names, and what wrote it and how."""

    rec: str
    idx: str
    lst: str
    classes: str
    json: str


class Head(NamedTuple):
    """Where a record lies in its file, and its image header. labels: further labels that follow the header."""

    start: int
    end: int
    labels: int
    label: float
    number: int


class BrokenRecord(Exception):
    """Why no record could be read, without the file's name."""


def paths_of(path: str) -> Paths:
    """`path` with its extension (.rec or .idx) or without."""
    stem = path[:-4] if path.lower().endswith((".rec", ".idx")) else path
    return Paths(*(stem + ending for ending in (".rec", ".idx", ".lst", ".classes.txt", ".json")))


def pack(label: float, number: int, content: bytes) -> bytes:
    """An image record, as it stands in a file."""
    return frame(_IMAGE.pack(0, label, number, 0) + content)


def frame(record: bytes) -> bytes:
    """A record of any content, as it stands in a file. UserError for more than 512 MB."""
    if len(record) > MAX_PIECE:
        raise UserError(f"a record of {len(record)} bytes: RecordIO holds {MAX_PIECE} at most")
    if MAGIC not in record:  # nearly always
        return _HEAD.pack(MAGIC, _WHOLE << 29 | len(record)) + record + bytes(-len(record) % 4)
    pieces: List[bytes] = []
    start, place = 0, record.find(MAGIC)
    while place >= 0:
        if place % 4:
            place = record.find(MAGIC, place + 1)
            continue
        kind = _MIDDLE if pieces else _FIRST
        pieces += [_HEAD.pack(MAGIC, kind << 29 | place - start), record[start:place]]
        start = place + 4
        place = record.find(MAGIC, start)
    kind = _LAST if pieces else _WHOLE
    pieces += [_HEAD.pack(MAGIC, kind << 29 | len(record) - start), record[start:]]
    return b"".join(pieces) + bytes(-(len(record) - start) % 4)


def unframe(stored: bytes) -> bytes:
    """The opposite of frame. BrokenRecord when `stored` is not exactly one record."""
    pieces, place = [], 0
    while True:
        if len(stored) - place < _HEAD.size:
            raise BrokenRecord("cut short")
        magic, word = _HEAD.unpack_from(stored, place)
        kind, length = word >> 29, word & MAX_PIECE
        if magic != MAGIC or (kind in (_WHOLE, _FIRST)) != (not pieces) or kind > _LAST:
            raise BrokenRecord("no record begins where one should")
        place += _HEAD.size
        pieces.append(stored[place : place + length])
        place += length + -length % 4
        if place > len(stored):
            raise BrokenRecord("cut short")
        if kind in (_WHOLE, _LAST):
            break
    if place != len(stored):
        raise BrokenRecord("longer or shorter than its place in the file")
    return pieces[0] if len(pieces) == 1 else MAGIC.join(pieces)


def unpack(record: bytes) -> Tuple[Head, bytes]:
    """The image header and the content behind it. BrokenRecord when there is no header."""
    if len(record) < _IMAGE.size:
        raise BrokenRecord(f"{len(record)} bytes, too few for the header of an image record")
    labels, label, number, _ = _IMAGE.unpack_from(record)
    if labels == 1 and len(record) >= _IMAGE.size + 4:
        label = struct.unpack_from("<f", record, _IMAGE.size)[0]
    return Head(0, len(record), labels, label, number), record[_IMAGE.size + 4 * labels :]


class RecordFile:
    """A .rec file that any number of threads may read at once: there is no position that they would share."""

    _descriptor = -1

    def __init__(self, path: str):
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        self.size = os.fstat(self._descriptor).st_size

    def __del__(self):
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read(self, start: int, end: int) -> bytes:
        """The bytes start..end, or fewer where the file ends."""
        parts = []
        while start < end:  # one read gives 2 GB at most
            part = os.pread(self._descriptor, end - start, start)
            if not part:
                break
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def heads(self) -> Iterator[Head]:
        """Walks the whole file, reading no more than the records' heads. UserError, with the byte, for damage."""
        start, count = 0, 0
        while start < self.size:
            try:
                head = self._head(start)
            except BrokenRecord as error:
                raise UserError(f"{self.path}: record {count}, at byte {start} of {self.size}: {error}") from None
            yield head
            start, count = head.end, count + 1

    def _head(self, start: int) -> Head:
        first = self.read(start, start + _PEEK)
        end, kind = self._piece(first, start)
        if kind not in (_WHOLE, _FIRST):
            raise BrokenRecord("no record begins here: the file is damaged")
        whole = kind == _WHOLE
        while kind not in (_WHOLE, _LAST):
            end, kind = self._piece(self.read(end, end + _HEAD.size), end)
            if kind not in (_MIDDLE, _LAST):
                raise BrokenRecord("its last piece is missing: the file is damaged")
        # The header itself is nearly always in the first piece, which ends where the magic word occurs.
        length = _HEAD.unpack_from(first)[1] & MAX_PIECE
        record = first[_HEAD.size : _HEAD.size + length] if whole else unframe(self.read(start, end))
        return unpack(record)[0]._replace(start=start, end=end)

    def _piece(self, head: bytes, start: int) -> Tuple[int, int]:
        """Where a piece ends, and its kind, from its first bytes."""
        if head[:4] != MAGIC and head[:4]:
            raise BrokenRecord("no record begins here: the file is damaged, or no RecordIO file")
        if len(head) < _HEAD.size:
            raise BrokenRecord("the file is cut short here")
        word = _HEAD.unpack_from(head)[1]
        length = word & MAX_PIECE
        end = start + _HEAD.size + length + -length % 4
        if end > self.size:
            raise BrokenRecord(f"the file is cut short here: the record ends at byte {end}")
        return end, word >> 29


def read_index(path: str) -> Tuple[np.ndarray, np.ndarray]:
    """Numbers and first bytes of an index's records -> two (n,) int64. UserError, with the line, for a bad one."""
    with open(path, "rb") as file:
        content = file.read()
    words = content.split()
    try:
        columns = np.array(words, np.int64).reshape(-1, 2)
        if content.count(b"\t") == len(columns) and (columns >= 0).all():
            return columns[:, 0], columns[:, 1]
    except (ValueError, OverflowError):
        pass
    for line, text in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        fields = text.split("\t")
        if len(fields) != 2 or not all(field.strip().isdigit() for field in fields):
            raise UserError(f"{path}, line {line}: {text[:40]!r} is not a number, a tab and a byte of the .rec file")
    raise UserError(f"{path}: is not an index of lines with a number, a tab and a byte of the .rec file")


def index_text(numbers: np.ndarray, starts: np.ndarray) -> str:
    """The opposite of read_index."""
    return "".join(f"{number}\t{start}\n" for number, start in zip(numbers, starts))


def read_about(paths: Paths, size: int) -> Tuple[Optional[dict], Optional[str]]:
    """What make_records.py said about a file that it wrote -> that, and None; or None and why it is not used.

    It is used when the size of the .rec file and the checksums of the small files agree.
    """
    if not os.path.isfile(paths.json):
        return None, None
    try:
        with open(paths.json, encoding="utf-8") as file:
            about = json.load(file)
        if about["format"] != FORMAT:
            return None, f"{paths.json}: format {about['format']} is not known here; it is not used"
        stale = about["bytes"] != size or any(
            about[key] != files.sha256(path) for key, path in (("idx_sha256", paths.idx), ("lst_sha256", paths.lst))
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None, f"{paths.json}: cannot be read, or a file that it tells of is missing; it is not used"
    return (None, f"{paths.json}: does not belong to {paths.rec} as it is; it is not used") if stale else (about, None)


def read_classes(path: str) -> Optional[List[str]]:
    """Class names, one a line, or None without such a file. UserError for one that is there twice."""
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8-sig") as file:
            names = file.read().rstrip("\n").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8") from None
    seen = set()
    for line, name in enumerate(names, start=1):
        if not name or name in seen:
            raise UserError(f"{path}, line {line}: {f'class {name!r} is there twice' if name else 'no class name'}")
        seen.add(name)
    return names
