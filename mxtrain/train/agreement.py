"""What all processes have to know of each other before an update, so that all do the same."""

from __future__ import annotations

import time
from typing import NamedTuple, Sequence

import numpy as np

from mxtrain.signals import SIGNALS


class Agreement(NamedTuple):
    """Numbers of all processes together."""

    rows: int
    """Samples of the batch that could be read."""
    shards: int
    """Shards of the batch that have rows."""
    bad: int
    """Samples of the batch that could not be read."""
    failed: int
    """Processes that cannot go on."""
    save: int
    """Whether a checkpoint is due by the clock of rank 0."""
    log: int
    """Whether the log is due by the clock of rank 0."""
    signal: int
    """Number of the signal that some process has received, 0 for none."""


def agree(run, rows: Sequence[int] = (), bad: int = 0, failed: bool = False) -> Agreement:
    """Every process calls it with its own numbers, at the same time; all get the same.

    rows: those of each shard that are here.
    """
    first = run.communicator.rank == 0
    save = first and bool(run.checkpoint_minutes) and time.monotonic() - run.saved_at >= 60 * run.checkpoint_minutes
    log = first and (run.meter.waiting >= 50 or time.monotonic() - run.reported_at >= 0.5)
    rows = np.asarray(rows)
    mine = [rows.sum(), np.count_nonzero(rows), bad, failed, save, log,
            *(run.signals.received == number for number in SIGNALS)]
    *numbers, interrupts, terminations, hangups = run.communicator.total(np.array(mine, "float64")).astype(int).tolist()
    received = next((n for n, count in zip(SIGNALS, (interrupts, terminations, hangups)) if count), 0)
    return Agreement(*numbers, int(received))
