"""From `--data` to samples: works out what lies there and opens it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import numpy as np
from mxnet import gluon

from mxtrain.data import arrays, cifar, digits, folder, idx, listing, records, synthetic
from mxtrain.data.datasets import transformed
from mxtrain.data.delivery import by, delivery_of
from mxtrain.data.parts import Source, listed
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


@dataclass
class Data:
    """The samples of a run: what `open_data` returns.

    Items of `train` and `val` are (image, label) for keys (epoch, index): image (h, w, c) uint8, label int32.
    """

    name: str
    """Kind of source: digits, synthetic, idx, cifar10, cifar100, arrays, records, list or folder."""
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


class _Found(NamedTuple):
    """A kind of source, and what opens it."""

    kind: str
    source: Callable[[Any, DataConfig], Source]
    place: Any


def open_data(config: DataConfig, seed: int = 0) -> Data:
    """Open the data that `config` names. `seed` decides the augmentation of training images and nothing else.

    UserError, naming the flag or the file, when nothing usable is found, a file is damaged, a validation
    class is unknown, or a part would be empty.
    """
    source = open_source(config)
    if len(source.classes) < 2:
        raise UserError(
            f"--data {config.data}: only one class, {source.classes[0]!r}; a classifier needs at least two "
            "(is the folder one level too high or too low?)"
        )
    delivery = delivery_of(config, source.augment, source.shape, seed, source.peak)
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


def open_source(config: DataConfig) -> Source:
    """What --data and --val name, with the images as they are stored. UserError as in open_data."""
    found = _find("--data", config.data)
    if config.val is not None and found.kind in ("folder", "records", "list", "arrays"):
        val_kind = _find("--val", config.val).kind
        if val_kind != found.kind:
            raise UserError(
                f"--val {config.val}: is {_KINDS[val_kind]}, but --data {config.data} is {_KINDS[found.kind]}; "
                "both must be of one kind"
            )
    elif config.val is not None and found.kind == "idx":
        _existing_folder("--val", config.val)
    source = found.source(found.place, config)
    notes = _about_validation(source, config) + source.notes + unused(config, found.kind)
    return source._replace(notes=notes)


def is_image_folder(path: str) -> bool:
    """Whether what `--data` names holds its images as files, a folder for each class. UserError without any."""
    return _find("--data", path).kind == "folder"


_KINDS = {
    "digits": "the built-in digits",
    "synthetic": "made-up images",
    "idx": "a folder of idx files",
    "cifar": "a CIFAR folder",
    "arrays": "numpy arrays",
    "records": "a record file",
    "list": "a list of images",
    "folder": "a folder of images",
}


def _find(flag: str, data: str) -> _Found:
    """What a path names. The first that fits counts: a word, a file by its ending, a folder by its files."""
    if flag == "--data" and data == "digits":
        return _Found("digits", lambda _, config: digits.source(config), None)
    if flag == "--data" and synthetic.names_synthetic(data):
        return _Found("synthetic", lambda _, config: synthetic.source(config), None)
    path = os.path.expanduser(data)
    if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):
        raise UserError(f"{flag} {path}: cannot be listed: Permission denied")
    for kind, find, source in (
        ("records", records.find, records.source),
        ("list", listing.find, listing.source),
        ("arrays", arrays.find, arrays.source),
    ):
        found = find(path)
        if found:
            return _Found(kind, source, found)
    root = _existing_folder(flag, data)
    for place in _places(root):
        pairs = idx.find(place)
        if pairs:
            return _Found("idx", lambda where, config: idx.source(*where, config), (place, pairs))
        layout = cifar.find(place)
        if layout:
            return _Found("cifar", lambda where, config: cifar.source(*where, config), (place, layout))
    return _Found("folder", folder.source, root)


def _about_validation(source: Source, config: DataConfig) -> List[str]:
    """Notes on validation by the training images, and on classes without images, whether held out or given."""
    notes = []
    places = [os.path.realpath(os.path.expanduser(path)) for path in (config.data, config.val or "")]
    if config.val is not None and places[0] == places[1]:
        notes.append(f"--val {config.val}: is --data itself")
    if source.val is not None:
        counts = np.bincount(source.val.y, minlength=len(source.classes))
        missing = [name for name, count in zip(source.classes, counts) if not count]
        if missing:
            notes.append(f"{config.val or config.data}: no validation images of class {listed(missing)}")
    return notes


def unused(config: DataConfig, kind: str) -> List[str]:
    """Notes on flags that this kind of data, one of _KINDS, does not look at."""
    what = _KINDS[kind]
    fields = ("data_root", "image_column", "label_column")
    if kind == "list":
        tables = [path for path in (config.data, config.val) if path and not path.lower().endswith(".lst")]
        what, fields = "a .lst, which has no names of columns", () if tables else fields[1:]
    return [
        f"--{name.replace('_', '-')} {getattr(config, name)} has no effect: {config.data} is {what}"
        for name in fields
        if getattr(config, name) is not None
    ]


def _places(root: str) -> List[str]:
    """Where the idx files or batches of a folder may be."""
    places = (root, *(os.path.join(root, name) for name in _SUBFOLDERS))
    return [place for place in places if os.path.isdir(place)]


def _existing_folder(flag: str, path: str) -> str:
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        return path
    fault = "is no kind of file that is known here" if os.path.exists(path) else "does not exist"
    builtin = "the words digits or synthetic, " if flag == "--data" else ""
    raise UserError(
        f"{flag} {path}: {fault}; expected {builtin}a folder of images per class, with idx files "
        "(*-images-idx3-ubyte) or with CIFAR's batches, or a file .rec, .lst, .csv, .tsv or .npz, or X.npy,Y.npy; "
        "--task lm learns the language of any text file"
    )
