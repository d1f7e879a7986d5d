"""Folders of images: which are classes, which are samples, and what is skipped.

One folder per class, with images at any depth below it. The classes are the training part's folders that hold
an image, sorted by name as text, as Gluon and others do, so that labels agree with networks trained
elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections import Counter
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

import numpy as np

from mxtrain.data.datasets import FileDataset
from mxtrain.data.images import EXTENSIONS
from mxtrain.data.parts import (
    VAL_SPLIT,
    Source,
    class_name,
    digest,
    hold_out_by_name,
    listed,
    unused_split,
    val_classes,
)
from mxtrain.data.settings import DataConfig
from mxtrain.errors import UserError

TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "valid", "validation", "test", "testing")

# Folders that operating systems leave behind; names that start with a dot are hidden and skipped anyway.
_SYSTEM = {"__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found"}


class Image(NamedTuple):
    """One image file: its path, its path below the class folder (with "/"), and its size in bytes."""

    path: str
    name: str
    size: int


def _below_root(name: str, image: Image) -> str:
    """The path of an image of class `name` below the root."""
    return f"{name}/{image.name}"


class Part(NamedTuple):
    """The images of one part by class name, the class folders without any, and what was skipped and why."""

    root: str
    images: Dict[str, List[Image]]
    empty: List[str]
    skipped: Counter

    def notes(self) -> List[str]:
        """What a user should know about this part, one line each."""
        notes = []
        if self.skipped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
            notes.append(f"{self.root}: skipped {sum(self.skipped.values())} entries: {reasons}")
        if self.empty:
            notes.append(f"{self.root}: no images in {listed(self.empty)}")
        nested = sum("/" in image.name for images in self.images.values() for image in images)
        if nested:
            notes.append(
                f"{self.root}: {nested} images lie deeper than their class folder and belong to that class"
            )
        return notes


def source(root: str, config: DataConfig) -> Source:
    """The images of `root`, and of --val or of its validation part."""
    train_root, val_root, notes = parts(root)
    if config.val is not None:
        if val_root is not None:
            notes.append(f"{val_root}: not used, because of --val {config.val}")
        val_root = os.path.expanduser(config.val)
    part = scan(train_root)
    val_part = None if val_root is None else scan(val_root)
    notes += part.notes() + (val_part.notes() if val_part else [])
    return source_of_files("folder", part, val_part, config, notes)


def source_of_files(
    name: str,
    part: Part,
    val_part: Optional[Part],
    config: DataConfig,
    notes: List[str],
    key: Callable[[str, Image], str] = _below_root,
) -> Source:
    """Image files by class; without a validation part, a share of each class is held out by the images' `key`."""
    classes = list(part.images)
    notes = notes + class_notes(classes)
    if val_part is None:
        fraction = VAL_SPLIT if config.val_split is None else config.val_split
        train, val = split(part.images, fraction, key)
        if fraction and not val:
            raise UserError(
                f"{part.root}: no class has the two images that it takes to hold one out; "
                "give --val, or --val-split 0 to train without validation"
            )
    else:
        train, val = part.images, val_part.images
        check_val_classes(val_part, classes)
        notes += unused_split(config, val_part.root)
    return Source(
        name=name,
        train=labelled_files(train, classes),
        val=labelled_files(val, classes) if val else None,
        classes=classes,
        fingerprint=digest(classes, fingerprint_lines(train), fingerprint_lines(val)),
        augment="crop",
        notes=notes,
    )


def labelled_files(part: Dict[str, List[Image]], classes: List[str]) -> FileDataset:
    """The images of a part by class name; the label of a class is its place in `classes`."""
    label = {name: number for number, name in enumerate(classes)}
    y = np.repeat([label[name] for name in part], [len(members) for members in part.values()])
    return FileDataset([image.path for members in part.values() for image in members], y.astype(np.int32))


def parts(root: str) -> Tuple[str, Optional[str], List[str]]:
    """Where the parts of `root` lie -> training folder, validation folder or None, notes.

    A folder called train (or val, valid, validation, test) is a part when it holds folders; with images right
    inside it is a class like any other. Without a training part, `root` itself is the training folder.
    """
    folders, found = _parts_by_name(root)
    train = next((found[name] for name in TRAIN_NAMES if name in found), None)
    if train is None:
        if found and len(found) == len(folders):
            raise UserError(f"{root}: holds {listed(sorted(found))} but no train folder")
        return root, None, []
    candidates = [found[name] for name in VAL_NAMES if name in found]
    unused = [entry.name for entry in folders if entry.path not in (train, *candidates[:1])]
    notes = [f"{root}: not used: {listed(unused)}"] if unused else []
    return train, (candidates[0] if candidates else None), notes


def evaluation_part(root: str) -> str:
    """Where the class folders to evaluate a trained network on lie: the validation part of `root`, else its
    training part, else `root` itself, all of it. The rules are those of `parts`."""
    folders, found = _parts_by_name(root)
    if not any(name in found for name in TRAIN_NAMES) and len(found) < len(folders):
        return root
    return next((found[name] for name in VAL_NAMES + TRAIN_NAMES if name in found), root)


def images_in(root: str) -> Tuple[List[Image], Counter]:
    """All images below a folder, sorted into classes or not, in one fixed order; and what was skipped and why."""
    skipped: Counter = Counter()
    return sorted(_images_below(root, "", skipped, ()), key=lambda image: image.name), skipped


