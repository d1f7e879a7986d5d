"""Texts of a table as a run's data: columns, labels, the held-out part, and what there is to say about them."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from mxtrain.data.bags import Features, TextDataset, encode, words
from mxtrain.data.folder import class_notes
from mxtrain.data.parts import VAL_SPLIT, class_name, digest, hold_out_by_name, listed
from mxtrain.data.settings import DataConfig
from mxtrain.data.table import EXTENSIONS, LABEL_COLUMNS, TEXT_COLUMNS, Table, find_column, read_table
from mxtrain.data.text_settings import TextConfig
from mxtrain.errors import UserError


class Labelled(NamedTuple):
    """Texts and their labels from a table, in lists of equal lengths."""

    path: str
    columns: Tuple[str, str]
    """Names of the columns of texts and labels."""
    texts: List[str]
    labels: List[str]
    lines: List[int]
    """Of the file, from 1."""

    def part(self, rows: List[int]) -> Labelled:
        return self._replace(**{name: [getattr(self, name)[i] for i in rows] for name in ("texts", "labels", "lines")})


@dataclass
class TextData:
    """The texts of a run: what `open_texts` returns. Items of `train` and `val` are (ids, label)."""

    name: str
    train: TextDataset
    val: Optional[TextDataset]
    classes: List[str]
    fingerprint: str
    """Hex digest; changes with the texts, the classes and the split, not with the place on disk."""
    columns: Tuple[str, str]
    """Names of the columns of texts and labels."""
    notes: List[str]


def open_texts(data: DataConfig, text: TextConfig) -> TextData:
    """Reads the table that `data` names, and holds texts out where there is no validation table.

    UserError, naming the flag, the file or the line, for what cannot be read, rows without a label, classes that only
    validation has, and a part that would be empty.
    """
    table = open_table(data.data, text.encoding)
    train, notes = labelled(table, text.text_column, data.label_column), list(table.notes)
    classes = sorted(set(train.labels))
    _check_classes(train, classes)
    notes += _label_notes(classes)
    if data.val is None:
        train, val, more = _hold_out(train, classes, VAL_SPLIT if data.val_split is None else data.val_split)
    else:
        table = open_table(data.val, text.encoding, "--val")
        val = labelled(table, text.text_column, data.label_column)
        check_known(val, classes)
        more = [*table.notes, *_overlap(train, val)]
    more += absent(train, classes, "training texts")  # of texts with several labels, all rows are held out
    more += absent(val, classes, "validation texts") if val else []
    how = Features(text.ngrams, text.buckets, text.max_tokens)
    train_data, train_notes = dataset(train, classes, how, "training")
    val_data, val_notes = dataset(val, classes, how, "validation") if val else (None, [])
    found = (f"text: {len(train.texts)} training and {len(val.texts) if val else 0} validation texts from column "
             f"{train.columns[0]!r}; training labels from {train.columns[1]!r}: {_counted(train.labels)}")
    return TextData(name=os.path.splitext(os.path.basename(train.path))[0], train=train_data, val=val_data,
                    classes=classes, fingerprint=digest(classes, _rows(train), _rows(val) if val else ()),
                    columns=train.columns, notes=[found, *notes, *more, *train_notes, *val_notes])


def labelled(table: Table, text_column: Optional[str], label_column: Optional[str]) -> Labelled:
    """The texts and labels of a table. Spaces around labels do not count.

    UserError for columns that cannot be told and for rows without a label.
    """
    text, label = (find_column(table, given, names, flag) for given, names, flag in (
        (text_column, TEXT_COLUMNS, "--text-column"), (label_column, LABEL_COLUMNS, "--label-column")))
    if text == label:
        raise UserError(f"{table.path}: --text-column and --label-column are both {table.columns[text]!r}")
    labels = [row[label].strip() for row in table.rows]
    missing = [line for line, name in zip(table.lines, labels) if not name]
    if missing:
        raise UserError(f"{table.path}: no label in column {table.columns[label]!r} in {len(missing)} of {len(labels)} "
                        f"rows ({_lines(missing)}): give them one, or take them out")
    spelling = {name: class_name(f"{table.path}, line {line}: label", name) for name, line in zip(labels, table.lines)}
    return Labelled(table.path, (table.columns[text], table.columns[label]), [row[text] for row in table.rows],
                    [spelling[name] for name in labels], table.lines)


def open_table(path: str, encoding: str, flag: str = "--data") -> Table:
    """Reads a table. UserError that names the flag when there is no such file."""
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        fault = "is no file" if os.path.exists(path) else "does not exist"
        raise UserError(f"{flag} {path}: {fault}; texts are read from a table ({', '.join(EXTENSIONS)})")
    return read_table(path, encoding=encoding)


def dataset(part: Labelled, classes: List[str], how: Features, name: str) -> Tuple[TextDataset, List[str]]:
    """The texts as ids and the labels as their places in `classes`; notes on what was cut or is empty."""
    bags, count = encode(part.texts, how), len(part.texts)
    place = {label: number for number, label in enumerate(classes)}
    notes = []
    if bags.cut:
        notes.append(f"{bags.cut} of {count} {name} texts have more than --max-tokens {how.max_tokens} features and "
                     "are cut")
    if bags.empty:
        notes.append(f"{bags.empty} of {count} {name} texts have no words")
    y = np.array([place[label] for label in part.labels], np.int32)
    return TextDataset(bags, y, how.max_tokens, part.path, part.lines), notes


def check_known(part: Labelled, classes: Sequence[str]) -> None:
    """Raises UserError for a label that is none of the classes."""
    known = set(classes)
    unknown = [(label, line) for label, line in zip(part.labels, part.lines) if label not in known]
    if unknown:
        label, line = unknown[0]
        raise UserError(f"{part.path}, line {line}: label {label!r} is none of the classes that are trained: "
                        + listed(classes))


def absent(part: Labelled, classes: Sequence[str], texts: str = "texts") -> List[str]:
    """A note on classes without any `texts`."""
    missing = sorted(set(classes) - set(part.labels))
    return [f"{part.path}: no {texts} of class {listed(missing)}"] if missing else []


def _check_classes(part: Labelled, classes: List[str]) -> None:
    column = f"{part.path}: column {part.columns[1]!r}"
    if len(classes) < 2:
        raise UserError(f"{column} holds only the label {classes[0]!r}; a classifier needs at least two "
                        "(--label-column names another column)")
    if len(part.labels) >= 20 and 2 * len(classes) > len(part.labels):
        raise UserError(f"{column} holds {len(classes)} different labels in {len(part.labels)} rows, such as "
                        f"{classes[0][:40]!r}: these are no classes; --label-column names another column")


def _label_notes(classes: List[str]) -> List[str]:
    notes = class_notes(classes)
    numbers = defaultdict(list)
    for name in classes:
        try:
            numbers[float(name)].append(name)
        except ValueError:
            pass
    for alike in numbers.values():
        if len(alike) > 1:
            notes.append(f"classes that are the same number are kept apart: {listed(alike)}")
    return notes


def _key(text: str) -> str:
    """Equal for texts that a network cannot tell apart by their words."""
    return " ".join(words(text)) or text.strip()


def _hold_out(whole: Labelled, classes: List[str], fraction: float) -> Tuple[Labelled, Optional[Labelled], List[str]]:
    """Holds out a share of each class, by the hash of the words, so that equal texts are in one part
    -> training, validation, notes."""
    keys = [_key(text) for text in whole.texts]
    notes = _duplicate_notes(whole, keys)
    if fraction == 0:
        return whole, None, notes
    owner = dict(zip(reversed(keys), reversed(whole.labels)))  # of a text with several labels, its first
    keys_of: Dict[str, List[str]] = defaultdict(list)
    for key, label in owner.items():
        keys_of[label].append(key)
    held = {key for own in keys_of.values() for key, out in zip(own, hold_out_by_name(own, fraction)) if out}
    val = [i for i, key in enumerate(keys) if key in held]
    if not val:
        raise UserError(f"{whole.path}: no class has two different texts, of which one could be held out; give --val, "
                        "or --val-split 0 to train without validation")
    return whole.part([i for i, key in enumerate(keys) if key not in held]), whole.part(val), notes


def _duplicate_notes(whole: Labelled, keys: List[str]) -> List[str]:
    labels: Dict[str, set] = defaultdict(set)
    for key, label in zip(keys, whole.labels):
        labels[key].add(label)
    notes = []
    if len(labels) < len(keys):
        notes.append(f"{len(keys) - len(labels)} of {len(keys)} texts repeat the words of one before; equal texts are "
                     "kept in one part, so that validation holds none of the training")
    several = [key for key, found in labels.items() if len(found) > 1]
    if several:
        rows = [line for key, line in zip(keys, whole.lines) if key == several[0]]
        notes.append(f"{len(several)} texts occur with different labels, the first in {_lines(rows)}")
    return notes


def _overlap(train: Labelled, val: Labelled) -> List[str]:
    known = {_key(text) for text in train.texts}
    count = sum(_key(text) in known for text in val.texts)
    return [f"{val.path}: {count} of {len(val.texts)} validation texts are training texts too: their share of the "
            "accuracy is learned by heart"] if count else []


def _rows(part: Labelled) -> Iterator[str]:
    """What identifies the texts of a part."""
    return (repr(row) for row in zip(part.labels, part.texts))


def _counted(labels: List[str]) -> str:
    counts = Counter(labels).most_common()
    shown = ", ".join(f"{name} {count:,}" for name, count in counts[:10])
    return shown if len(counts) <= 10 else f"{shown} and {len(counts) - 10} more"


def _lines(lines: Sequence[int]) -> str:
    return f"line{'s' * (len(lines) > 1)} " + ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
