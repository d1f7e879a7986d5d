"""CIFAR-10 and CIFAR-100 as published, in the Python (pickle) and in the binary version.

A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
"""

from __future__ import annotations

import codecs
import glob
import os
import pickle
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from mxtrain.data import parts
from mxtrain.data.settings import DataConfig
from mxtrain.errors import UserError

_IMAGE_BYTES = 3 * 32 * 32


class Layout(NamedTuple):
    """Where one published version keeps its parts; `label_bytes` > 0 marks the binary versions."""

    name: str
    train: str  # a glob pattern
    train_files: int
    test: str
    names: str
    label_key: str = ""
    names_key: str = ""
    label_bytes: int = 0  # before each image; the last of them is the (fine) label


_LAYOUTS = (
    Layout("cifar10", "data_batch_[1-5]", 5, "test_batch", "batches.meta", "labels", "label_names"),
    Layout("cifar10", "data_batch_[1-5].bin", 5, "test_batch.bin", "batches.meta.txt", label_bytes=1),
    Layout("cifar100", "train", 1, "test", "meta", "fine_labels", "fine_label_names"),
    Layout("cifar100", "train.bin", 1, "test.bin", "fine_label_names.txt", label_bytes=2),
)

Part = Tuple[np.ndarray, np.ndarray]


def find(folder: str) -> Optional[Layout]:
    """The version of CIFAR that a folder holds, or None. Only names are looked at."""
    for layout in _LAYOUTS:
        if os.path.isfile(os.path.join(folder, layout.names)) and _train_files(folder, layout):
            return layout
    return None


def source(place: str, layout: Layout, config: DataConfig) -> parts.Source:
    """What `find` found in the folder `place`."""
    parts.refuse_val(config, layout.name)
    train, val, classes, notes = read(place, layout)
    for part in (train, val):
        if part is not None and part[1].size and part[1].max() >= len(classes):
            raise UserError(
                f"{place}: label {part[1].max()} has no name: {layout.names} lists {len(classes)} classes"
            )
    train, val, split_notes = parts.checked_parts(
        parts.Arrays(*train), None if val is None else parts.Arrays(*val), place, config
    )
    return parts.in_memory(layout.name, train, val, classes, "shift-flip", notes + split_notes)


def read(folder: str, layout: Layout) -> Tuple[Part, Optional[Part], List[str], List[str]]:
    """Read a folder of the given version -> training part, test part or None, class names, notes.

    A part is (x, y). x: (n, 32, 32, 3) uint8 RGB, y: (n,) uint8. UserError with the path for a damaged file.
    """
    paths = _train_files(folder, layout)
    files = [_read_part(path, layout) for path in paths]
    train = np.concatenate([x for x, _ in files]), np.concatenate([y for _, y in files])
    test_path = os.path.join(folder, layout.test)
    test = _read_part(test_path, layout) if os.path.isfile(test_path) else None
    notes = []
    if len(paths) != layout.train_files:
        notes.append(f"{folder}: only {len(paths)} of {layout.train_files} training files found")
    return train, test, _read_names(os.path.join(folder, layout.names), layout), notes


def _train_files(folder: str, layout: Layout) -> List[str]:
    found = sorted(glob.glob(os.path.join(glob.escape(folder), layout.train)))
    return [path for path in found if os.path.isfile(path)]


def _read_part(path: str, layout: Layout) -> Part:
    if layout.label_bytes:
        row = layout.label_bytes + _IMAGE_BYTES
        content = np.fromfile(path, np.uint8)
        if content.size % row:
            raise UserError(
                f"{path}: truncated or damaged: {content.size} bytes are no multiple of {row} per image"
            )
        rows = content.reshape(-1, row)
        planes, labels = rows[:, layout.label_bytes :], rows[:, layout.label_bytes - 1]
    else:
        entries = _unpickle(path)
        planes, labels = np.asarray(entries.get("data")), np.asarray(entries.get(layout.label_key))
        if planes.dtype != np.uint8 or planes.shape != (labels.size, _IMAGE_BYTES):
            raise UserError(
                f"{path}: not a CIFAR file: needs uint8 'data' (n, {_IMAGE_BYTES}) and n '{layout.label_key}'"
            )
    x = np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return x, labels.astype(np.uint8)


def _read_names(path: str, layout: Layout) -> List[str]:
    if layout.label_bytes:
        with open(path, encoding="utf-8") as file:
            return [line.strip() for line in file if line.strip()]
    names = _unpickle(path).get(layout.names_key)
    if not isinstance(names, list):
        raise UserError(f"{path}: holds no list '{layout.names_key}'")
    return [_text(name) for name in names]


class _ArraysOnly(pickle.Unpickler):
    """Unpickles numpy arrays and plain values. A pickle may name functions to call: these."""

    _ALLOWED = {
        "_reconstruct": np.core.multiarray._reconstruct,
        "scalar": np.core.multiarray.scalar,
        "_frombuffer": np.core.numeric._frombuffer,
        "ndarray": np.ndarray,
        "dtype": np.dtype,
        "encode": codecs.encode,  # how protocol 2 writes bytes
    }
    _MODULES = {"numpy", "_codecs"} | {
        f"numpy.{core}.{module}" for core in ("core", "_core") for module in ("multiarray", "numeric")
    }

    def find_class(self, module: str, name: str) -> Any:
        if module in self._MODULES and name in self._ALLOWED:
            return self._ALLOWED[name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only numpy arrays are allowed")


def _unpickle(path: str) -> Dict[str, Any]:
    """Read a pickled dictionary, of Python 2 or 3, without running anything that it names."""
    try:
        with open(path, "rb") as file:
            entries = _ArraysOnly(file, encoding="bytes").load()
    except Exception as error:  # damaged pickles raise nearly anything
        raise UserError(f"{path}: not read: {error}") from error
    if not isinstance(entries, dict):
        raise UserError(f"{path}: not a CIFAR file: holds a {type(entries).__name__}, not a dictionary")
    return {_text(key): value for key, value in entries.items()}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