def _parts_by_name(root: str) -> Tuple[List[os.DirEntry], Dict[str, str]]:
    """The folders in `root`, and the paths of those that are named as parts and hold folders."""
    folders = _visible_folders(root)
    named = {entry.name.lower(): entry.path for entry in folders}
    return folders, {
        name: named[name]
        for name in TRAIN_NAMES + VAL_NAMES
        if name in named and _visible_folders(named[name])
    }


def scan(root: str) -> Part:
    """List the images below the class folders of `root`, in one fixed order.

    UserError when there are none, or when a class name cannot be written to a list of classes.
    """
    images: Dict[str, List[Image]] = {}
    empty: List[str] = []
    skipped: Counter = Counter()
    loose = 0
    for entry in _entries(root):
        reason = _unwanted(entry)
        if reason is None and not entry.is_dir():
            reason = _bad_file(entry) or "outside the class folders"
            loose += reason == "outside the class folders"
        if reason is not None:
            skipped[reason] += 1
            continue
        name = class_name(f"{root}: class folder", entry.name)
        if name in images or name in empty:
            raise UserError(f"{root}: two class folders are called {name!r}, in different Unicode spellings")
        members = sorted(
            _images_below(entry.path, "", skipped, (os.path.realpath(root),)), key=lambda image: image.name
        )
        if members:
            images[name] = members
        else:
            empty.append(name)
    if not images:
        hint = f"looked for CLASS/IMAGE with the endings {' '.join(EXTENSIONS)}"
        if loose:
            hint = f"{loose} images lie in it directly: put each into a folder named after its class"
        raise UserError(f"{root}: no images in class folders; {hint}")
    return Part(root, {name: images[name] for name in sorted(images)}, empty, skipped)


def class_notes(classes: List[str]) -> List[str]:
    """Warnings about class names that people misread."""
    notes = []
    if all(name.isascii() and name.isdigit() for name in classes):
        by_number = sorted(classes, key=int)
        if by_number != classes:
            label = next(label for label, name in enumerate(by_number) if classes[label] != name)
            notes.append(
                f"class names are sorted as text, not as numbers: label {label} is class {classes[label]!r}"
            )
    folded = Counter(name.casefold() for name in classes)
    alike = [name for name in classes if folded[name.casefold()] > 1]
    if alike:
        notes.append(f"classes that differ only in case are kept apart: {listed(alike)}")
    return notes


def check_val_classes(part: Part, classes: List[str]) -> List[str]:
    """Notes on classes without validation images. UserError for a class that training does not have."""
    return val_classes(part.root, part.images, classes)


def split(
    images: Dict[str, List[Image]], fraction: float, key: Callable[[str, Image], str] = _below_root
) -> Tuple[Dict[str, List[Image]], Dict[str, List[Image]]]:
    """Hold out a share of each class -> (training, validation) images by class; see hold_out_by_name.

    key: class and image -> what decides whether it is held out.
    """
    train: Dict[str, List[Image]] = {}
    val: Dict[str, List[Image]] = {}
    for name, members in images.items():
        held = hold_out_by_name([key(name, image) for image in members], fraction)
        train[name] = [image for image, out in zip(members, held) if not out]
        if held.any():
            val[name] = [image for image, out in zip(members, held) if out]
    return train, val


def fingerprint_lines(images: Dict[str, List[Image]]) -> Iterable[str]:
    """What identifies the images of a part: class, name and size, independent of where the folder lies."""
    for name, members in images.items():
        for image in members:
            yield f"{name}/{image.name} {image.size}"


def _entries(folder: str) -> List[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed: {error.strerror}") from error


def _visible_folders(folder: str) -> List[os.DirEntry]:
    return [entry for entry in _entries(folder) if _unwanted(entry) is None and entry.is_dir()]


def _unwanted(entry: os.DirEntry) -> Optional[str]:
    """Why an entry of any kind is skipped by its name, or None."""
    if entry.name.startswith("."):
        return "hidden"
    return "left by the system" if entry.name in _SYSTEM else None


def _bad_file(entry: os.DirEntry) -> Optional[str]:
    """Why a file is no sample, or None."""
    if not entry.name.lower().endswith(EXTENSIONS):
        return "not images"
    try:
        status = entry.stat()
    except OSError as error:
        return "broken links" if error.errno in (errno.ENOENT, errno.ELOOP) else "unreadable"
    if not stat.S_ISREG(status.st_mode):
        return "not files"
    if not status.st_size:
        return "empty files"
    return None if os.access(entry.path, os.R_OK) else "unreadable"


def _images_below(folder: str, prefix: str, skipped: Counter, parents: Tuple[str, ...]) -> Iterable[Image]:
    """The images in a folder and below it. Links to folders are followed, except back to a parent."""
    real = os.path.realpath(folder)
    if real in parents:
        skipped["links to a folder above"] += 1
        return
    for entry in _entries(folder):
        reason = _unwanted(entry)
        if reason is None and entry.is_dir():
            yield from _images_below(entry.path, f"{prefix}{entry.name}/", skipped, (*parents, real))
            continue
        reason = reason or _bad_file(entry)
        if reason is not None:
            skipped[reason] += 1
            continue
        yield Image(entry.path, prefix + unicodedata.normalize("NFC", entry.name), entry.stat().st_size)
