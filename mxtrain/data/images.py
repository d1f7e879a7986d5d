"""The one path from a file to pixels, for training, evaluation and prediction alike.

Images are uint8 arrays (height, width, channels), RGB where there are three channels; JPEG files are decoded when
it is known which part is needed. Random changes take
their numbers from a generator that belongs to (seed, epoch, sample), never from a global stream: the pixels
do not depend on which worker reads a sample, or when.
"""

from __future__ import annotations

import math
import os
from typing import Optional, Tuple, Union

import cv2
import numpy as np

from mxtrain.data import jpeg
from mxtrain.errors import BadSample

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")

# The loader's workers are the parallelism; OpenCV's own threads would fight them, and do not survive a fork.
cv2.setNumThreads(0)
# A broken file is reported once, with its name, by load(); OpenCV would add several lines without one.
cv2.setLogLevel(0)

_WORD = (1 << 64) - 1

Picture = Union[np.ndarray, jpeg.Jpeg]
"""What has a shape (h, w, c) and can be `cut`."""


def load(path: str) -> Picture:
    """Read an image file -> RGB, upright, decoded now or when it is cut; see `picture`. BadSample with the path."""
    return picture(read(path), f"image {os.fspath(path)}")


def read(path: str) -> bytes:
    """The bytes of an image file. BadSample with the path."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError as error:
        raise BadSample(f"image {os.fspath(path)}: {error.strerror}") from error


def picture(encoded: bytes, name: str) -> Picture:
    """An encoded image, RGB, upright. The usual JPEG files are decoded later, by `cut`, and only what it needs.

    name: for messages. BadSample for what is truncated or no image; of a JPEG this may also come from `cut`.
    """
    return jpeg.opened(encoded, name) or decode(encoded, name)


def cut(image: Picture, box: jpeg.Box, at_least: Tuple[int, int]) -> np.ndarray:
    """The pixels of a box (top, left, height, width) -> (h, w, c) uint8.

    Those of a JPEG are scaled down by 2, 4 or 8, which saves its decoder work, as long as they are `at_least`
    (height, width).
    """
    if isinstance(image, jpeg.Jpeg):
        return image.cut(box, at_least)
    top, left, height, width = box
    return image[top : top + height, left : left + width]


def pixels(image: Picture) -> np.ndarray:
    """All pixels: (h, w, c) uint8."""
    height, width, _ = image.shape
    return cut(image, (0, 0, height, width), (height, width))


def decode(encoded: bytes, name: str) -> np.ndarray:
    """Decode an image -> (height, width, 3) uint8 RGB, upright.

    The EXIF orientation of JPEG and PNG is applied. Grey, palette, CMYK and 16-bit images become 8-bit RGB;
    an alpha channel is dropped. BadSample with `name` for what is truncated or no image.
    """
    try:
        image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR) if encoded else None
    except cv2.error:  # such as more pixels than OpenCV's limit
        image = None
    if image is None:
        raise BadSample(f"{name} ({len(encoded)} bytes): broken, cut short, or not a format OpenCV reads")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def scale(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize (h, w, c) -> (height, width, c): bilinear; averages over areas where a side shrinks to a half or less,
    of which bilinear interpolation would leave out pixels."""
    if image.shape[:2] == (height, width):
        return image
    halves = image.shape[0] >= 2 * height or image.shape[1] >= 2 * width
    scaled = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if halves else cv2.INTER_LINEAR)
    return scaled.reshape(height, width, -1)  # cv2 drops the axis of a single channel


def eval_transform(image: Picture, resize: int, size: int) -> np.ndarray:
    """Scale the shorter side to `resize` and cut out the central square: (h, w, c) -> (size, size, c).

    The square is cut out before the scaling, which is the same up to rounding to whole source pixels and
    keeps a picture of 1 x 2000 pixels from growing to 256 x 512000 in between.
    """
    height, width = image.shape[:2]
    side = max(1, round(min(height, width) * size / resize))
    top, left = (height - side) // 2, (width - side) // 2
    return scale(cut(image, (top, left, side, side), (size, size)), size, size)


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random numbers of one sample in one epoch: counter-based, so there is no state to carry.

    Each (epoch, index) owns 2^64 blocks of the stream keyed by the seed.
    """
    counter = [0, index & _WORD, epoch & _WORD, 0]
    return np.random.Generator(np.random.Philox(key=[seed & _WORD, 0], counter=counter))


def flip(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Mirror left to right, half of the time: (h, w, c) -> (h, w, c)."""
    # Not image[:, ::-1], whose copying takes longer than all the rest.
    return cv2.flip(image, 1).reshape(image.shape) if rng.random() < 0.5 else image


def shift(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Move by up to an eighth of each side, zeros flowing in: (h, w, c) -> (h, w, c).

    For 32 x 32 images this is the usual crop out of an image padded by 4 pixels.
    """
    height, width = image.shape[:2]
    pad_y, pad_x = height // 8, width // 8
    down, right = pad_y - _integer(rng, 2 * pad_y), pad_x - _integer(rng, 2 * pad_x)
    moved = np.zeros_like(image)
    moved[max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)] = image[
        max(0, -down) : height + min(0, -down), max(0, -right) : width + min(0, -right)
    ]
    return moved


def random_resized_crop(image: Picture, size: int, rng: np.random.Generator) -> np.ndarray:
    """Cut out 8% to 100% of the area, of ratio 3/4 to 4/3, and scale it: (h, w, c) -> (size, size, c).

    Szegedy et al., "Going deeper with convolutions", 2015. After ten draws that do not fit, the largest
    central cut with an allowed ratio is taken.
    """
    box = _random_box(image.shape[0], image.shape[1], rng)
    return scale(cut(image, box, (size, size)), size, size)


def train_transform(
    image: Picture,
    size: Optional[int],
    rng: np.random.Generator,
    augment: str = "crop",
    resize: Optional[int] = None,
) -> np.ndarray:
    """Apply the augmentation named `augment` (see DataConfig): (h, w, c) -> (size, size, c).

    All but "crop" start from the evaluated image, eval_transform(image, resize or size, size), or from the
    image as it is when `size` is None.
    """
    if augment == "crop":
        image = flip(random_resized_crop(image, size, rng), rng)
    elif size is not None:
        image = eval_transform(image, resize or size, size)
    if augment in ("shift", "shift-flip"):
        image = shift(image, rng)
    if augment in ("flip", "shift-flip"):
        image = flip(image, rng)
    return image


def _integer(rng: np.random.Generator, largest: int) -> int:
    """A whole number of 0..largest; by random(), which numpy is less likely to change than integers()."""
    return int(rng.random() * (largest + 1))


def _random_box(height: int, width: int, rng: np.random.Generator) -> Tuple[int, int, int, int]:
    """Top, left, height and width of a random resized crop."""
    for _ in range(10):
        area = height * width * (0.08 + 0.92 * rng.random())
        ratio = math.exp((2 * rng.random() - 1) * math.log(4 / 3))
        box_height, box_width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < box_height <= height and 0 < box_width <= width:
            top, left = _integer(rng, height - box_height), _integer(rng, width - box_width)
            return top, left, box_height, box_width
    box_height = min(height, max(1, round(width * 4 / 3)))
    box_width = min(width, max(1, round(height * 4 / 3)))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width
