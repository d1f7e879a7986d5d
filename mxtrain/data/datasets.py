"""The datasets that the sources are made of: gluon Datasets whose keys are (epoch, index)."""

from __future__ import annotations

from typing import Callable, Optional, Sequence, Tuple

import numpy as np
from mxnet import gluon

from mxtrain.data import images

Key = Tuple[int, int]
Sample = Tuple[np.ndarray, np.int32]


class ArrayDataset(gluon.data.Dataset):
    """Samples in memory. x: (n, h, w, c) uint8. y: (n,) int32. The epoch of a key plays no part."""

    def __init__(self, x: np.ndarray, y: np.ndarray):
        self.x = x
        self.y = y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, key: Key) -> Sample:
        _, index = key
        return self.x[index], self.y[index]

    def rows(self, indices: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """A whole batch at once: (k,) integers -> x: (k, h, w, c) uint8, y: (k,) int32."""
        return self.x[indices], self.y[indices]


class FileDataset(gluon.data.Dataset):
    """Images in files, (h, w, 3) uint8 of any size. y: (n,) int32. The epoch of a key plays no part."""

    def __init__(self, paths: Sequence[str], y: np.ndarray):
        self.paths = paths
        self.y = y

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: Key) -> Sample:
        _, index = key
        return images.load(self.paths[index]), self.y[index]


class Transformed(gluon.data.Dataset):
    """A dataset whose images pass through `transform(image, epoch, index) -> image`, a pure function."""

    def __init__(self, dataset: gluon.data.Dataset, transform: Callable[[np.ndarray, int, int], np.ndarray]):
        self.dataset = dataset
        self.transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Sample:
        image, y = self.dataset[key]
        return self.transform(image, *key), y


def transformed(
    dataset: gluon.data.Dataset, transform: Optional[Callable[[np.ndarray, int, int], np.ndarray]]
) -> gluon.data.Dataset:
    """The dataset with its images transformed; without a transform as it is, `rows` included."""
    return dataset if transform is None else Transformed(dataset, transform)
