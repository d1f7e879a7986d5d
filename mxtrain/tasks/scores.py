"""Scores of a classifier that are no means over samples: precision, recall and F1, from counts over all samples."""

from __future__ import annotations

from typing import Dict, Optional

import numpy as np


class F1:
    """Counts which class was predicted for which; the counts add up, so batches and layouts do not matter.

    positive: the class whose F1 is told; None for the mean over all classes (macro F1).
    """

    names = ("f1",)

    def __init__(self, classes: int, positive: Optional[int]):
        self.confusion = np.zeros((classes, classes), np.int64)
        """How often which class was predicted: (true, predicted)."""
        self._positive = positive

    def see(self, label: np.ndarray, values: np.ndarray) -> None:
        """label: (rows,) true classes. values: (rows, columns) of a ClassEvaluation, the predicted class last."""
        np.add.at(self.confusion, (label, values[:, -1].astype(np.int64)), 1)

    def values(self) -> Dict[str, float]:
        f1 = by_class(self.confusion)["f1"]
        return {"f1": float(f1.mean() if self._positive is None else f1[self._positive])}


def by_class(confusion: np.ndarray) -> Dict[str, np.ndarray]:
    """precision, recall and f1 of each class, (classes,) float64; what would be 0/0 is 0.

    confusion: (true, predicted) counts.
    """
    hits, predicted, true = confusion.diagonal(), confusion.sum(axis=0), confusion.sum(axis=1)
    return {"precision": _share(hits, predicted), "recall": _share(hits, true),
            "f1": _share(2 * hits, predicted + true)}


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.where(whole > 0, part / np.maximum(whole, 1), 0.0)
