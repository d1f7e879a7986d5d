"""Reads MXNet's .params files without MXNet, whose own reader lets one damaged byte fill the memory.

All numbers are little-endian. A file is: uint64 0x112; uint64 0; uint64 number of arrays; the arrays; uint64
number of names; for each name uint64 length and its bytes. A dense array is: uint32 magic; int32 storage type
0 (not in version 1); uint32 number of axes; int64 sizes; int32 device type, int32 device id (of the device
that it was saved on); int32 element type; the elements. The oldest files have the number of axes in
place of the magic, and uint32 sizes.
"""

from __future__ import annotations

import struct
from typing import Dict, Tuple

import numpy as np

_FILE = 0x112
_DENSE_1, _DENSE_2, _DENSE_NUMPY = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_MOST_AXES = 32
_DTYPES = {0: "<f4", 1: "<f8", 2: "<f2", 3: "u1", 4: "<i4", 5: "i1", 6: "<i8", 7: "?"}


class FormatError(ValueError):
    """The bytes are no .params file, are damaged, or hold what is no plain dense array."""


def parse(content: bytes) -> Dict[str, np.ndarray]:
    """Name -> array; the arrays are read-only views of `content`. Raises FormatError."""
    cursor = _Cursor(content)
    if cursor.numbers("<Q") != (_FILE,):
        raise FormatError("it does not begin like one")
    cursor.numbers("<Q")
    arrays = [cursor.array() for _ in range(cursor.count())]
    names = [cursor.text() for _ in range(cursor.count())]
    if len(names) != len(arrays) or len(set(names)) != len(names) or cursor.left():
        counts = f"{len(arrays)} arrays, {len(set(names))} names and {cursor.left()} bytes too many"
        raise FormatError(f"it has {counts}")
    return dict(zip(names, arrays))


class _Cursor:
    def __init__(self, content: bytes):
        self._content, self._at = memoryview(content), 0

    def left(self) -> int:
        return len(self._content) - self._at

    def take(self, size: int) -> memoryview:
        if size > self.left():
            raise FormatError("it ends too early")
        self._at += size
        return self._content[self._at - size:self._at]

    def numbers(self, layout: str) -> Tuple[int, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def count(self) -> int:
        (count,) = self.numbers("<Q")
        if count > self.left():  # each array or name takes more than a byte
            raise FormatError("it ends too early")
        return count

    def text(self) -> str:
        (length,) = self.numbers("<Q")
        try:
            return bytes(self.take(length)).decode()
        except UnicodeDecodeError:
            raise FormatError("a name is no text") from None

    def array(self) -> np.ndarray:
        shape = self._shape()
        _, _, kind = self.numbers("<iii")
        if kind not in _DTYPES:
            raise FormatError(f"an array has the unknown element type {kind}")
        dtype = np.dtype(_DTYPES[kind])
        size = dtype.itemsize
        for n in shape:  # Python's integers: a damaged size cannot wrap around
            size *= n
        return np.frombuffer(self.take(size), dtype).reshape(shape)

    def _shape(self) -> Tuple[int, ...]:
        (magic,) = self.numbers("<I")
        if magic in (_DENSE_2, _DENSE_NUMPY) and self.numbers("<i") != (0,):
            raise FormatError("it holds sparse arrays")
        known = magic in (_DENSE_1, _DENSE_2, _DENSE_NUMPY)
        axes = self.numbers("<I")[0] if known else magic
        if not 0 < axes <= _MOST_AXES and not (axes == 0 and magic == _DENSE_NUMPY):
            raise FormatError(f"an array has {axes} axes")
        shape = self.numbers(f"<{axes}{'q' if known else 'I'}")
        if min(shape, default=1) < 0:
            raise FormatError(f"an array has the shape {shape}")
        return shape
