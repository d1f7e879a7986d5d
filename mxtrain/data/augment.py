"""Random changes to the pixels of training images, after they were cut out and mirrored.

Images are uint8 arrays (height, width, c) of intensities 0 to 255, with c = 1 or 3 channels (RGB); the results have
the same shape and type and are clipped to 0..255. All functions are pure: they leave their argument alone and take
their numbers from the generator that they are given, by random() (which numpy is less likely to change than other
methods). It is all OpenCV and numpy, which release the GIL.
"""

from __future__ import annotations

import math
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import cv2
import numpy as np

FILL = 128
"""The gray that rotating, shearing and translating leave where there is no image."""
LARGEST_MAGNITUDE = 10
"""RandAugment's magnitudes are 0 to 10, as in its paper's text."""

_WORD = (1 << 64) - 1
_RAND_AUGMENT, _JITTER, _LIGHTING, _ERASING = 1, 2, 3, 4

_LUMA = np.array([0.299, 0.587, 0.114])
# NTSC's color space YIQ: the luma, and two axes of color, on which grays are zero.
_YIQ = np.array([_LUMA, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
# As matrices on RGB: take the gray of equal luma; what is left of the color; that turned by a quarter in IQ.
_GRAY = np.tile(_LUMA, (3, 1))
_COLOR = np.eye(3) - _GRAY
_TURNED = np.linalg.inv(_YIQ) @ np.array([[0.0, 0, 0], [0, 0, -1], [0, 1, 0]]) @ _YIQ

# The principal components of ImageNet's colors: deviations, for intensities 0 to 255, and their directions (columns).
_DEVIATIONS = np.array([55.46, 4.794, 1.148])
_DIRECTIONS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])


class Changes(NamedTuple):
    """What is done to an image; the fields of DataConfig."""

    rand_augment: Optional[Tuple[int, int]] = None
    """Number of operations, magnitude."""
    color_jitter: float = 0.0
    hue: float = 0.0
    lighting: float = 0.0
    random_erasing: float = 0.0

    def __str__(self) -> str:
        """What is on, as the log says it; empty when nothing is."""
        on = [(name, value) for name, value in self._asdict().items() if value]
        return ", ".join(
            f"{name} {','.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in on
        )


def change(image: np.ndarray, changes: Changes, seed: int, epoch: int, index: int) -> np.ndarray:
    """Apply the changes in their order: a pure function of the image and (seed, epoch, index).

    Each has a generator of its own: what one draws does not change another.
    """

    def rng(stage: int) -> np.random.Generator:
        """As images.sample_rng, which is stage 0, under another key."""
        counter = [0, index & _WORD, epoch & _WORD, 0]
        return np.random.Generator(np.random.Philox(key=[seed & _WORD, stage], counter=counter))

    image = np.ascontiguousarray(image)  # a mirrored view would be copied, slowly, by every step
    if changes.rand_augment:
        image = rand_augment(image, *changes.rand_augment, rng(_RAND_AUGMENT))
    if changes.color_jitter or changes.hue:
        image = color_jitter(image, changes.color_jitter, changes.hue, rng(_JITTER))
    if changes.lighting:
        image = lighting(image, changes.lighting, rng(_LIGHTING))
    if changes.random_erasing:
        image = random_erasing(image, changes.random_erasing, rng(_ERASING))
    return image


# Color


def color_jitter(image: np.ndarray, strength: float, hue: float, rng: np.random.Generator) -> np.ndarray:
    """Change brightness, contrast and saturation by factors of 1 - strength to 1 + strength, and turn the hue by up
    to `hue` of a full turn, all drawn evenly. See `recolored`.

    Howard, "Some improvements on deep convolutional neural network based image classification", 2013.
    """
    factors = [1 + strength * (2 * rng.random() - 1) for _ in range(3)]
    return recolored(image, *factors, hue * (2 * rng.random() - 1))


def recolored(
    image: np.ndarray, brightness: float = 1, contrast: float = 1, saturation: float = 1, hue: float = 0
) -> np.ndarray:
    """Scale the intensities, their distance from the mean luma of the image, and their distance from the gray of
    equal luma, and turn the color by `hue` turns in the color plane of YIQ.

    Without clipping in between these are linear maps that commute: the order makes no difference, and one pass does
    all of it, rounded once, to the nearest. Where channels are mixed, cv2.transform works in units of 1/1024, which
    makes a value at most 0.9 wrong, with the rounding. One channel has no saturation and no hue.
    """
    scale = brightness * contrast
    shift = brightness * (1 - contrast) * _mean_luma(image) if contrast != 1 else 0.0
    if image.shape[2] == 1 or (saturation == 1 and hue == 0):
        return _looked_up(image, _table(scale * np.arange(256) + shift))
    angle = 2 * math.pi * hue
    mixed = _GRAY + saturation * math.cos(angle) * _COLOR + saturation * math.sin(angle) * _TURNED
    return cv2.transform(image, np.column_stack([scale * mixed, np.full(3, shift)]))


