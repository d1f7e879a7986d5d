"""JPEG files of which only the part is decoded that a crop needs.

The pixels are those of decoding all of it, bit for bit. Where a crop is at least 2, 4 or 8 times as large as what it
will be scaled to, the decoder itself scales it down by that number, which averages over blocks of as many pixels.

Cropped decoding needs libjpeg-turbo 3, which the package turbojpeg brings along; without it OpenCV decodes the whole
picture, to the same pixels.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.metadata
import logging
import struct
import threading
from typing import NamedTuple, Optional, Tuple

import cv2
import numpy as np

from mxtrain.errors import BadSample

_log = logging.getLogger("mxtrain")

Box = Tuple[int, int, int, int]
"""Top, left, height, width."""

FACTORS = (8, 4, 2, 1)

# EXIF orientation -> whether the stored picture is to be transposed, then turned upside down, then mirrored.
_TURNS = {1: (False, False, False), 2: (False, False, True), 3: (False, True, True), 4: (False, True, False),
          5: (True, False, False), 6: (True, False, True), 7: (True, True, True), 8: (True, True, False)}

_EXIF, _SOS, _START = b"Exif\0\0", 0xDA, b"\xff\xd8"
_FRAMES = {0xC0, 0xC1, 0xC2}  # baseline, extended and progressive, with Huffman codes


class Header(NamedTuple):
    """As stored, before it is turned upright."""

    height: int
    width: int
    orientation: int


class Jpeg:
    """An encoded picture with one or three components, of which parts can be had as RGB, upright.

    encoded: the whole file. name: for messages.
    """

    def __init__(self, encoded: bytes, header: Header, name: str):
        self._encoded, self._header, self._name = encoded, header, name
        self._transposed, self._down, self._mirrored = _TURNS[header.orientation]
        self._decoded = {}  # factor -> picture, without libjpeg-turbo
        height, width = header.height, header.width
        self.shape = (width, height, 3) if self._transposed else (height, width, 3)
        """Height, width and channels, upright."""

    def cut(self, box: Box, at_least: Tuple[int, int]) -> np.ndarray:
        """The pixels of a box, scaled down by the largest of FACTORS that leaves `at_least` (height, width).

        -> (h, w, 3) uint8. BadSample when it cannot be decoded.
        """
        factor = next((f for f in FACTORS if box[2] >= f * at_least[0] and box[3] >= f * at_least[1]), 1)
        pixels = self._stored(_reduced(self._as_stored(box), factor), factor)
        if self._transposed:
            pixels = pixels.transpose(1, 0, 2)
        if self._down:
            pixels = pixels[::-1]
        return pixels[:, ::-1] if self._mirrored else pixels

    def _as_stored(self, box: Box) -> Box:
        top, left, height, width = box
        if self._down:
            top = self.shape[0] - top - height
        if self._mirrored:
            left = self.shape[1] - left - width
        return (left, top, width, height) if self._transposed else (top, left, height, width)

    def _stored(self, box: Box, factor: int) -> np.ndarray:
        """A box of the picture as it is stored, scaled down by `factor`, in coordinates of the result."""
        pixels = None if factor in self._decoded else _turbo_cut(self._encoded, self._header, box,
                                                                     factor, self._name)
        if pixels is not None:
            return pixels
        top, left, height, width = box
        part = self._whole(factor)[top:top + height, left:left + width]
        return cv2.cvtColor(part, cv2.COLOR_BGR2RGB)

    def _whole(self, factor: int) -> np.ndarray:
        """All of it, as stored, (h, w, 3) BGR, decoded by OpenCV."""
        if factor not in self._decoded:
            mode = {1: cv2.IMREAD_COLOR, 2: cv2.IMREAD_REDUCED_COLOR_2, 4: cv2.IMREAD_REDUCED_COLOR_4,
                    8: cv2.IMREAD_REDUCED_COLOR_8}[factor]
            try:
                picture = cv2.imdecode(np.frombuffer(self._encoded, np.uint8), mode | cv2.IMREAD_IGNORE_ORIENTATION)
            except cv2.error:  # such as more pixels than OpenCV's limit
                picture = None
            if picture is None:
                raise BadSample(f"{self._name} ({len(self._encoded)} bytes): a broken JPEG")
            self._decoded[factor] = picture
        return self._decoded[factor]


def opened(encoded: bytes, name: str) -> Optional[Jpeg]:
    """The picture, or None for what is no JPEG of the common kinds, or is cut short: let OpenCV see."""
    header = read_header(encoded)
    return None if header is None else Jpeg(encoded, header, name)


def read_header(encoded: bytes) -> Optional[Header]:
    """Size and orientation, from the segments before the pixels; None for what is not of the common kinds.

    (ITU-T T.81, annex B.)
    """
    if encoded[:2] != _START:
        return None
    orientation, size, at = 1, None, 2
    while at + 4 <= len(encoded) and encoded[at] == 0xFF:
        kind, length = encoded[at + 1], int.from_bytes(encoded[at + 2:at + 4], "big")
        if kind == 0xFF:  # a fill byte
            at += 1
            continue
        if kind in _FRAMES and length >= 8:
            precision, height, width, components = struct.unpack(">BHHB", encoded[at + 4:at + 10])
            if precision != 8 or components not in (1, 3) or not height or not width:
                return None
            size = height, width
        elif kind == 0xE1 and encoded[at + 4:at + 10] == _EXIF:
            orientation = _orientation(encoded[at + 10:at + 2 + length])
        elif kind == _SOS:
            # The end marker can only be missing when something was cut off.
            return Header(*size, orientation) if size and encoded.rfind(b"\xff\xd9", at) > 0 else None
        at += 2 + length
    return None


def _orientation(tiff: bytes) -> int:
    """The tag Orientation of the first directory of EXIF data, 1 where there is none or none that makes sense."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    try:
        start, = struct.unpack_from(order + "I", tiff, 4)
        count, = struct.unpack_from(order + "H", tiff, start)
        for entry in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, entry)
            if tag == 0x0112 and kind == 3:
                return value if value in _TURNS else 1
    except (struct.error, TypeError):  # cut short; neither II nor MM
        pass
    return 1


