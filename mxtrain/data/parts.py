"""What the kinds of sources share: the training and the validation part, how one is held out, and their digest."""

from __future__ import annotations

import hashlib
import unicodedata
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
from mxnet import gluon

from mxtrain.data.datasets import ArrayDataset
from mxtrain.data.delivery import by
from mxtrain.data.settings import DataConfig
from mxtrain.errors import UserError

VAL_SPLIT = 0.1

# Arrays beyond this many bytes, such as those that stay on the disk, are digested by some of their images only.
_DIGEST_BYTES = 1 << 30
_DIGEST_IMAGES = 1024


class Source(NamedTuple):
    """What was found, before it is decided how images are delivered."""

    name: str
    train: gluon.data.Dataset
    val: Optional[gluon.data.Dataset]
    classes: List[str]
    fingerprint: str
    augment: str  # the default for this kind
    notes: List[str]
    shape: Optional[Tuple[int, int, int]] = None  # None: every image has its own size, and three channels
    peak: int = 255


class Arrays(NamedTuple):
    """x: (n, h, w, c) uint8. y: (n,) labels 0..classes-1. rows: those that belong to the part, None for all."""

    x: np.ndarray
    y: np.ndarray
    rows: Optional[np.ndarray] = None

    def labels(self) -> np.ndarray:
        return self.y if self.rows is None else self.y[self.rows]


def numbered(
    train: Tuple[np.ndarray, np.ndarray], val: Optional[Tuple[np.ndarray, np.ndarray]], places: Sequence[str]
) -> Tuple[Arrays, Optional[Arrays], List[str]]:
    """Arrays whose labels are any whole numbers -> the same with labels 0..classes-1, and the numbers as names.

    UserError, naming places = (of the training labels, of the validation labels), when a validation label is new.
    """
    values = np.unique(train[1])
    if val is not None:
        unknown = np.setdiff1d(val[1], values)
        if unknown.size:
            raise UserError(f"{places[1]}: label {unknown[0]} does not occur in {places[0]}")
    parts = [part and Arrays(part[0], np.searchsorted(values, part[1])) for part in (train, val)]
    return parts[0], parts[1], [str(value) for value in values]


def in_memory(
    name: str,
    train: Arrays,
    val: Optional[Arrays],
    classes: List[str],
    augment: str,
    notes: List[str],
    peak: int = 255,
) -> Source:
    """The source of two parts that `checked_parts` gave."""
    parts = [part and ArrayDataset(part.x, part.y.astype(np.int32), part.rows) for part in (train, val)]
    pieces = [_pieces(part) if part else [] for part in (train, val)]
    return Source(
        name, parts[0], parts[1], classes, digest(classes, *pieces), augment, notes, train.x.shape[1:], peak
    )


def checked_parts(
    train: Arrays, val: Optional[Arrays], place: str, config: DataConfig, share: float = VAL_SPLIT
) -> Tuple[Arrays, Optional[Arrays], List[str]]:
    """Check the parts, and hold out a share where there is no validation part -> both, notes."""
    if not len(train.x):
        raise UserError(f"{place}: holds no training samples")
    if val is None:
        share = share if config.val_split is None else config.val_split
        held = hold_out(train.y, share)
        if held is None:
            return train, None, []
        return train._replace(rows=np.flatnonzero(~held)), train._replace(rows=np.flatnonzero(held)), []
    val_place = config.val or place
    if not len(val.x):
        raise UserError(f"{val_place}: holds no validation samples")
    if val.x.shape[1:] != train.x.shape[1:]:
        sizes = f"validation images are {by(val.x.shape[1:])}, training images {by(train.x.shape[1:])}"
        raise UserError(f"{val_place}: {sizes}")
    return train, val, unused_split(config, place)