def lighting(image: np.ndarray, deviation: float, rng: np.random.Generator) -> np.ndarray:
    """Add a color to all pixels, drawn along the principal components of ImageNet's colors: normal numbers with
    `deviation` times each component's own. Rounded to the nearest; 3 channels only.

    Krizhevsky et al., "ImageNet classification with deep convolutional neural networks", 2012.
    """
    strengths = np.array([_normal(rng) for _ in range(3)])
    color = np.clip(np.rint(_DIRECTIONS @ (deviation * _DEVIATIONS * strengths)), -255, 255)
    # Two passes, each clipped at its own end, are six times as fast as one with both signs.
    brighter = cv2.add(image, (*np.maximum(color, 0).tolist(), 0))
    return cv2.subtract(brighter, (*np.maximum(-color, 0).tolist(), 0))


def _mean_luma(image: np.ndarray) -> float:
    means = cv2.mean(image)
    return means[0] if image.shape[2] == 1 else float(_LUMA @ means[:3])


def _normal(rng: np.random.Generator) -> float:
    """A number of the standard normal distribution, after Box and Muller."""
    return math.sqrt(-2 * math.log(1 - rng.random())) * math.cos(2 * math.pi * rng.random())


# RandAugment


def rand_augment(image: np.ndarray, count: int, magnitude: float, rng: np.random.Generator) -> np.ndarray:
    """Apply `count` of the 14 OPERATIONS, drawn evenly and independently, at magnitude 0 to 10.

    The operations that go both ways go either way half of the time. All grow with the magnitude, at which 10 is the
    largest range of the paper: rotations of 30 degrees, shears of 0.3, translations of 0.45 of a side, factors of
    0.1 and 1.9, 4 bits, all pixels inverted.

    Cubuk et al., "RandAugment: practical automated data augmentation with a reduced search space", 2020.
    """
    operations = list(OPERATIONS.values())
    for _ in range(count):
        operation = operations[int(rng.random() * len(operations))]
        direction = 1 if rng.random() < 0.5 else -1
        image = operation(image, direction * magnitude / LARGEST_MAGNITUDE)
    return image


def autocontrast(image: np.ndarray) -> np.ndarray:
    """Stretch each channel to 0..255, rounded to the nearest; after Pillow's ImageOps.autocontrast, which cuts off."""
    tables = []
    for counts in _histograms(image):
        seen = np.flatnonzero(counts)
        low, high = int(seen[0]), int(seen[-1])
        tables.append(_table((np.arange(256) - low) * (255 / (high - low)) if high > low else np.arange(256)))
    return _looked_up(image, *tables)


