"""Images that are made up, for trying things out without data: cheap, and the same everywhere."""

from __future__ import annotations

import math
import re
from typing import Optional, Tuple

import numpy as np
from mxnet import gluon

from mxtrain.data import parts
from mxtrain.data.datasets import Key, Sample
from mxtrain.data.delivery import Shape, by
from mxtrain.data.settings import DataConfig
from mxtrain.errors import UserError

_SPEC = re.compile(r"synthetic(?::(\d+)(?:,(\d+)x(\d+)x(\d+)(?:,(\d+))?)?)?")
_COUNT, _SHAPE, _CLASSES = 1000, (224, 224, 3), 10
_MOST = 100_000_000  # images, and values of an image: some GB of memory
_NOISE = 64
# More than an image of the default size, and prime, so that the noise of all images starts elsewhere.
_NOISE_LENGTH = 1_000_003


def names_synthetic(data: str) -> bool:
    """Whether --data asks for these images."""
    return data == "synthetic" or data.startswith("synthetic:")


def source(config: DataConfig) -> parts.Source:
    """The images that `synthetic:N,HxWxC,CLASSES` asks for; a share of each class is held out."""
    count, shape, classes = _parse(config.data)
    parts.refuse_val(config, "synthetic")
    y = np.arange(count) % classes
    held = parts.hold_out(y, parts.VAL_SPLIT if config.val_split is None else config.val_split)
    everything = np.arange(count) if held is None else np.flatnonzero(~held)
    train = SyntheticDataset(shape, classes, everything)
    val = None if held is None else SyntheticDataset(shape, classes, np.flatnonzero(held))
    names = [str(number) for number in range(classes)]
    said = f"synthetic:{count},{by(shape)},{classes}"
    fingerprint = parts.digest(names, [said], [str(len(val)) if val else "0"])
    return parts.Source("synthetic", train, val, names, fingerprint, "none", [f"{said}: images are made up"], shape)


class SyntheticDataset(gluon.data.Dataset):
    """Images of `shape`, uint8, each its class's color under noise; image i is of class i modulo `classes`.

    members: (n,) the numbers i of the images that belong to this part. An image is a function of i alone.
    """

    threads = True

    def __init__(self, shape: Shape, classes: int, members: np.ndarray):
        self.shape = shape
        self.members = members
        self.y = (members % classes).astype(np.int32)
        self._colors = _colors(classes, shape[2])
        length = max(_NOISE_LENGTH, int(np.prod(shape)) + 1)
        noise = np.random.RandomState(0).randint(0, _NOISE, length, dtype=np.uint8)
        self._noise, self._starts = np.concatenate([noise, noise]), length

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, key: Key) -> Sample:
        _, index = key
        start = int(self.members[index]) * 7919 % self._starts
        noise = self._noise[start : start + int(np.prod(self.shape))].reshape(self.shape)
        return noise + self._colors[self.y[index]], self.y[index]


def _colors(classes: int, channels: int) -> np.ndarray:
    """A color for each class, spread evenly over the intensities that leave room for the noise -> uint8."""
    levels = 2
    while levels**channels < classes and levels < 256 - _NOISE:
        levels += 1
    digits = np.arange(classes)[:, np.newaxis] // levels ** np.arange(channels) % levels
    return (digits * (255 - _NOISE) // (levels - 1)).astype(np.uint8)


def _parse(data: str) -> Tuple[int, Shape, int]:
    match = _SPEC.fullmatch(data)
    if not match:
        raise UserError(f"--data {data}: must be synthetic or synthetic:IMAGES,HEIGHTxWIDTHxCHANNELS,CLASSES, such as "
                        f"synthetic:{_COUNT},{by(_SHAPE)},{_CLASSES}")
    count, height, width, channels, classes = (_number(text) for text in match.groups())
    shape = _SHAPE if height is None else (height, width, channels)
    count, classes = _COUNT if count is None else count, _CLASSES if classes is None else classes
    if shape[2] not in (1, 3) or not all(shape) or classes < 2 or count < classes:
        raise UserError(f"--data {data}: needs a height and a width of at least 1, 1 or 3 channels, 2 classes or more, "
                        "and an image for each class")
    if count > _MOST or math.prod(shape) > _MOST:
        raise UserError(f"--data {data}: at most {_MOST:,} images of as many values each can be made up")
    return count, shape, classes


def _number(text: Optional[str]) -> Optional[int]:
    return None if text is None else int(text)
