"""Images and labels in idx files, the format of MNIST, FashionMNIST, EMNIST and their kin."""

from __future__ import annotations

import gzip
import math
import os
import re
import zlib
from typing import Dict, List, Tuple

import numpy as np

from mxtrain.data import parts
from mxtrain.data.settings import DataConfig
from mxtrain.errors import UserError

# "train-images-idx3-ubyte", with .gz or without, also with a dot before idx as some archives spell it; EMNIST
# puts its own name before train. Test parts are called t10k or test.
_IMAGES = re.compile(r"(?P<stem>.*?)(?P<role>train|t10k|test)-images(?P<dot>[-.])idx[34]-ubyte(?P<gz>\.gz)?")
_UBYTE = 8


def find(folder: str) -> Dict[str, Tuple[str, str]]:
    """The pairs of idx files in a folder, {"train": (images path, labels path), "test": ...} or fewer.

    UserError when labels are missing, or when the folder holds several sets, such as those of EMNIST.
    """
    names = sorted(os.listdir(folder))
    pairs: Dict[str, Tuple[str, str]] = {}
    for name in names:
        match = _IMAGES.fullmatch(name)
        if not match or (match["gz"] and name[: -len(".gz")] in names):
            continue
        role = "train" if match["role"] == "train" else "test"
        stem = f"{match['stem']}{match['role']}-labels{match['dot']}idx1-ubyte"
        labels = [other for other in (stem, stem + ".gz") if other in names]
        if not labels:
            raise UserError(f"{os.path.join(folder, name)}: its labels are missing: {stem} or {stem}.gz")
        if role in pairs:
            raise UserError(
                f"{folder}: holds more than one {role} part: {os.path.basename(pairs[role][0])} and {name}; "
                "keep one set in a folder"
            )
        pairs[role] = os.path.join(folder, name), os.path.join(folder, labels[0])
    return pairs


def source(place: str, pairs: Dict[str, Tuple[str, str]], config: DataConfig) -> parts.Source:
    """What `find` found in the folder `place`, and in --val."""
    notes = []
    if config.val is not None:
        val_pairs = find(os.path.expanduser(config.val))
        if not val_pairs:
            raise UserError(
                f"--val {config.val}: holds no idx files (*-images-idx3-ubyte), as --data {place} does"
            )
        train_pair = pairs.get("train") or pairs["test"]
        val_pair = val_pairs.get("test") or val_pairs["train"]
        notes.append(f"validation images: {val_pair[0]}")
    elif "train" in pairs:
        train_pair, val_pair = pairs["train"], pairs.get("test")
    else:
        train_pair, val_pair = pairs["test"], None
        notes.append(f"{place}: has a test part only; it is split into training and validation")
    train, val, classes = parts.numbered(
        read_pair(*train_pair),
        None if val_pair is None else read_pair(*val_pair),
        (train_pair[1], val_pair and val_pair[1]),
    )
    train, val, split_notes = parts.checked_parts(train, val, place, config)
    return parts.in_memory("idx", train, val, classes, "none", notes + split_notes)


def read_pair(images_path: str, labels_path: str) -> Tuple[np.ndarray, np.ndarray]:
    """Read one part -> images: (n, h, w, c) uint8, c = 1 where the file has no such axis; labels: (n,) uint8.

    UserError when a file is damaged or the two do not belong together.
    """
    images, labels = read(images_path), read(labels_path)
    if images.ndim not in (3, 4) or labels.ndim != 1:
        raise UserError(
            f"{images_path}: images of {images.ndim - 1} and labels of {labels.ndim - 1} axes each; "
            "expected 2 or 3 for images, 0 for labels"
        )
    if len(images) != len(labels):
        raise UserError(
            f"{images_path} holds {len(images)} images, but {labels_path} holds {len(labels)} labels"
        )
    return (images if images.ndim == 4 else images[..., np.newaxis]), labels


def read(path: str) -> np.ndarray:
    """Read an idx file of unsigned bytes -> uint8 array of the shape in its header. UserError if damaged."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UBYTE:
        raise UserError(
            f"{path}: not an idx file of unsigned bytes (starts with {content[:4].hex() or 'nothing'})"
        )
    start = 4 + 4 * content[3]
    shape: List[int] = np.frombuffer(content[4:start].ljust(start - 4, b"\0"), ">u4").tolist()
    if len(content) != start + math.prod(shape):
        raise UserError(
            f"{path}: truncated or damaged: {len(content)} bytes, but its header, {shape}, "
            f"means {start + math.prod(shape)}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
