"""What all processes have to know of each other before an update, so that all do the same."""

from __future__ import annotations

import time
from typing import Callable, NamedTuple, Optional, Sequence

import numpy as np

from mxtrain.signals import SIGNALS


class Agreement(NamedTuple):
    """Numbers of all processes together, but for rows and shards where processes are apart."""

    rows: int
    """Samples that the gradient is summed over."""
    shards: int
    """Shards that it is summed over."""
    samples: int
    """Samples of the batch that could be read."""
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


class Told(NamedTuple):
    """What this process has told the others of a batch."""

    numbers: np.ndarray
    total: Callable[[], np.ndarray]
    """Gives the sum over all processes, once all have told."""


def tell(run, rows: Sequence[int] = (), bad: int = 0, failed: bool = False) -> Told:
    """Every process tells its own numbers, the same number of times.

    rows: those of each shard that are here.
    """
    now = time.monotonic()
    save = _asks(run, "save", bool(run.checkpoint_minutes) and now - run.saved_at >= 60 * run.checkpoint_minutes)
    log = _asks(run, "log", run.meter.waiting >= 50 or now - run.reported_at >= run.communicator.seconds_between_logs)
    rows = np.asarray(rows)
    numbers = np.array([rows.sum(), np.count_nonzero(rows), bad, failed, save, log,
                        *(run.signals.received == number for number in SIGNALS)], "float64")
    return Told(numbers, run.communicator.tell(numbers))


def agree(run, told: Optional[Told] = None) -> Agreement:
    """What comes of it; all processes get the same. told: None to tell now, of no batch."""
    told = told or tell(run)
    samples, shards, *others, interrupts, terminations, hangups = told.total().astype(int).tolist()
    received = next((n for n, count in zip(SIGNALS, (interrupts, terminations, hangups)) if count), 0)
    rows, shards = told.numbers[:2].astype(int).tolist() if run.communicator.apart else (samples, shards)
    agreed = Agreement(rows, shards, samples, *others, int(received))
    run.asked -= {name for name in ("save", "log") if getattr(agreed, name)}
    return agreed


def _asks(run, name: str, due: bool) -> bool:
    """Whether this process, if it is the first, asks all for something that is due; once, until they have agreed."""
    if run.communicator.rank or not due or name in run.asked:
        return False
    run.asked.add(name)
    return True
