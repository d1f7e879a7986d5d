"""Means over samples, read from the devices without making them wait."""

from __future__ import annotations

import math
from collections import deque
from typing import Dict, List, Sequence

import mxnet as mx
import numpy as np

from mxtrain.errors import TrainingError

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


class Meter:
    """Collects the reports of updates; reads those that the devices have finished.

    A report is one array (rows, number of names) per shard. The first name is the loss, which must be finite.
    """

    def __init__(self, names: Sequence[str]):
        self.totals = Totals(names)
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

    def add(self, update: int, reports: List[mx.nd.NDArray]) -> None:
        self._pending.append((update, reports))
        if len(self._pending) > IN_FLIGHT:
            self._pending[-IN_FLIGHT - 1][1][-1].wait_to_read()

    def read(self, everything: bool = True) -> Dict[str, float]:
        """Means so far; without `everything`, only of updates known to be finished.

        Raises TrainingError for a loss that is not finite, naming its update.
        """
        while len(self._pending) > (0 if everything else IN_FLIGHT):
            update, reports = self._pending.popleft()
            values = np.concatenate([report.asnumpy() for report in reports])
            if not np.isfinite(values[:, 0]).all():
                raise TrainingError(f"the loss is {values[:, 0].sum()} in update {update + 1}: training has diverged "
                                    "(a lower --lr, --warmup-epochs or --clip-norm may help)")
            self.totals.add(values)
        return self.totals.means()
