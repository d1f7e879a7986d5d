"""How images reach the network: at which size, and with which random changes in training."""

from __future__ import annotations

import functools
from typing import Callable, NamedTuple, Optional, Tuple

import numpy as np

from mxtrain.data import images
from mxtrain.data.augment import Changes, change
from mxtrain.data.settings import DataConfig, operations_and_magnitude
from mxtrain.errors import UserError

Shape = Tuple[int, int, int]
Transform = Callable[[np.ndarray, int, int], np.ndarray]

_FOLDER_IMAGE_SIZE = 224


class Delivery(NamedTuple):
    """The shape (h, w, c) of delivered images, the augmentation, and what is applied to each image.

    augment: in words, all that is on.
    resize: the shorter side that an evaluated image is scaled to, None where it is delivered as it is stored.

    A transform, (image, epoch, index) -> image, is None where images are delivered as they are stored.
    """

    shape: Shape
    augment: str
    train: Optional[Transform]
    evaluate: Optional[Transform]
    resize: Optional[int]


def delivery_of(
    config: DataConfig, default_augment: str, shape: Optional[Shape], seed: int, peak: int = 255
) -> Delivery:
    """What the settings make of images stored as `shape`, None when each has its own size and three channels.

    peak: the images' value of full intensity. UserError when the sizes or the changes that were asked for do not
    fit these images.
    """
    augment = config.augment or default_augment
    pixels = _folder_pixels(config) if shape is None else _array_pixels(config, shape, augment)
    resize, size = pixels or (None, None)
    evaluate = functools.partial(_evaluate, resize=resize, size=size) if pixels else None
    changes = _changes(config, shape[2] if shape else 3, peak)
    train = functools.partial(_augment, resize=resize, size=size, augment=augment, changes=changes, seed=seed)
    return Delivery(
        shape=(size, size, shape[2] if shape else 3) if pixels else shape,
        augment=f"{augment}, {changes}" if any(changes) else augment,
        train=train if augment != "none" or any(changes) else evaluate,
        evaluate=evaluate,
        resize=resize,
    )


def by(shape: Tuple[int, ...]) -> str:
    """A shape as people write it: 28x28x1."""
    return "x".join(map(str, shape))


def _changes(config: DataConfig, channels: int, peak: int) -> Changes:
    """The settings' changes of pixels. UserError for what makes no sense, or none at all, for these images."""
    changes = Changes(
        rand_augment=config.rand_augment and operations_and_magnitude(config.rand_augment),
        color_jitter=config.color_jitter,
        hue=config.hue,
        lighting=config.lighting,
        random_erasing=config.random_erasing,
    )
    for name, value in changes._asdict().items():
        flag = f"--{name.replace('_', '-')} {getattr(config, name)}"
        if value and peak != 255:
            raise UserError(f"{flag}: is for pixels from 0 to 255, and these go from 0 to {peak}")
        if value and channels not in (1, 3):
            raise UserError(f"{flag}: is for images of 1 or 3 channels, and these have {channels}")
        if value and channels == 1 and name in ("hue", "lighting"):
            raise UserError(f"{flag}: is for color images, and these have one channel")
    return changes


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
    changes: Changes,
    seed: int,
) -> np.ndarray:
    image = images.train_transform(image, size, images.sample_rng(seed, epoch, index), augment, resize)
    return change(image, changes, seed, epoch, index) if any(changes) else image
