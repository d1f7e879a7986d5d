"""Image files whose classes are not known, of which some may be broken."""

from __future__ import annotations

from typing import Dict, Sequence, Tuple

import numpy as np
from mxnet import gluon

from mxtrain.data import images
from mxtrain.errors import UserError
from mxtrain.inference.adapt import adapt
from mxtrain.tasks.pixels import Pixels


class Files(gluon.data.Dataset):
    """Items are (image as the network takes it, number of the file).

    A file that cannot be read gives a black image, so that the other rows of its batch are not disturbed, and
    the reason is in `failed`, by the number of the file. Threads may share this dataset, processes may not.
    """

    threads = True

    def __init__(self, paths: Sequence[str], pixels: Pixels):
        self._paths, self._pixels = paths, pixels
        self.failed: Dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._paths)

    def source(self, number: int) -> dict:
        return {"file": self._paths[number]}

    def __getitem__(self, key: Tuple[int, int]) -> Tuple[np.ndarray, np.int64]:
        _, number = key
        try:
            image = adapt(images.load(self._paths[number]), self._pixels)
        except UserError as error:
            self.failed[number] = str(error)
            image = np.zeros(self._pixels.shape, np.uint8)
        return image, np.int64(number)
