"""How images reach the network: at which size, and with which random changes in training."""

from __future__ import annotations

import functools
from typing import Callable, NamedTuple, Optional, Tuple

import numpy as np

from mxtrain.data import images
from mxtrain.data.settings import DataConfig
from mxtrain.errors import UserError

Shape = Tuple[int, int, int]
Transform = Callable[[np.ndarray, int, int], np.ndarray]

_FOLDER_IMAGE_SIZE = 224


class Delivery(NamedTuple):
    """The shape (h, w, c) of delivered images, the augmentation, and what is applied to each image.

    resize: the shorter side that an evaluated image is scaled to, None where it is delivered as it is stored.

    A transform, (image, epoch, index) -> image, is None where images are delivered as they are stored.
    """

    shape: Shape
    augment: str
    train: Optional[Transform]
    evaluate: Optional[Transform]
    resize: Optional[int]


def delivery_of(config: DataConfig, default_augment: str, shape: Optional[Shape], seed: int) -> Delivery:
    """What the settings make of images stored as `shape`, None when each has its own size and three channels.

    UserError when the sizes that were asked for do not fit these images.
    """
    augment = config.augment or default_augment
    pixels = _folder_pixels(config) if shape is None else _array_pixels(config, shape, augment)
    resize, size = pixels or (None, None)
    evaluate = functools.partial(_evaluate, resize=resize, size=size) if pixels else None
    train = functools.partial(_augment, resize=resize, size=size, augment=augment, seed=seed)
    return Delivery(
        shape=(size, size, shape[2] if shape else 3) if pixels else shape,
        augment=augment,
        train=evaluate if augment == "none" else train,
        evaluate=evaluate,
        resize=resize,
    )


def by(shape: Tuple[int, ...]) -> str:
    """A shape as people write it: 28x28x1."""
    return "x".join(map(str, shape))


def _folder_pixels(config: DataConfig) -> Tuple[int, int]:
    """(resize, size) for images of any size."""
    size = config.image_size or _FOLDER_IMAGE_SIZE
    return _checked(config.resize or round(size * 8 / 7), size)


def _array_pixels(config: DataConfig, shape: Shape, augment: str) -> Optional[Tuple[int, int]]:
    """(resize, size) for images that all have one shape, or None when nothing has to be scaled or cut."""
    height, width, _ = shape
    if config.image_size is None and config.resize is None and augment != "crop":
        return None
    if config.image_size is None and height != width:
        flag = "--augment crop" if config.resize is None else f"--resize {config.resize}"
        raise UserError(f"{flag} needs --image-size: it gives squares, and these images are {by(shape)}")
    size = config.image_size or height
    resize = config.resize or size
    if resize == size == height == width and augment != "crop":
        return None
    return _checked(resize, size)


def _checked(resize: int, size: int) -> Tuple[int, int]:
    if resize < size:
        raise UserError(f"--resize {resize}: must be at least the image size, which is {size} for this data")
    return resize, size


def _evaluate(image: np.ndarray, epoch: int, index: int, resize: int, size: int) -> np.ndarray:
    return images.eval_transform(image, resize, size)


def _augment(
    image: np.ndarray,
    epoch: int,
    index: int,
    resize: Optional[int],
    size: Optional[int],
    augment: str,
    seed: int,
) -> np.ndarray:
    return images.train_transform(image, size, images.sample_rng(seed, epoch, index), augment, resize)
