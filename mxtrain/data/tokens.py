"""A text file as sequences of tokens for a language model. The tokens are its bytes.

Sequence i of a file is its bytes i*L to i*L + L: the input is the first L of these L + 1, the label is the last L. The
file is mapped into memory and never read whole.
"""

from __future__ import annotations

import codecs
import os
from dataclasses import dataclass
from typing import List, Optional, Tuple

import numpy as np
from mxnet import gluon

from mxtrain.data.parts import VAL_SPLIT, digest
from mxtrain.data.settings import DataConfig
from mxtrain.errors import UserError

BYTES = [f"0x{value:02x}" for value in range(256)]
"""Names of the tokens, by number."""

_PIECES, _PIECE = 1024, 1 << 16  # that a fingerprint is made of, and bytes of each
_COMPRESSED = ((b"\x1f\x8b", "gzip"), (b"PK\x03\x04", "zip"), (b"BZh", "bzip2"), (b"\xfd7zXZ\0", "xz"),
               (b"\x28\xb5\x2f\xfd", "zstd"))
_UTF16 = (b"\xff\xfe", b"\xfe\xff")

Key = Tuple[int, int]


class TokenDataset(gluon.data.Dataset):
    """Neighbouring sequences of a file. Items for keys (epoch, index), whose epoch plays no part: (L,), (L,) int32.

    content: (bytes of the file,) uint8, mapped. length: L. first, count: of the sequences.
    """

    def __init__(self, content: np.ndarray, length: int, first: int, count: int):
        self.content, self.length, self._first, self._count = content, length, first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, key: Key) -> Tuple[np.ndarray, np.ndarray]:
        x, y = self.rows(np.array([key[1]]))
        return x[0], y[0]

    def rows(self, indices: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """A whole batch at once: (k,) integers -> inputs and labels, (k, L) int32 each."""
        starts = (self._first + np.asarray(indices, np.int64)) * self.length
        tokens = self.content[starts[:, np.newaxis] + np.arange(self.length + 1)].astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]


@dataclass
class TokenData:
    """The sequences of a run: what `open_tokens` returns."""

    name: str
    train: TokenDataset
    val: Optional[TokenDataset]
    classes: List[str]
    """The vocabulary: names of the tokens, by number."""
    fingerprint: str
    """Hex digest; changes with the length of a file, of the sequences and of the parts, and with the bytes of 1,024
    evenly spread pieces of 64 KiB (up to 64 MiB: with every byte), but not with the place on disk."""
    notes: List[str]


def open_tokens(data: DataConfig, length: int) -> TokenData:
    """The sequences of `length` tokens in the file that `data` names; the last ones of it are held out where there is
    no file for validation.

    UserError, naming the flag and the file, for what is no plain text, cannot be read or is too short.
    """
    content, notes = _open("--data", data.data)
    name, count = os.path.splitext(os.path.basename(data.data))[0], _sequences(content, length)
    if not count:
        raise _too_short("--data", data.data, content, length, 1)
    train, val = TokenDataset(content, length, 0, count), None
    if data.val is not None:
        val, more = open_sequences("--val", data.val, length)
        notes += more
        if os.path.realpath(os.path.expanduser(data.val)) == os.path.realpath(os.path.expanduser(data.data)):
            notes.append(f"--val {data.val}: is --data itself")
    elif data.val_split != 0:
        share = VAL_SPLIT if data.val_split is None else data.val_split
        held = max(1, int(share * count))
        if held == count:
            raise _too_short("--data", data.data, content, length, 2)
        train = TokenDataset(content, length, 0, count - held)
        val = TokenDataset(content, length, count - held, held)
    found = f"tokens: {len(content):,} bytes, a token each; sequences of {length}: {len(train):,} for training"
    if val is not None:
        found += f", {'the last ' if data.val is None else ''}{len(val):,} of {data.val or 'the file'} for validation"
    pieces = [_pieces(content), [] if data.val is None else _pieces(val.content)]
    parts = [f"{len(train)} and {len(val) if val else 0} of {length}"]
    return TokenData(name, train, val, BYTES, digest(BYTES, parts, *pieces),
                     [found, *_left_over(data.data, content, length), *notes])


def open_sequences(flag: str, path: str, length: int) -> Tuple[TokenDataset, List[str]]:
    """All sequences of a file, which `flag` names, and what there is to say about it. UserError as open_tokens."""
    content, notes = _open(flag, path)
    count = _sequences(content, length)
    if not count:
        raise _too_short(flag, path, content, length, 1)
    return TokenDataset(content, length, 0, count), [*_left_over(path, content, length), *notes]


def encode(text: str) -> np.ndarray:
    """Text -> (n,) int32 tokens. Bytes that were no UTF-8, as Python takes them from a command line, come out again."""
    return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int32)


def _open(flag: str, path: str) -> Tuple[np.ndarray, List[str]]:
    """(bytes,) uint8, mapped, and notes."""
    place = os.path.expanduser(path)
    if os.path.isdir(place):
        raise UserError(f"{flag} {path}: is a folder; --task lm reads one text file: cat {path}/*.txt > all.txt makes "
                        "one")
    try:
        with open(place, "rb") as file:
            start = file.read(_PIECE)
        content = np.memmap(place, np.uint8, mode="r") if start else np.zeros(0, np.uint8)
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    kind = next((name for magic, name in _COMPRESSED if start.startswith(magic)), None)
    if kind:
        raise UserError(f"{flag} {path}: is compressed ({kind}): unpack it first, since it is read in place")
    if start.startswith(_UTF16):
        raise UserError(f"{flag} {path}: is UTF-16; the tokens are bytes, and generated ones are read as UTF-8: "
                        "convert it (iconv -f utf-16 -t utf-8)")
    return content, _about_bytes(path, start)


def _about_bytes(path: str, start: bytes) -> List[str]:
    """Notes on what does not look like text."""
    if b"\0" in start:
        return [f"{path}: holds NUL bytes, as binary files do; they are learned like any others"]
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)  # whose last letter may be cut in two
    except UnicodeDecodeError as error:
        return [f"{path}: byte 0x{start[error.start]:02x} at {error.start} is not UTF-8: it is learned as it is, but "
                "generated text shows such bytes as \N{REPLACEMENT CHARACTER} (iconv -f cp1252 -t utf-8 converts it)"]
    return []


def _sequences(content: np.ndarray, length: int) -> int:
    return max(0, len(content) - 1) // length


def _left_over(path: str, content: np.ndarray, length: int) -> List[str]:
    rest = len(content) - 1 - _sequences(content, length) * length
    return [f"{path}: its last {rest:,} bytes are not used; they fill no sequence of {length}"] if rest else []


def _too_short(flag: str, path: str, content: np.ndarray, length: int, needed: int) -> UserError:
    purpose = "a sequence" if needed == 1 else "one sequence to train on and one that is held out"
    remedy = f"a --context below {length}" + (", or --val-split 0 to train without validation" if needed == 2 else "")
    return UserError(f"{flag} {path}: has {len(content)} bytes; {purpose} of --context {length} needs "
                     f"{needed * length + 1}; give a longer file, or {remedy}")


def _pieces(content: np.ndarray) -> list:
    """What identifies a file; see TokenData.fingerprint."""
    if len(content) <= _PIECES * _PIECE:
        return [content]
    starts = np.linspace(0, len(content) - _PIECE, _PIECES).astype(np.int64)
    return [f"{len(content)}", *(content[start:start + _PIECE] for start in starts.tolist())]
