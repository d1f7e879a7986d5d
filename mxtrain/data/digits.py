"""scikit-learn's handwritten digits, the data that is always there."""

from __future__ import annotations

import numpy as np

from mxtrain.data import parts
from mxtrain.data.settings import DataConfig


def source(config: DataConfig) -> parts.Source:
    """1,797 images of 8x8x1 with intensities 0..16."""
    from sklearn.datasets import load_digits  # takes a second to import: only for those who use it

    parts.refuse_val(config, "digits")
    bunch = load_digits()
    samples = parts.Arrays(bunch.images.astype(np.uint8)[..., np.newaxis], bunch.target)
    train, val, notes = parts.checked_parts(samples, None, "digits", config, share=0.2)
    classes = [str(digit) for digit in range(10)]
    return parts.in_memory("digits", train, val, classes, "none", notes, peak=16)
