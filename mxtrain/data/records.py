"""Images in RecordIO files, as make_records.py and MXNet's im2rec write them."""

from __future__ import annotations

import io
import os
from typing import List, NamedTuple, Optional, Tuple

import numpy as np
from mxnet import gluon

from mxtrain import files
from mxtrain.data import images, parts
from mxtrain.data.datasets import Key, Sample
from mxtrain.data.folder import TRAIN_NAMES, VAL_NAMES, class_notes
from mxtrain.data.record_files import (
    BrokenRecord,
    Head,
    Paths,
    RecordFile,
    paths_of,
    read_about,
    read_classes,
    read_index,
    unframe,
    unpack,
)
from mxtrain.data.settings import DataConfig
from mxtrain.errors import BadSample, UserError

_NUMPY = b"\x93NUMPY"


class Found(NamedTuple):
    """The record file to train on, that to validate on or None, and notes."""

    train: str
    val: Optional[str]
    notes: List[str]


class Part(NamedTuple):
    """The records of a file, in its order: starts, ends, numbers, labels and names have one value for each."""

    file: RecordFile
    starts: np.ndarray
    ends: np.ndarray
    numbers: np.ndarray
    """By which the index names them."""
    labels: np.ndarray
    """Class numbers, int64."""
    names: Optional[List[str]]
    """Of the images that they were made from, where that is known."""
    classes: Optional[List[str]]
    """Names by class number, where there are any."""
    checksum: Optional[str]
    notes: List[str]


class RecordDataset(gluon.data.Dataset):
    """Images in records (mxtrain.data.images.Picture). The epoch of a key plays no part.

    part: the file and all its records. rows: (n,) which of them belong to the dataset. y: (n,) int32.
    Any number of threads may read it at once.
    """

    threads = True

    def __init__(self, part: Part, rows: np.ndarray, y: np.ndarray):
        self._file = part.file
        self._starts, self._ends = part.starts[rows], part.ends[rows]
        self._numbers, self._labels = part.numbers[rows], part.labels[rows]
        self.y = y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, key: Key) -> Sample:
        _, index = key
        return self.picture(self.encoded(index), index), self.y[index]

    def encoded(self, index: int) -> bytes:
        """What the record holds of the image. UserError when its label is not that of the index."""
        head, content = self._read(index)
        if head.label != self._labels[index]:
            raise UserError(f"{self.describe(index)}: has the label {head.label:g} and not {self._labels[index]}: "
                            "the file was changed, or does not belong to what lies beside it")
        return content

    def picture(self, encoded: bytes, index: int) -> images.Picture:
        """The image that a record's content is of."""
        return _picture(encoded, self.describe(index))

    def describe(self, index: int) -> str:
        """The sample's place, for messages."""
        return f"{self._file.path}, record {self._numbers[index]}"

    def _read(self, index: int) -> Tuple[Head, bytes]:
        try:
            return unpack(unframe(self._file.read(int(self._starts[index]), int(self._ends[index]))))
        except BrokenRecord as error:
            raise BadSample(f"{self.describe(index)}: {error}") from None
        except OSError as error:
            raise BadSample(f"{self.describe(index)}: {error.strerror}") from error


def find(path: str) -> Optional[Found]:
    """The record files that a path names: a .rec file with its ending or without, or a folder with train.rec.

    None when it names something else. UserError for a .rec file that is not there.
    """
    if os.path.isdir(path):
        return _find_in(path)
    rec = paths_of(path).rec
    if os.path.isfile(rec):
        return Found(rec, None, [])
    if path.lower().endswith((".rec", ".idx")):
        raise UserError(f"{rec}: does not exist")
    return None


def source(found: Found, config: DataConfig) -> parts.Source:
    """What `find` found, and what --val names, of the same kind."""
    notes = list(found.notes)
    val_path = found.val
    if config.val is not None:
        if val_path is not None:
            notes.append(f"{val_path}: not used, because of --val {config.val}")
        val_found = find(os.path.expanduser(config.val))
        val_path = val_found.val or val_found.train
    part = open_part(found.train)
    used = np.unique(part.labels)
    classes = [_name(part, number, part.classes) for number in used]
    y = np.searchsorted(used, part.labels).astype(np.int32)
    notes += part.notes + _class_notes(part, used, classes)
    if val_path is None:
        rows, val, val_lines = _split(part, y, classes, config)
    else:
        rows = np.arange(len(y))
        val, val_lines, val_notes = _validation(open_part(val_path), part.classes, classes)
        notes += val_notes + parts.unused_split(config, val_path)
    return parts.Source(
        name="records",
        train=RecordDataset(part, rows, y[rows]),
        val=val,
        classes=classes,
        fingerprint=parts.digest(classes, _fingerprint_lines(part, rows), val_lines),
        augment="crop",
        notes=notes,
    )