def hold_out(y: np.ndarray, share: float) -> Optional[np.ndarray]:
    """Which samples to hold out: a share of each class, evenly spread over the samples' order -> (n,) bool.

    None for the share 0; UserError when the share is too small for any.
    """
    if share == 0:
        return None
    held = np.zeros(len(y), bool)
    for label in np.unique(y):
        rows = np.flatnonzero(y == label)
        ranks = np.arange(len(rows))
        held[rows] = np.floor((ranks + 1) * share) > np.floor(ranks * share)
    if not held.any():
        raise UserError(
            f"--val-split {share}: holds out none of {len(held)} samples; "
            "give a larger share, or 0 to train without validation"
        )
    return held


def hold_out_by_name(names: Sequence[str], share: float) -> np.ndarray:
    """Which samples of one class to hold out: those whose name's hash falls below the share -> (n,) bool.

    No seed, and a sample that is added moves no other. Only a class so small that one part would get nothing
    has its nearest sample moved there. Samples of one name stay together.
    """
    ranks = np.array([_unit_hash(name) for name in names])
    held = ranks < share
    if share > 0 and len(names) > 1 and not held.any():
        held = ranks == ranks.min()
    return held & (ranks != ranks.max()) if held.all() else held


def val_classes(place: str, names: Iterable[str], classes: List[str]) -> List[str]:
    """Notes on classes without validation images. UserError for a class that training does not have."""
    known, names = set(classes), dict.fromkeys(names)
    extra = [name for name in names if name not in known]
    if extra:
        raise UserError(
            f"{place}: class {listed(extra)} has no training images; the classes are {listed(classes)}"
        )
    missing = [name for name in classes if name not in names]
    return [f"{place}: no validation images of class {listed(missing)}"] if missing else []


def class_name(place: str, name: str) -> str:
    """The one spelling of a class name. UserError when it cannot be written to a list of classes.

    macOS stores accents decomposed: without this, "é" from one system is not "é" from another.
    """
    name = unicodedata.normalize("NFC", name)
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        raise UserError(f"{place} {name!r}: the name holds a control character or is not UTF-8")
    return name


def refuse_val(config: DataConfig, name: str) -> None:
    if config.val is not None:
        raise UserError(f"--val {config.val}: {name} brings its own validation samples; leave --val out")


def unused_split(config: DataConfig, place: str) -> List[str]:
    if config.val_split is None:
        return []
    return [f"--val-split {config.val_split} has no effect: {place} has a validation part"]


def digest(classes: List[str], *parts: Iterable[Union[str, np.ndarray]]) -> str:
    """A digest of the class names and of each part, which is arrays or lines of text."""
    result = hashlib.sha256(repr(classes).encode())
    for part in parts:
        result.update(b"\0part\0")
        for piece in part:
            if isinstance(piece, str):
                result.update(piece.encode("utf-8", "surrogateescape") + b"\n")
            else:
                result.update(repr(piece.shape).encode() + piece.tobytes())
    return result.hexdigest()


def listed(names: Sequence[str]) -> str:
    """Up to ten names, quoted: enough to see what is meant, short enough for a line."""
    shown = ", ".join(repr(name) for name in names[:10])
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"


def by_class(y: np.ndarray, classes: Sequence[str]) -> Dict[str, np.ndarray]:
    """The rows of each class, in order: {name: (k,) integers}."""
    order = np.argsort(y, kind="stable")
    ends = np.cumsum(np.bincount(y, minlength=len(classes)))
    return dict(zip(classes, np.split(order, ends[:-1])))


def _pieces(part: Arrays) -> List[Union[str, np.ndarray]]:
    """What identifies the images and labels of a part."""
    rows = np.arange(len(part.x)) if part.rows is None else part.rows
    labels = part.labels().astype("<i4")
    if part.x.nbytes <= _DIGEST_BYTES:
        return [part.x if part.rows is None else part.x[rows], labels]
    spread = np.unique(np.linspace(0, len(rows) - 1, _DIGEST_IMAGES).astype(np.int64))
    return [f"{len(rows)} of {by(part.x.shape)}", part.x[rows[spread]], labels]


def _unit_hash(name: str) -> float:
    """A number of [0, 1) that depends on nothing but the name."""
    found = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(found[:8], "big") / 2**64