def equalize(image: np.ndarray) -> np.ndarray:
    """Make all intensities of each channel about equally frequent; equals Pillow's ImageOps.equalize."""
    tables = []
    for counts in _histograms(image):
        step = (counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
        below = np.cumsum(counts) - counts
        tables.append(_table((step // 2 + below) // step if step else np.arange(256)))
    return _looked_up(image, *tables)


def solarize(image: np.ndarray, threshold: int) -> np.ndarray:
    """Invert the intensities from `threshold` on; equals Pillow's ImageOps.solarize."""
    values = np.arange(256)
    return _looked_up(image, _table(np.where(values < threshold, values, 255 - values)))


def posterize(image: np.ndarray, bits: int) -> np.ndarray:
    """Keep the upper bits of each value; equals Pillow's ImageOps.posterize."""
    return image & np.uint8(256 - (1 << (8 - bits)))


def sharpen(image: np.ndarray, factor: float) -> np.ndarray:
    """Scale the distance from the smoothed image, in which a pixel weighs 5 and its neighbors 1, by `factor`.

    Pixels at the border stay. One pass, rounded once; after Pillow's ImageEnhance.Sharpness, which rounds twice.
    """
    kernel = np.full((3, 3), (1 - factor) / 13)
    kernel[1, 1] = factor + 5 * (1 - factor) / 13
    result = image.copy()
    result[1:-1, 1:-1] = cv2.filter2D(image, -1, kernel).reshape(image.shape)[1:-1, 1:-1]
    return result


def rotate(image: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate counterclockwise around the center, bilinear."""
    height, width = image.shape[:2]
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x, y = (width - 1) / 2, (height - 1) / 2
    return _warped(image, [[cosine, -sine, x - cosine * x + sine * y], [sine, cosine, y - sine * x - cosine * y]])


def shear(image: np.ndarray, along_x: float, along_y: float) -> np.ndarray:
    """Take pixel (x, y) from (x + along_x * y, y + along_y * x), measured from the upper left corner, bilinear.

    The corner, and not the center, is what the paper's program keeps in place.
    """
    return _warped(image, [[1, along_x, along_x / 2], [along_y, 1, along_y / 2]])  # pixel centers lie at halves


def translate(image: np.ndarray, right: int, down: int) -> np.ndarray:
    """Move by whole pixels."""
    height, width = image.shape[:2]
    right, down = max(-width, min(width, right)), max(-height, min(height, down))
    result = np.full_like(image, FILL)
    moved = image[max(0, -down) : height - max(0, down), max(0, -right) : width - max(0, right)]
    top, left = max(0, down), max(0, right)
    result[top : top + moved.shape[0], left : left + moved.shape[1]] = moved
    return result


OPERATIONS: Dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "identity": lambda image, level: image,
    "autocontrast": lambda image, level: autocontrast(image),
    "equalize": lambda image, level: equalize(image),
    "rotate": lambda image, level: rotate(image, 30 * level),
    "solarize": lambda image, level: solarize(image, 256 - round(256 * abs(level))),
    "color": lambda image, level: recolored(image, saturation=1 + 0.9 * level),
    "posterize": lambda image, level: posterize(image, 8 - round(4 * abs(level))),
    "contrast": lambda image, level: recolored(image, contrast=1 + 0.9 * level),
    "brightness": lambda image, level: recolored(image, brightness=1 + 0.9 * level),
    "sharpness": lambda image, level: sharpen(image, 1 + 0.9 * level),
    "shear_x": lambda image, level: shear(image, 0.3 * level, 0),
    "shear_y": lambda image, level: shear(image, 0, 0.3 * level),
    "translate_x": lambda image, level: translate(image, round(0.45 * level * image.shape[1]), 0),
    "translate_y": lambda image, level: translate(image, 0, round(0.45 * level * image.shape[0])),
}
"""RandAugment's operations, as functions of an image and a level of -1 to 1. "color" leaves one channel as it is."""


def _warped(image: np.ndarray, source: list) -> np.ndarray:
    """source: (2, 3), takes pixel (x, y, 1) to the place where it comes from."""
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    size = image.shape[1::-1]
    warped = cv2.warpAffine(image, np.array(source, float), size, flags=flags, borderValue=(FILL,) * 3)
    return warped.reshape(image.shape)  # cv2 drops the axis of a single channel


def _histograms(image: np.ndarray) -> np.ndarray:
    """(c, 256) counts."""
    counts = [cv2.calcHist([image], [c], None, [256], [0, 256]) for c in range(image.shape[2])]
    return np.array(counts, np.int64)[..., 0]


def _table(values: np.ndarray) -> np.ndarray:
    """(256,) uint8: the values rounded and clipped."""
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def _looked_up(image: np.ndarray, *tables: np.ndarray) -> np.ndarray:
    """Each value replaced by its table's: one table for all channels, or one per channel."""
    return cv2.LUT(image, np.stack(tables, axis=-1)[np.newaxis]).reshape(image.shape)


# Erasing


def random_erasing(image: np.ndarray, probability: float, rng: np.random.Generator) -> np.ndarray:
    """With this probability, replace a box of 2% to 33% of the area by random pixels.

    Its ratio of width to height is 0.3 to 1 / 0.3, drawn evenly in the logarithm, but within what the image has room
    for (where the paper draws area and ratio again).

    Zhong et al., "Random erasing data augmentation", 2017.
    """
    if rng.random() >= probability:
        return image
    top, left, height, width = _erased_box(image.shape[0], image.shape[1], rng)
    result = image.copy()
    result[top : top + height, left : left + width] = _noise((height, width, image.shape[2]), rng)
    return result


def _erased_box(height: int, width: int, rng: np.random.Generator) -> Tuple[int, int, int, int]:
    """Top, left, height and width."""
    area = height * width * (0.02 + 0.31 * rng.random())
    narrowest, widest = area / height**2, width**2 / area
    low, high = (math.log(min(max(ratio, narrowest), widest)) for ratio in (0.3, 1 / 0.3))
    ratio = math.exp(low + (high - low) * rng.random())
    box_height = min(height, max(1, round(math.sqrt(area / ratio))))
    box_width = min(width, max(1, round(math.sqrt(area * ratio))))
    top, left = int(rng.random() * (height - box_height + 1)), int(rng.random() * (width - box_width + 1))
    return top, left, box_height, box_width


def _noise(shape: Tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Even random bytes: six from each number, which has 53 random bits."""
    size = math.prod(shape)
    words = (rng.random(-(-size // 6)) * 2.0**48).astype("<u8")
    return words.view(np.uint8).reshape(-1, 8)[:, :6].reshape(-1)[:size].reshape(shape)
