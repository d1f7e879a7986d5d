"""Folders of images: which are classes, which are samples, and what is skipped.

One folder per class, with images at any depth below it. The classes are the training part's folders that hold
an image, sorted by name as text, as Gluon and others do, so that labels agree with networks trained
elsewhere.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import unicodedata
from collections import Counter
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

from mxtrain.data.images import EXTENSIONS
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
            notes.append(f"{self.root}: no images in {_list(self.empty)}")
        nested = sum("/" in image.name for images in self.images.values() for image in images)
        if nested:
            notes.append(
                f"{self.root}: {nested} images lie deeper than their class folder and belong to that class"
            )
        return notes


def parts(root: str) -> Tuple[str, Optional[str], List[str]]:
    """Where the parts of `root` lie -> training folder, validation folder or None, notes.

    A folder called train (or val, valid, validation, test) is a part when it holds folders; with images right
    inside it is a class like any other. Without a training part, `root` itself is the training folder.
    """
    folders, found = _parts_by_name(root)
    train = next((found[name] for name in TRAIN_NAMES if name in found), None)
    if train is None:
        if found and len(found) == len(folders):
            raise UserError(f"{root}: holds {_list(sorted(found))} but no train folder")
        return root, None, []
    candidates = [found[name] for name in VAL_NAMES if name in found]
    unused = [entry.name for entry in folders if entry.path not in (train, *candidates[:1])]
    notes = [f"{root}: not used: {_list(unused)}"] if unused else []
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
        # macOS stores accents decomposed: without this, "é" from one system is not "é" from another.
        name = unicodedata.normalize("NFC", entry.name)
        if name in images or name in empty:
            raise UserError(f"{root}: two class folders are called {name!r}, in different Unicode spellings")
        if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
            raise UserError(
                f"{root}: class folder {name!r}: the name holds a control character or is not UTF-8"
            )
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
        notes.append(f"classes that differ only in case are kept apart: {_list(alike)}")
    return notes


def check_val_classes(part: Part, classes: List[str]) -> List[str]:
    """Notes on classes without validation images. UserError for a class that training does not have."""
    extra = [name for name in part.images if name not in classes]
    if extra:
        raise UserError(
            f"{part.root}: class {_list(extra)} has no training images; the classes are {_list(classes)}"
        )
    missing = [name for name in classes if name not in part.images]
    return [f"{part.root}: no validation images of class {_list(missing)}"] if missing else []


def split(
    images: Dict[str, List[Image]], fraction: float
) -> Tuple[Dict[str, List[Image]], Dict[str, List[Image]]]:
    """Hold out a share of each class -> (training, validation) images by class.

    An image is held out when the hash of its class and name falls below the fraction: no seed, and a file
    that is added moves no other. Only a class so small that one part would get nothing has its nearest image
    moved there.
    """
    train: Dict[str, List[Image]] = {}
    val: Dict[str, List[Image]] = {}
    for name, members in images.items():
        ranks = {image: _unit_hash(f"{name}/{image.name}") for image in members}
        held = {image for image in members if ranks[image] < fraction}
        if fraction > 0 and len(members) > 1:
            held = held or {min(members, key=ranks.__getitem__)}
        if len(held) == len(members):
            held = held - {max(members, key=ranks.__getitem__)}
        train[name] = [image for image in members if image not in held]
        if held:
            val[name] = [image for image in members if image in held]
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


def _unit_hash(name: str) -> float:
    """A number of [0, 1) that depends on nothing but the name."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _list(names: List[str]) -> str:
    """Up to ten names, quoted: enough to see what is meant, short enough for a line."""
    shown = ", ".join(repr(name) for name in names[:10])
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"
