"""Images from elsewhere, as a network was trained to see them."""

from __future__ import annotations

import cv2
import numpy as np

from mxtrain.data import images
from mxtrain.tasks.pixels import Pixels


def adapt(image: images.Picture, pixels: Pixels, peak: int = 255) -> np.ndarray:
    """The same as in the evaluation of the run, for any image: (h, w, 1 or 3) uint8 -> pixels.shape, uint8.

    peak: the image's value of full intensity. The shorter side is scaled and the center cut out; where the run's
    images are no squares, all is scaled to their shape. Color becomes grey, and grey is repeated, where the run's
    images are so.
    """
    height, width, channels = pixels.shape
    if height == width:
        image = images.eval_transform(image, pixels.resize or height, height)
    else:
        image = images.scale(images.pixels(image), height, width)
    if image.shape[2] == 3 and channels == 1:
        image = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., np.newaxis]
    elif image.shape[2] == 1 and channels == 3:
        image = np.repeat(image, 3, axis=2)
    if peak != pixels.peak:
        image = np.rint(image * (pixels.peak / peak)).astype(np.uint8)
    return image
