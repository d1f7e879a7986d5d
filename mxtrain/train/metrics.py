"""Means over samples, read from the devices without making them wait."""

from __future__ import annotations

import math
from collections import deque
from typing import Dict, List, NamedTuple, Optional, Sequence

import mxnet as mx
import numpy as np

from mxtrain.errors import TrainingError
from mxtrain.parallel.communicator import ALONE

IN_FLIGHT = 2
"""Updates that may be under way on the devices while the host goes ahead; bounds the memory in use."""


class Totals:
    """Sums of named per-sample values; one value per batch is added, so the shards do not matter.

    A batch's sum is exact and rounded once (math.fsum). The batches are added in their order.
    """

    def __init__(self, names: Sequence[str], sums: Dict[str, float] = None, samples: int = 0):
        self.names = list(names)
        self.sums = dict(sums or dict.fromkeys(self.names, 0.0))
        self.samples = samples
        self.skipped = 0
        """Samples that could not be read."""

    def add(self, values: np.ndarray) -> None:
        """values: (samples, number of names)."""
        for name, column in zip(self.names, values.T):
            self.sums[name] += math.fsum(column.tolist())
        self.samples += len(values)

    def means(self) -> Dict[str, float]:
        """Mean of each value; empty when there were no samples."""
        return {name: total / self.samples for name, total in self.sums.items()} if self.samples else {}

    def state(self) -> dict:
        return {"sums": self.sums, "samples": self.samples}


class Part(NamedTuple):
    """What one process knows of a batch."""

    size: int
    """Rows of the whole batch."""
    positions: np.ndarray
    """Those that are known here."""
    values: Optional[np.ndarray]
    """(rows known here, columns); None when there is no row."""


def whole(parts: Sequence[Part], communicator) -> List[np.ndarray]:
    """For each of some batches the values that all processes know together, in the order of the rows."""
    if communicator.size == 1 or not parts:
        return [part.values for part in parts if part.values is not None]
    width = max(0 if part.values is None else part.values.shape[1] for part in parts)
    widths, knowing = communicator.total(np.array([width, width > 0], "float64"))
    if not knowing:  # all samples of all batches are bad
        return []
    ends = np.cumsum([part.size for part in parts])
    table = np.zeros((ends[-1], int(widths / knowing) + 1))
    for part, end in zip(parts, ends):
        if part.values is not None:
            rows = end - part.size + part.positions
            table[rows, :-1], table[rows, -1] = part.values, 1  # the last column tells which rows there are
    table = communicator.total(table)
    return [block[block[:, -1] > 0, :-1] for block in np.split(table, ends[:-1])]


class Meter:
    """Collects the reports of updates; reads those that the devices have finished.

    A report is one array (rows, number of names) per shard. The first name is the loss, which must be finite.
    """

    def __init__(self, names: Sequence[str], communicator=ALONE):
        self.totals, self._communicator = Totals(names), communicator
        self._pending = deque()

    @property
    def waiting(self) -> int:
        """Number of updates whose reports have not been read."""
        return len(self._pending)

    def start(self, state: dict = None) -> None:
        """Begins an epoch, or goes on with a saved one."""
        self.totals = Totals(self.totals.names, **(state or {}))

    def latest(self) -> List[mx.nd.NDArray]:
        """The reports of the latest update, if they have not been read yet."""
        return self._pending[-1][1] if self._pending else []

    def add(self, update: int, reports: List[mx.nd.NDArray], size: int = 0, positions: Sequence[int] = ()) -> None:
        """size, positions: rows of the whole batch, and those of them that the reports are about, where several
        processes have a part."""
        if not reports and self._communicator.size == 1:
            return
        self._pending.append((update, reports, size, positions))
        if len(self._pending) > IN_FLIGHT and self._pending[-IN_FLIGHT - 1][1]:
            self._pending[-IN_FLIGHT - 1][1][-1].wait_to_read()

    def read(self, everything: bool = True) -> Dict[str, float]:
        """Means so far; without `everything`, only of updates known to be finished. All processes call it together.

        Raises TrainingError for a loss that is not finite, naming its update.
        """
        due = [self._pending.popleft() for _ in range(len(self._pending) - (0 if everything else IN_FLIGHT))]
        parts = [Part(size, positions, _values(reports)) for _, reports, size, positions in due]
        for (update, *_), values in zip(due, whole(parts, self._communicator)):
            if not np.isfinite(values[:, 0]).all():
                raise self._communicator.once(TrainingError(
                    f"the loss is {values[:, 0].sum()} in update {update + 1}: training has diverged (a lower --lr, "
                    "--warmup-epochs or --clip-norm may help)"))
            self.totals.add(values)
        return self.totals.means()


def _values(reports: List[mx.nd.NDArray]) -> Optional[np.ndarray]:
    """The reports of an update, one after the other: (rows, columns); None when there are none."""
    return np.concatenate([report.asnumpy() for report in reports]) if reports else None
