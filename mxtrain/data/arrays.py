"""Images and labels in numpy files: .npz archives, and pairs of .npy files, which stay on the disk.

Names of the arrays: x and y, images and labels, data and labels or targets; with _train and _test (or train_
and test_, val) for the two parts, as in Keras' mnist.npz. Nothing is unpickled.
"""

from __future__ import annotations

import os
from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from mxtrain.data import parts
from mxtrain.data.settings import DataConfig
from mxtrain.errors import UserError

_IMAGES, _LABELS = ("x", "images", "data", "image"), ("y", "labels", "targets", "label")
_PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test", "testing")}

Pair = Tuple[np.ndarray, np.ndarray]


class Found(NamedTuple):
    """Where the arrays lie. files: name of an array -> its .npy file; empty for an archive."""

    place: str
    files: Dict[str, str]


def find(path: str) -> Optional[Found]:
    """The arrays that a path names: an .npz archive, two .npy files with a comma between, or a folder of .npy files.

    None when it names something else. UserError for a single .npy file.
    """
    if os.path.isdir(path):
        files = {name[:-4].lower(): os.path.join(path, name) for name in sorted(os.listdir(path))
                 if name.lower().endswith(".npy") and not name.startswith(".")}
        return Found(path, files) if _roles(files) else None
    images, comma, labels = path.partition(",")
    if comma and images.endswith(".npy") and labels.endswith(".npy") and not os.path.exists(path):
        return Found(path, {"x": images, "y": os.path.expanduser(labels)})
    if path.lower().endswith(".npy") and os.path.isfile(path):
        raise UserError(f"{path}: one array alone; give the images and the labels, as X.npy,Y.npy, or a folder with "
                        "x.npy and y.npy")
    return Found(path, {}) if path.lower().endswith(".npz") and os.path.isfile(path) else None


def source(found: Found, config: DataConfig) -> parts.Source:
    """What `find` found, and what --val names, of the same kind."""
    train, val, places, notes = _read(found)
    if config.val is not None:
        if val is not None:
            notes.append(f"{places[1]}: not used, because of --val {config.val}")
        own, own_val, own_places, more = _read(find(os.path.expanduser(config.val)))
        notes += more
        val, places = (own, (places[0], own_places[0])) if own_val is None else (own_val, (places[0], own_places[1]))
    train, val, classes = parts.numbered(train, val, places)
    train, val, split_notes = parts.checked_parts(train, val, found.place, config)
    return parts.in_memory("arrays", train, val, classes, "none", notes + split_notes)


def _read(found: Found) -> Tuple[Pair, Optional[Pair], Tuple[str, Optional[str]], List[str]]:
    """Training part, validation part or None, what to call their labels in messages, and notes."""
    if found.files:
        roles = _roles(found.files)
        read = {name: _load(found.files[name], mmap_mode="r") for pair in roles.values() for name in pair}
        called, there = dict(found.files), found.files
    else:
        archive = _load(found.place)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise UserError(f"{found.place}: is not an .npz archive")
        with archive:
            names = {name.lower(): name for name in archive.files}
            roles = _roles(names)
            if not roles:
                raise UserError(f"{found.place}: must hold x and y, or images and labels, or x_train and y_train; it "
                                f"holds {parts.listed(archive.files)}")
            read = {name: _member(archive, names[name], found.place) for pair in roles.values() for name in pair}
            called, there = {name: f"{found.place}, array {names[name]}" for name in read}, names
    pairs = {role: _checked(*(read[name] for name in pair), *(called[name] for name in pair))
             for role, pair in roles.items()}
    places = {role: called[pair[1]] for role, pair in roles.items()}
    if "train" not in pairs:
        raise UserError(f"{found.place}: holds a validation part and no training part")
    unused = [name for name in there if name not in read]
    notes = [f"{found.place}: not used: {parts.listed(unused)}"] if unused else []
    return pairs["train"], pairs.get("val"), (places["train"], places.get("val")), notes


def _roles(names) -> Dict[str, Tuple[str, str]]:
    """{"train": (images, labels), "val": ...} or fewer, out of the names of arrays in lower case."""
    found: Dict[str, Tuple[str, str]] = {}
    for role, words in _PARTS.items():
        patterns = [pattern.format(word) for word in words for pattern in ("{{}}_{}", "{}_{{}}", "{{}}{}")]
        for pattern in patterns + (["{}"] if role == "train" else []):
            images = next((pattern.format(name) for name in _IMAGES if pattern.format(name) in names), None)
            labels = next((pattern.format(name) for name in _LABELS if pattern.format(name) in names), None)
            if images and labels:
                found.setdefault(role, (images, labels))
    return found


def _load(path: str, **options):
    try:
        return np.load(path, allow_pickle=False, **options)
    except Exception as error:  # damaged files raise nearly anything: tokenize.TokenError, BadZipFile, ValueError ...
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read as numpy arrays: {why}") from None


def _member(archive, name: str, place: str) -> np.ndarray:
    try:
        return archive[name]
    except Exception as error:  # damaged archives raise nearly anything: zlib.error, BadZipFile, ValueError ...
        raise UserError(f"{place}, array {name}: cannot be read: {' '.join(str(error).split())}") from None


def _checked(x: np.ndarray, y: np.ndarray, x_place: str, y_place: str) -> Pair:
    """The images with an axis of channels, and the labels as whole numbers."""
    if x.dtype != np.uint8:
        raise UserError(f"{x_place}: has type {x.dtype}; images must be uint8, from 0 to 255")
    if x.ndim == 3:
        x = x[..., np.newaxis]
    if x.ndim != 4 or x.shape[3] not in (1, 3):
        raise UserError(f"{x_place}: has shape {x.shape}; must be (n, height, width) or (n, height, width, channels) "
                        "with 1 or 3 channels")
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]  # as in Keras' cifar10
    if y.ndim != 1 or len(y) != len(x):
        raise UserError(f"{y_place}: has shape {y.shape}; must be one label for each of the {len(x)} images of "
                        f"{x_place}")
    if y.dtype.kind not in "iuf":
        raise UserError(f"{y_place}: has type {y.dtype}; labels must be whole numbers")
    wrong = np.flatnonzero(~((y >= 0) & (y < 2**31) & (y == np.floor(y))))  # NaN is none of these
    if wrong.size:
        raise UserError(f"{y_place}: label {y[wrong[0]]} of image {wrong[0]}; labels must be whole numbers from 0 on")
    return x, y.astype(np.int64)