def _reduced(box: Box, factor: int) -> Box:
    """A box in the coordinates of a picture that is scaled down by `factor`: the nearest whole pixels."""
    top, left, bottom, right = ((edge + factor // 2) // factor  # halves up: no box gets smaller by where it lies
                                for edge in (box[0], box[1], box[0] + box[2], box[1] + box[3]))
    return top, left, bottom - top, right - left


# libjpeg-turbo's TurboJPEG interface, version 3


class _Region(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int)]


class _Factor(ctypes.Structure):
    _fields_ = [("num", ctypes.c_int), ("denom", ctypes.c_int)]


_DECOMPRESS, _RGB, _WARNING = 1, 0, 0  # TJINIT_DECOMPRESS, TJPF_RGB, TJERR_WARNING
_MOST_WARNINGS = 20
_ALIGNMENT = 16  # the width of the usual blocks; for wider ones (4:1:1) the whole picture is decoded
_MARGIN = 4  # pixels around the box, so that colors at its border are interpolated as in the whole picture


@functools.lru_cache(None)
def _library() -> Optional[ctypes.PyDLL]:
    try:
        bundled = importlib.metadata.files("turbojpeg") or []
    except importlib.metadata.PackageNotFoundError:
        bundled = []
    paths = [str(file.locate()) for file in bundled if file.name.startswith("libturbojpeg")]
    for path in [*paths, ctypes.util.find_library("turbojpeg")]:
        try:
            # Its quick functions keep the interpreter's lock, which is longer to get back than they take.
            library = ctypes.PyDLL(path) if path else None
        except OSError:
            continue
        if hasattr(library, "tj3SetCroppingRegion"):
            library.decompress = ctypes.CDLL(path).tj3Decompress8
            return _declared(library)
    return None


def _declared(library: ctypes.PyDLL) -> ctypes.PyDLL:
    handle, size, integer, pointer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    for name, result, *arguments in (
        ("tj3Init", handle, integer),
        ("tj3GetErrorCode", integer, handle),
        ("tj3GetErrorStr", ctypes.c_char_p, handle),
        ("tj3Destroy", None, handle),
        ("tj3DecompressHeader", integer, handle, pointer, size),
        ("tj3SetScalingFactor", integer, handle, _Factor),
        ("tj3SetCroppingRegion", integer, handle, _Region),
        ("decompress", integer, handle, pointer, size, pointer, integer, integer),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class _Decoder:
    """A handle; each thread has one."""

    def __init__(self, library: ctypes.PyDLL):
        self._library, self.handle = library, library.tj3Init(_DECOMPRESS)

    def __del__(self):
        self._library.tj3Destroy(self.handle)


_decoders = threading.local()
_warned = set()


def _warn(name: str, text: str) -> None:
    """Says once of a file that its content is damaged, which decoders make up for as well as they can."""
    if name not in _warned and len(_warned) < _MOST_WARNINGS:
        _warned.add(name)
        _log.warning("%s: damaged, but decoded: %s", name, text)


def _turbo_cut(encoded: bytes, header: Header, box: Box, factor: int, name: str) -> Optional[np.ndarray]:
    """Jpeg._stored by libjpeg-turbo, None where it is not there or cannot decode the file."""
    library = _library()
    if library is None:
        return None
    if not hasattr(_decoders, "decoder"):
        _decoders.decoder = _Decoder(library)
    handle = _decoders.decoder.handle
    top, left, height, width = box
    first_x = max(0, left - _MARGIN) // _ALIGNMENT * _ALIGNMENT
    first_y = max(0, top - _MARGIN)
    end_x = min(-(-header.width // factor), left + width + _MARGIN)
    end_y = min(-(-header.height // factor), top + height + _MARGIN)
    pixels = np.empty((end_y - first_y, end_x - first_x, 3), np.uint8)
    region = _Region(first_x, first_y, end_x - first_x, end_y - first_y)
    failed = (
        library.tj3DecompressHeader(handle, encoded, len(encoded))
        or library.tj3SetCroppingRegion(handle, _Region(0, 0, 0, 0))  # of the picture before
        or library.tj3SetScalingFactor(handle, _Factor(1, factor))
        or library.tj3SetCroppingRegion(handle, region)
        or library.decompress(handle, encoded, len(encoded), pixels.ctypes.data, pixels.strides[0], _RGB)
    )
    if failed and library.tj3GetErrorCode(handle) != _WARNING:
        del _decoders.decoder  # it may not recover
        return None
    if failed:
        _warn(name, library.tj3GetErrorStr(handle).decode("utf-8", "replace"))
    return pixels[top - first_y:top - first_y + height, left - first_x:left - first_x + width]
