"""Lists of images: .lst files as of MXNet's im2rec (number, label, path between tabs), CSV and TSV with a header.

The labels of a .lst are class numbers, whose names may stand in a file beside it: NAME.classes.txt or
classes.txt. The labels of a table are class names, sorted as text. Images are ordered by class and path, so
that the order of the rows plays no part.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections import Counter
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from mxtrain.data.folder import Image, Part, source_of_files
from mxtrain.data.parts import Source, class_name
from mxtrain.data.record_files import read_classes
from mxtrain.data.settings import DataConfig
from mxtrain.data.table import EXTENSIONS, IMAGE_COLUMNS, LABEL_COLUMNS, find_column, read_table
from mxtrain.errors import UserError

_ENDINGS = (".lst", *EXTENSIONS)


class Row(NamedTuple):
    """What a row says: its line in the file, its label and its path."""

    line: int
    label: str
    path: str


class Listing(NamedTuple):
    """The images of a list by class. numbers: the label that a record file gives to each class."""

    part: Part
    numbers: Dict[str, int]
    names: Optional[List[str]]
    notes: List[str]


def find(path: str) -> Optional[str]:
    """`path`, if it is a list by its ending; else None."""
    return path if path.lower().endswith(_ENDINGS) and os.path.isfile(path) else None


def source(path: str, config: DataConfig) -> Source:
    """The images of a list; those of --val, another list, or a share of them are for validation."""
    train = read(path, config)
    notes = list(train.notes)
    val_part = None
    if config.val is not None:
        val = read(os.path.expanduser(config.val), config, train.names)
        val_part = val.part
        notes += val.notes
        trained = {os.path.abspath(image.path) for images in train.part.images.values() for image in images}
        both = sum(os.path.abspath(image.path) in trained for images in val_part.images.values() for image in images)
        if both:
            notes.append(f"{config.val}: {both} of its images are training images too")
    return source_of_files("list", train.part, val_part, config, notes, key=lambda _, image: image.name)


def read(path: str, config: DataConfig, names: Optional[List[str]] = None) -> Listing:
    """The images of a list. names: of the class numbers of a .lst that has none of its own.

    UserError, with the line, for what is no row, a label that cannot be, a file that is not there, and a file
    with two labels.
    """
    notes: List[str] = []
    if path.lower().endswith(".lst"):
        rows = _lst_rows(path)
        names = _names_beside(path) or names
        names_of = {number: _lst_class(path, number, names) for number in sorted({int(row.label) for row in rows})}
        numbers = {name: number for number, name in names_of.items()}
        rows = [row._replace(label=names_of[int(row.label)]) for row in rows]
    else:
        rows, notes = _table_rows(path, config)
        numbers = {name: number for number, name in enumerate(sorted({row.label for row in rows}))}
    images, found = _images(path, os.path.expanduser(config.data_root or os.path.dirname(path)), rows)
    part = Part(path, {name: sorted(images[name], key=lambda image: image.name) for name in numbers}, [], Counter())
    return Listing(part, numbers, names if path.lower().endswith(".lst") else None, notes + found)


def _lst_rows(path: str) -> List[Row]:
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
            lines = file.read().split("\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    rows = []
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        if "\0" in text:
            raise UserError(f"{path}, line {line}: holds a NUL character: it is no list, or damaged")
        fields = text.rstrip("\r").split("\t")
        if len(fields) < 3:
            raise UserError(f"{path}, line {line}: has {len(fields)} fields between tabs; expected a number, a label "
                            "and a path")
        if len(fields) > 3:
            raise UserError(f"{path}, line {line}: has {len(fields) - 2} labels; one label for each image is read here")
        rows.append(Row(line, _whole(path, line, fields[1]), fields[2]))
    if not rows:
        raise UserError(f"{path}: lists no images")
    return rows


def _whole(path: str, line: int, label: str) -> str:
    """A class number as people write it, from what may be written 3.000000."""
    try:
        number = float(label)
    except ValueError:
        number = -1.0
    if not (0 <= number < 2**31 and number == int(number)):
        raise UserError(f"{path}, line {line}: label {label!r}; the labels of a .lst must be whole numbers from 0 on")
    return str(int(number))


def _names_beside(path: str) -> Optional[List[str]]:
    own = read_classes(f"{path[:-4]}.classes.txt")
    return own or read_classes(os.path.join(os.path.dirname(path), "classes.txt"))


def _lst_class(path: str, number: int, names: Optional[List[str]]) -> str:
    if names is None:
        return str(number)
    if number >= len(names):
        raise UserError(f"{path}: label {number} has no name: the list of classes has {len(names)}, for 0 to "
                        f"{len(names) - 1}")
    return names[number]


def _table_rows(path: str, config: DataConfig) -> Tuple[List[Row], List[str]]:
    table = read_table(path)
    image = find_column(table, config.image_column, IMAGE_COLUMNS, "--image-column")
    label = find_column(table, config.label_column, LABEL_COLUMNS, "--label-column")
    rows = []
    for line, fields in zip(table.lines, table.rows):
        for column, what in ((image, "path"), (label, "label")):
            if not fields[column].strip():
                raise UserError(f"{path}, line {line}: no {what} in the column {table.columns[column]!r}")
        name = class_name(f"{path}, line {line}: label", fields[label].strip())
        rows.append(Row(line, name, fields[image].strip()))
    return rows, list(table.notes)


def _images(path: str, root: str, rows: Sequence[Row]) -> Tuple[Dict[str, List[Image]], List[str]]:
    """The files of the rows by class, and what was notable."""
    images: Dict[str, List[Image]] = {}
    first: Dict[str, Row] = {}
    missing: List[Tuple[Row, str]] = []
    twice = 0
    below = os.path.join(os.path.abspath(root), "")
    for row in rows:
        # What lies below the root has the same name, and so the same part, wherever the root is.
        name = posixpath.normpath(row.path[len(below):] if row.path.startswith(below) else row.path)
        file = os.path.join(root, os.path.expanduser(row.path))
        before = first.setdefault(name, row)
        if before.label != row.label:
            raise UserError(f"{path}, line {row.line}: {row.path} has the label {row.label!r} here and "
                            f"{before.label!r} in line {before.line}")
        twice += before is not row
        try:
            status = os.stat(file)
        except OSError as error:
            missing.append((row, error.strerror))
            continue
        if stat.S_ISDIR(status.st_mode):
            missing.append((row, os.strerror(errno.EISDIR)))
            continue
        images.setdefault(row.label, []).append(Image(file, name, status.st_size))
    if missing:
        row, why = missing[0]
        more = f" ({len(missing)} of {len(rows)} rows)" if len(missing) > 1 else ""
        raise UserError(f"{path}, line {row.line}: {os.path.join(root, row.path)}: {why}{more}; --data-root says where "
                        "the paths start from")
    return images, [f"{path}: {twice} rows name an image again; each counts"] if twice else []
