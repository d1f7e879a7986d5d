"""The datasets that the sources are made of: gluon Datasets whose keys are (epoch, index)."""

from __future__ import annotations

from typing import Callable, Optional, Sequence, Tuple

import numpy as np
from mxnet import gluon

from mxtrain.data import images

_SMALL = 64 * 64 * 3

Key = Tuple[int, int]
Sample = Tuple[np.ndarray, np.int32]


class ArrayDataset(gluon.data.Dataset):
    """Samples in memory. x: (n, h, w, c) uint8. y: (n,) int32. The epoch of a key plays no part.

    members: (m,) integers, the rows of x and y that belong to this part; None for all. The part takes no copy,
    so that x may be a file that is mapped into memory.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, members: Optional[np.ndarray] = None):
        self._x, self._y = x, y
        self._members = np.arange(len(y)) if members is None else members

    @property
    def x(self) -> np.ndarray:
        """The images of the part, copied."""
        return self._x[self._members]

    @property
    def y(self) -> np.ndarray:
        """The labels of the part, copied."""
        return self._y[self._members]

    @property
    def threads(self) -> bool:
        """Whether changing an image is OpenCV's work; of a small one it is Python's, which threads only hinder."""
        return self._x[:1].size > _SMALL

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, key: Key) -> Sample:
        _, index = key
        row = self._members[index]
        return self._x[row], self._y[row]

    def rows(self, indices: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """A whole batch at once: (k,) integers -> x: (k, h, w, c) uint8, y: (k,) int32."""
        rows = self._members[indices]
        return self._x[rows], self._y[rows]

    def describe(self, index: int) -> str:
        """The sample's place in the arrays, for messages."""
        return f"image {self._members[index]}"


class FileDataset(gluon.data.Dataset):
    """Images in files (mxtrain.data.images.Picture). y: (n,) int32. The epoch of a key plays no part."""

    threads = True  # reading and decoding release the interpreter's lock

    def __init__(self, paths: Sequence[str], y: np.ndarray):
        self.paths = paths
        self.y = y

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: Key) -> Sample:
        _, index = key
        return self.picture(self.encoded(index), index), self.y[index]

    def encoded(self, index: int) -> bytes:
        """The bytes of the file."""
        return images.read(self.paths[index])

    def picture(self, encoded: bytes, index: int) -> images.Picture:
        """The image that the bytes are of."""
        return images.picture(encoded, self.describe(index))

    def describe(self, index: int) -> str:
        """The sample's place, for messages."""
        return f"image {self.paths[index]}"


class Transformed(gluon.data.Dataset):
    """A dataset whose images pass through `transform(image, epoch, index) -> image`, a pure function."""

    def __init__(self, dataset: gluon.data.Dataset, transform: Callable[[np.ndarray, int, int], np.ndarray]):
        self.dataset = dataset
        self.transform = transform
        self.threads = getattr(dataset, "threads", False)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> Sample:
        image, y = self.dataset[key]
        return self.transform(image, *key), y

    def describe(self, index: int) -> str:
        """The sample's place, for messages."""
        describe = getattr(self.dataset, "describe", None)
        return describe(index) if describe else f"sample {index}"


def transformed(
    dataset: gluon.data.Dataset, transform: Optional[Callable[[np.ndarray, int, int], np.ndarray]]
) -> gluon.data.Dataset:
    """The dataset with its images transformed; without a transform as it is, `rows` included."""
    return dataset if transform is None else Transformed(dataset, transform)
