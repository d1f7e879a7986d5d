"""From `--data` to samples: works out what lies there and opens it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple, Union

import numpy as np
from mxnet import gluon

from mxtrain.data import cifar, folder, idx
from mxtrain.data.datasets import ArrayDataset, FileDataset, transformed
from mxtrain.data.delivery import by, delivery_of
from mxtrain.data.settings import DataConfig
from mxtrain.errors import UserError

# Where the usual downloads put the files, below the folder that people name.
_SUBFOLDERS = (
    "cifar-10-batches-py",
    "cifar-10-batches-bin",
    "cifar-100-python",
    "cifar-100-binary",
    "raw",
    "MNIST/raw",
    "FashionMNIST/raw",
)
_VAL_SPLIT = 0.1


@dataclass
class Data:
    """The samples of a run: what `open_data` returns.

    Items of `train` and `val` are (image, label) for keys (epoch, index): image (h, w, c) uint8, label int32.
    """

    name: str
    """Kind of source: digits, idx, cifar10, cifar100 or folder."""
    train: gluon.data.Dataset
    """Training samples, augmented by (seed, epoch, index)."""
    val: Optional[gluon.data.Dataset]
    """Validation samples; they do not depend on the epoch. None only with val_split=0."""
    classes: List[str]
    """Class names by label."""
    shape: Tuple[int, int, int]
    """Height, width and channels of a delivered image."""
    fingerprint: str
    """Hex digest; changes with the samples, the classes and the split, not with the place on disk."""
    peak: int = 255
    """The pixel value of full intensity: 255, or 16 for digits."""
    resize: Optional[int] = None
    """Shorter side that an evaluated image is scaled to before its center is cut out; None: as stored."""
    notes: List[str] = field(default_factory=list)
    """Lines for the log: what was found, skipped, left out."""


class _Source(NamedTuple):
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


class _Arrays(NamedTuple):
    """x: (n, h, w, c) uint8. y: (n,) labels 0..classes-1."""

    x: np.ndarray
    y: np.ndarray


def open_data(config: DataConfig, seed: int = 0) -> Data:
    """Open the data that `config` names. `seed` decides the augmentation of training images and nothing else.

    UserError, naming the flag or the file, when nothing usable is found, a file is damaged, a validation
    class is unknown, or a part would be empty.
    """
    source = _find(config)
    if len(source.classes) < 2:
        raise UserError(
            f"--data {config.data}: only one class, {source.classes[0]!r}; a classifier needs at least two "
            "(is the folder one level too high or too low?)"
        )
    delivery = delivery_of(config, source.augment, source.shape, seed)
    counts = f"{len(source.train)} training and {len(source.val) if source.val else 0} validation images"
    shape = by(delivery.shape)
    found = (
        f"{source.name}: {counts} of {shape}, {len(source.classes)} classes, augmentation {delivery.augment}"
    )
    return Data(
        name=source.name,
        train=transformed(source.train, delivery.train),
        val=source.val and transformed(source.val, delivery.evaluate),
        classes=source.classes,
        shape=delivery.shape,
        fingerprint=source.fingerprint,
        peak=source.peak,
        resize=delivery.resize,
        notes=[found, *source.notes],
    )


def _find(config: DataConfig) -> _Source:
    if config.data == "digits":
        return _digits(config)
    root = _existing_folder("--data", config.data)
    if config.val is not None:
        _existing_folder("--val", config.val)
    for place in _places(root):
        pairs = idx.find(place)
        if pairs:
            return _idx(place, pairs, config)
        layout = cifar.find(place)
        if layout:
            return _cifar(place, layout, config)
    return _folder(root, config)


def is_image_folder(path: str) -> bool:
    """Whether what `--data` names holds its images as files. UserError when it does not exist."""
    if path == "digits":
        return False
    return not any(idx.find(place) or cifar.find(place) for place in _places(_existing_folder("--data", path)))


def _places(root: str) -> List[str]:
    """Where the idx files or batches of a folder may be."""
    places = (root, *(os.path.join(root, name) for name in _SUBFOLDERS))
    return [place for place in places if os.path.isdir(place)]


def _existing_folder(flag: str, path: str) -> str:
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        return path
    fault = "is not a folder" if os.path.exists(path) else "does not exist"
    builtin = "the word digits, or " if flag == "--data" else ""
    raise UserError(
        f"{flag} {path}: {fault}; expected {builtin}a folder with idx files (*-images-idx3-ubyte), "
        "with CIFAR's batches, or with a folder of images per class"
    )


# The kinds of sources


def _digits(config: DataConfig) -> _Source:
    from sklearn.datasets import load_digits  # takes a second to import: only for those who use it

    _refuse_val(config, "digits")
    bunch = load_digits()
    samples = _Arrays(bunch.images.astype(np.uint8)[..., np.newaxis], bunch.target)
    train, val = _hold_out(samples, 0.2 if config.val_split is None else config.val_split)
    return _in_memory("digits", train, val, [str(digit) for digit in range(10)], "none", [])._replace(peak=16)


def _idx(place: str, pairs: Dict[str, Tuple[str, str]], config: DataConfig) -> _Source:
    notes = []
    if config.val is not None:
        val_pairs = idx.find(os.path.expanduser(config.val))
        if not val_pairs:
            raise UserError(
                f"--val {config.val}: holds no idx files (*-images-idx3-ubyte), as --data {place} does"
            )
        train_pair, val_pair = (
            pairs.get("train") or pairs["test"],
            val_pairs.get("test") or val_pairs["train"],
        )
        notes.append(f"validation images: {val_pair[0]}")
    elif "train" in pairs:
        train_pair, val_pair = pairs["train"], pairs.get("test")
    else:
        train_pair, val_pair = pairs["test"], None
        notes.append(f"{place}: has a test part only; it is split into training and validation")
    x, labels = idx.read_pair(*train_pair)
    values = np.unique(labels)
    train = _Arrays(x, np.searchsorted(values, labels))
    val = None
    if val_pair is not None:
        x, labels = idx.read_pair(*val_pair)
        unknown = np.setdiff1d(labels, values)
        if unknown.size:
            raise UserError(f"{val_pair[1]}: label {unknown[0]} does not occur in {train_pair[1]}")
        val = _Arrays(x, np.searchsorted(values, labels))
    train, val, split_notes = _parts(train, val, place, config)
    return _in_memory("idx", train, val, [str(value) for value in values], "none", notes + split_notes)


def _cifar(place: str, layout: cifar.Layout, config: DataConfig) -> _Source:
    _refuse_val(config, layout.name)
    train, val, classes, notes = cifar.read(place, layout)
    for part in (train, val):
        if part is not None and part[1].size and part[1].max() >= len(classes):
            raise UserError(
                f"{place}: label {part[1].max()} has no name: {layout.names} lists {len(classes)} classes"
            )
    train, val, split_notes = _parts(_Arrays(*train), None if val is None else _Arrays(*val), place, config)
    return _in_memory(layout.name, train, val, classes, "shift-flip", notes + split_notes)


def _folder(root: str, config: DataConfig) -> _Source:
    train_root, val_root, notes = folder.parts(root)
    if config.val is not None:
        if val_root is not None:
            notes.append(f"{val_root}: not used, because of --val {config.val}")
        val_root = os.path.expanduser(config.val)
    part = folder.scan(train_root)
    classes = list(part.images)
    notes += part.notes() + folder.class_notes(classes)
    if val_root is None:
        fraction = _VAL_SPLIT if config.val_split is None else config.val_split
        train, val = folder.split(part.images, fraction)
        if fraction and not val:
            raise UserError(
                f"{train_root}: no class has the two images that it takes to hold one out; "
                "give --val, or --val-split 0 to train without validation"
            )
    else:
        val_part = folder.scan(val_root)
        train, val = part.images, val_part.images
        notes += (
            _unused_split(config, val_root) + val_part.notes() + folder.check_val_classes(val_part, classes)
        )
    return _Source(
        name="folder",
        train=labelled_files(train, classes),
        val=labelled_files(val, classes) if val else None,
        classes=classes,
        fingerprint=_digest(classes, folder.fingerprint_lines(train), folder.fingerprint_lines(val)),
        augment="crop",
        notes=notes,
    )


def labelled_files(part: Dict[str, List[folder.Image]], classes: List[str]) -> FileDataset:
    """The images of a part by class name; the label of a class is its place in `classes`."""
    label = {name: number for number, name in enumerate(classes)}
    y = np.repeat([label[name] for name in part], [len(members) for members in part.values()])
    return FileDataset([image.path for members in part.values() for image in members], y.astype(np.int32))


def _in_memory(
    name: str, train: _Arrays, val: Optional[_Arrays], classes: List[str], augment: str, notes: List[str]
) -> _Source:
    parts = [part and ArrayDataset(part.x, part.y.astype(np.int32)) for part in (train, val)]
    digest = _digest(classes, *([part.x, part.y.astype("<i4")] if part else [] for part in (train, val)))
    return _Source(name, parts[0], parts[1], classes, digest, augment, notes, shape=train.x.shape[1:])


def _parts(
    train: _Arrays, val: Optional[_Arrays], place: str, config: DataConfig
) -> Tuple[_Arrays, Optional[_Arrays], List[str]]:
    """Check the parts, and hold out a share where there is no validation part -> both, notes."""
    if not len(train.x):
        raise UserError(f"{place}: holds no training samples")
    if val is None:
        return (*_hold_out(train, _VAL_SPLIT if config.val_split is None else config.val_split), [])
    val_place = config.val or place
    if not len(val.x):
        raise UserError(f"{val_place}: holds no validation samples")
    if val.x.shape[1:] != train.x.shape[1:]:
        sizes = f"validation images are {by(val.x.shape[1:])}, training images {by(train.x.shape[1:])}"
        raise UserError(f"{val_place}: {sizes}")
    return train, val, _unused_split(config, place)


def _hold_out(samples: _Arrays, fraction: float) -> Tuple[_Arrays, Optional[_Arrays]]:
    """Hold out a share of each class, evenly spread over the samples' own order -> training, validation."""
    if fraction == 0:
        return samples, None
    held = np.zeros(len(samples.y), bool)
    for label in np.unique(samples.y):
        rows = np.flatnonzero(samples.y == label)
        ranks = np.arange(len(rows))
        held[rows] = np.floor((ranks + 1) * fraction) > np.floor(ranks * fraction)
    if not held.any():
        raise UserError(
            f"--val-split {fraction}: holds out none of {len(held)} samples; "
            "give a larger share, or 0 to train without validation"
        )
    return _Arrays(samples.x[~held], samples.y[~held]), _Arrays(samples.x[held], samples.y[held])


def _refuse_val(config: DataConfig, name: str) -> None:
    if config.val is not None:
        raise UserError(f"--val {config.val}: {name} brings its own validation samples; leave --val out")


def _unused_split(config: DataConfig, place: str) -> List[str]:
    if config.val_split is None:
        return []
    return [f"--val-split {config.val_split} has no effect: {place} has a validation part"]


def _digest(classes: List[str], *parts: Iterable[Union[str, np.ndarray]]) -> str:
    """A digest of the class names and of each part, which is arrays or lines of text."""
    digest = hashlib.sha256(repr(classes).encode())
    for part in parts:
        digest.update(b"\0part\0")
        for piece in part:
            if isinstance(piece, str):
                digest.update(piece.encode("utf-8", "surrogateescape") + b"\n")
            else:
                digest.update(repr(piece.shape).encode() + piece.tobytes())
    return digest.hexdigest()