def _class_notes(part: Part, used: np.ndarray, classes: List[str]) -> List[str]:
    if part.classes is None:  # numbers in their own order
        missing = f"{paths_of(part.file.path).classes}: is not there; the classes are called by their numbers"
        return [] if part.checksum else [missing]
    unused = [part.classes[number] for number in np.setdiff1d(np.arange(len(part.classes)), used)]
    left_out = [f"{part.file.path}: no images of class {parts.listed(unused)}, which is left out"] if unused else []
    return class_notes(classes) + left_out


def _split(
    part: Part, y: np.ndarray, classes: List[str], config: DataConfig
) -> Tuple[np.ndarray, Optional[RecordDataset], List]:
    """Rows to train on, the dataset of the others, and what identifies those."""
    share = parts.VAL_SPLIT if config.val_split is None else config.val_split
    held = _hold_out(part, y, classes, share)
    rows = np.flatnonzero(held)
    if share and not len(rows):
        raise UserError(
            f"{part.file.path}: no class has the two images that it takes to hold one out; "
            "give --val, or --val-split 0 to train without validation"
        )
    val = RecordDataset(part, rows, y[rows]) if len(rows) else None
    return np.flatnonzero(~held), val, _fingerprint_lines(part, rows)


def _validation(
    part: Part, names: Optional[List[str]], classes: List[str]
) -> Tuple[RecordDataset, List, List[str]]:
    """A whole file with the labels of the training by name -> its dataset, what identifies it, and notes.

    names: of the class numbers of the training file, for a file that has none of its own.
    """
    used = np.unique(part.labels)
    found = [_name(part, number, part.classes or names) for number in used]
    parts.val_classes(part.file.path, found, classes)
    label = {name: number for number, name in enumerate(classes)}
    y = np.array([label[name] for name in found], np.int32)[np.searchsorted(used, part.labels)]
    rows = np.arange(len(y))
    return RecordDataset(part, rows, y), _fingerprint_lines(part, rows), part.notes


def open_part(path: str) -> Part:
    """Open a record file: where its records lie, and their labels.

    For a file that make_records.py wrote, that comes from what lies beside it. Of any other, every record's head is
    read, and compared with the index. UserError for damage, an index that is another file's, and labels that
    are no class numbers.
    """
    paths = paths_of(path)
    file = RecordFile(paths.rec)
    if not file.size:
        raise UserError(f"{paths.rec}: holds no records")
    about, fault = read_about(paths, file.size)
    part = _own_part(paths, file, about) if about else _any_part(paths, file)
    return part._replace(notes=([fault] if fault else []) + part.notes, classes=read_classes(paths.classes))


def verify(path: str) -> None:
    """Reads a record file that make_records.py wrote to its end. UserError when its checksum is another now."""
    paths = paths_of(path)
    about, _ = read_about(paths, os.path.getsize(paths.rec))
    if about and files.sha256(paths.rec) != about["sha256"]:
        raise UserError(f"{paths.rec}: is damaged: its checksum is not that in {paths.json}")


def _own_part(paths: Paths, file: RecordFile, about: dict) -> Part:
    numbers, starts = read_index(paths.idx)
    with open(paths.lst, encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        rows = [line.rstrip("\n").split("\t", 2) for line in lines]
    labels = np.array([row[1] for row in rows]).astype(np.int64)
    names = [row[2] for row in rows]
    if not len(numbers) == len(labels) == about["records"]:
        raise UserError(f"{paths.json}: tells of {about['records']} records, {paths.idx} of {len(numbers)} and "
                        f"{paths.lst} of {len(labels)}")
    ends = np.append(starts[1:], file.size)
    return Part(file, starts, ends, numbers, labels, names, None, about["sha256"], [])


def _any_part(paths: Paths, file: RecordFile) -> Part:
    heads = list(file.heads())
    starts = np.array([head.start for head in heads], np.int64)
    notes = []
    if os.path.isfile(paths.idx):
        numbers = _indexed(paths, starts, file.size)
    else:
        numbers = np.arange(len(heads))
        notes.append(f"{paths.idx}: is missing; the {len(heads)} records were found by reading through the file")
    for head, number in zip(heads, numbers):
        if head.labels > 1:
            raise UserError(f"{paths.rec}, record {number}: has {head.labels} labels; one label for each image is read "
                            "here")
        if not (0 <= head.label < 2**31 and head.label == int(head.label)):
            raise UserError(f"{paths.rec}, record {number}: label {head.label:g}; labels must be whole numbers from 0 "
                            "on")
    ends = np.array([head.end for head in heads], np.int64)
    labels = np.array([head.label for head in heads], np.int64)
    return Part(file, starts, ends, numbers, labels, None, None, None, notes)


def _indexed(paths: Paths, starts: np.ndarray, size: int) -> np.ndarray:
    """The numbers that an index gives to the records at `starts`. UserError when it is another file's."""
    numbers, places = read_index(paths.idx)
    strange = np.flatnonzero(~np.isin(places, starts))
    if strange.size:
        first = strange[0]
        if places[first] >= size:
            raise UserError(f"{paths.rec}: is cut short, or {paths.idx} is another file's: record {numbers[first]} "
                            f"should begin at byte {places[first]}, and the file has {size}")
        raise UserError(f"{paths.idx}: record {numbers[first]} at byte {places[first]}: no record of {paths.rec} "
                        "begins there; the index is of another file or another version (without it, the records are "
                        "found by reading through the file)")
    if len(places) != len(starts) or len(np.unique(places)) != len(starts):
        raise UserError(f"{paths.idx}: names {len(np.unique(places))} records in {len(places)} lines, but {paths.rec} "
                        f"holds {len(starts)}; the index is of another version (without it, the records are found by "
                        "reading through the file)")
    if len(np.unique(numbers)) != len(numbers):
        raise UserError(f"{paths.idx}: gives the same number to two records")
    return numbers[np.argsort(places)]


def _name(part: Part, number: int, classes: Optional[List[str]]) -> str:
    if classes is None:
        return str(number)
    if number >= len(classes):
        record = part.numbers[np.flatnonzero(part.labels == number)[0]]
        raise UserError(f"{part.file.path}, record {record}: label {number} has no name: the list of classes has "
                        f"{len(classes)}, for 0 to {len(classes) - 1}")
    return classes[number]


def _hold_out(part: Part, y: np.ndarray, classes: List[str], share: float) -> np.ndarray:
    """By the names of the images, as a folder of them would be split, else by the numbers of the records."""
    held = np.zeros(len(y), bool)
    if share:
        for name, rows in parts.by_class(y, classes).items():
            names = [part.names[row] if part.names else f"{name}/{part.numbers[row]}" for row in rows]
            held[rows] = parts.hold_out_by_name(names, share)
    return held


def _fingerprint_lines(part: Part, rows: np.ndarray) -> List:
    """What identifies the records of a part: the file's checksum where that is known, else sizes and labels."""
    if part.checksum:
        return [part.checksum, rows.astype("<i8")]
    return [(part.ends - part.starts)[rows].astype("<i8"), part.labels[rows].astype("<i8")]


def _picture(content: bytes, name: str) -> images.Picture:
    """The image in a record, encoded or as an array; three channels."""
    if not content.startswith(_NUMPY):
        return images.picture(content, name)
    try:
        image = np.load(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # damaged headers raise nearly anything: TokenError, MemoryError, ValueError ...
        raise BadSample(f"{name}: not read as a numpy array: {' '.join(str(error).split())}") from None
    if image.ndim == 2:
        image = image[..., np.newaxis]
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3) or not image.size:
        raise BadSample(f"{name}: an array of type {image.dtype} and shape {image.shape}; must be uint8 (height, "
                        "width, 3)")
    return image if image.shape[2] == 3 else np.repeat(image, 3, axis=2)


def _folders_in(folder: str) -> List[str]:
    """The folders in a folder, but for hidden ones: classes of images, perhaps."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _find_in(folder: str) -> Optional[Found]:
    names = {name[:-4].lower(): os.path.join(folder, name) for name in sorted(os.listdir(folder))
             if name.lower().endswith(".rec") and not name.startswith(".")}
    train = next((names[name] for name in TRAIN_NAMES if name in names), None)
    if train is not None:
        val = next((names[name] for name in VAL_NAMES if name in names), None)
        unused = [os.path.basename(path) for path in names.values() if path not in (train, val)] + _folders_in(folder)
        return Found(train, val, [f"{folder}: not used: {parts.listed(unused)}"] if unused else [])
    if not names or _folders_in(folder):
        return None
    if len(names) > 1:
        raise UserError(f"{folder}: holds {parts.listed([os.path.basename(path) for path in names.values()])} but no "
                        "train.rec; name the one to train on by --data and the other by --val")
    return Found(next(iter(names.values())), None, [])
