"""Global batches: a gluon DataLoader that can start at any batch of any epoch."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from typing import Callable, Iterator, Optional, Sequence, Tuple

import numpy as np
from mxnet import gluon

from mxtrain.data import workers as kinds
from mxtrain.data.sampler import BatchSampler
from mxtrain.data.settings import DataConfig
from mxtrain.errors import BadSample

_log = logging.getLogger("mxtrain")

_SHOWN = 20  # bad samples that are named; the others are only counted


class Batch(tuple):
    """The arrays of a global batch: x: (B', ...) to y: (B', ...), of the samples that could be read.

    numpy and not NDArray: the batch is cut into shards by views, and each shard is copied once, to its device.
    """

    size: int
    """Rows of the whole batch, of which this process may have read a part, and some may be bad."""
    positions: np.ndarray
    """Which of them the arrays' rows are, ascending. Shards are cut by them, so that a bad sample changes its own
    shard and no other."""
    bad: Sequence[kinds.Bad]
    """Rows that could not be read here, with the reason; they are not in the arrays."""

    def __new__(cls, arrays, size: int, first: int = 0, bad: Sequence[kinds.Bad] = ()):
        """first: row of the whole batch that the arrays begin with; bad rows are still in the arrays."""
        missing = [row - first for row, _ in bad]
        positions = np.arange(first, first + len(arrays[-1]))
        if missing:
            arrays, positions = [np.delete(array, missing, axis=0) for array in arrays], np.delete(positions, missing)
        batch = super().__new__(cls, arrays)
        batch.size, batch.positions, batch.bad = size, positions, bad
        return batch


class Loader(gluon.data.DataLoader):
    """Delivers the global batches of a dataset whose keys are (epoch, index).

    A dataset with `rows(indices) -> (x, ..., y)` lies in memory: a batch is one call of it, in the caller's thread,
    and workers have nothing to do. Every other dataset is read sample by sample, by workers that are some batches
    ahead (see mxtrain.data.workers). Batches and their order are the same for every number and kind of workers.

    dataset: a gluon Dataset with items (x, ..., y) for keys (epoch, index). batch_size: samples of a global batch.
    seed, shuffle, last_batch, block, window: see BatchSampler, whose errors are raised here too. workers: number of
    workers, 0 for none, None for one per core of this process. worker_kind: thread, process or auto (threads for a
    dataset with a true attribute `threads`). part: of the rows of a batch, given their number, the first and the end of
    those to be read by this process. on_bad: what a sample that raises BadSample does: "stop" raises it, "skip" leaves
    it out.
    """

    _worker_pool = None  # gluon's, which its __del__ reads also after an __init__ that raised

    def __init__(
        self,
        dataset: gluon.data.Dataset,
        batch_size: int,
        seed: int = 0,
        shuffle: str = "full",
        last_batch: str = "keep",
        workers: Optional[int] = 0,
        worker_kind: str = "auto",
        on_bad: str = "stop",
        block: int = 256,
        window: int = 16,
        part: Callable[[int], Tuple[int, int]] = kinds.everything,
    ):
        self.sampler = BatchSampler(len(dataset), batch_size, seed, shuffle, last_batch, block, window)
        self._rows = getattr(dataset, "rows", None)
        self._reader = kinds.Reader(dataset, self.sampler, part)
        self.workers = 0 if self._rows else kinds.cores() if workers is None else workers
        self.worker_kind = kinds.best_kind(dataset) if worker_kind == "auto" else worker_kind
        self._on_bad, self._named = on_bad, set()
        self._crew, self._pending = None, deque()
        super().__init__(dataset, batch_sampler=self.sampler, batchify_fn=stack)
        if self.sampler.dropped:
            dropped = self.sampler.dropped
            _log.info("--last-batch drop leaves out %d of %d samples in every epoch", dropped, self.samples)

    @property
    def samples(self) -> int:
        """Number of samples of the dataset."""
        return self.sampler.length

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches (x, ..., y) of one epoch, from batch number `start` on. IndexError when it is not within
        0..len(self)."""
        self.sampler.start_at(epoch, start)
        return iter(self)

    def prefetch(self, epoch: int, start: int = 0) -> None:
        """Has workers begin with the batches that `batches(epoch, start)` will be asked for next."""
        if self.workers:
            self._begin(epoch, start)

    def ready(self) -> bool:
        """Whether the next batch is there, or made in no time."""
        return bool(self._rows) or bool(self._pending and self._crew.ready(self._pending[0]))

    def advice(self) -> str:
        """What may make it faster."""
        cores = kinds.cores()
        if self.workers < cores:
            return f"--workers {self.workers} of {cores} cores read them; more may help"
        if self.worker_kind == "process":
            return f"{self.workers} worker processes on {cores} cores do not keep up; more cores, or cheaper transforms"
        return (f"{self.workers} workers on {cores} cores do not keep up; images are read faster when "
                "scripts/make_records.py --resize has made them smaller")

    def __iter__(self) -> Iterator[Batch]:
        return (self._from_memory if self._rows else self._read_ahead)(*self.sampler.position)

    def close(self) -> None:
        """Ends the workers and any iteration; another iteration starts them again."""
        self._pending.clear()  # also for the iteration that holds it
        self._pending = deque()
        if self._crew is not None:
            self._end()
            self._crew = None

    def _from_memory(self, epoch: int, start: int) -> Iterator[Batch]:
        for batch in range(start, len(self)):
            rows = self.sampler.rows(batch)
            first, stop = self._reader.part(rows)
            yield Batch(self._rows(self.sampler.indices(epoch, batch, first, stop)), rows, first)
        self.sampler.start_at(epoch + 1)

    def _read_ahead(self, epoch: int, start: int) -> Iterator[Batch]:
        self._begin(epoch, start)
        pending = self._pending
        try:
            for batch in range(start, len(self)):
                if self._pending is not pending:
                    raise RuntimeError("this iteration is over: the loader was closed, or another one has begun, of "
                                       "which there is one at a time")
                self._crew.finish(pending[0])
                whole = self._whole(pending.popleft())
                self._fill(epoch, batch + 1)
                yield whole
            self.sampler.start_at(epoch + 1)
        except (KeyboardInterrupt, SystemExit):  # perhaps in the middle of a worker's message
            self.close()
            raise
        finally:
            for assembly in pending:
                self._crew.cancel(assembly)

    def _begin(self, epoch: int, start: int) -> None:
        """Sees to it that exactly the batches from a position on are in the making."""
        if self._crew is None:
            self._crew = self._start_workers()
            self._end = weakref.finalize(self, self._crew.close)  # also before the interpreter ends
        before, self._pending = self._pending, deque()
        for assembly in before:
            if (assembly.epoch, assembly.batch) == (epoch, start + len(self._pending)) and not assembly.cancelled:
                self._pending.append(assembly)
            else:
                self._crew.cancel(assembly)
        before.clear()  # an iteration that was given up has nothing left to cancel
        self._fill(epoch, start)

    def _fill(self, epoch: int, start: int) -> None:
        """Has the batches made that should be in the making when `start` is the one that is wanted next."""
        for batch in range(start + len(self._pending), min(start + 1 + self._crew.ahead, len(self))):
            self._pending.append(self._crew.start(epoch, batch))

    def _start_workers(self):
        if not self.workers:
            return kinds.NoWorkers(self._reader)
        return {"thread": kinds.Threads, "process": kinds.Processes}[self.worker_kind](self._reader, self.workers)

    def _whole(self, assembly: kinds.Assembly) -> Batch:
        bad = sorted(assembly.bad)
        if bad and self._on_bad == "stop":
            raise BadSample(f"{bad[0][1]} (--on-bad-sample skip leaves such samples out)")
        for _, reason in bad:
            self._name(reason)
        return Batch(assembly.arrays, self.sampler.rows(assembly.batch), assembly.first, bad)

    def _name(self, reason: str) -> None:
        """Says of a bad sample that it is left out, once."""
        if reason in self._named or len(self._named) > _SHOWN:
            return
        self._named.add(reason)
        if len(self._named) <= _SHOWN:
            _log.warning("left out: %s", reason)
        else:
            _log.warning("more samples are left out; they are counted in the column skipped of metrics.csv")


def loaders(train, val, config: DataConfig, batch_size: int, seed: int,
            part: Callable = kinds.everything) -> Tuple[Loader, Optional[Loader]]:
    """The loaders of a run's training and validation datasets (None: without one), as the settings say."""
    common = {"workers": config.workers, "worker_kind": config.worker_kind, "on_bad": config.on_bad_sample,
              "part": part}
    order = {"block": config.shuffle_block, "window": config.shuffle_window}
    train_loader = Loader(train, batch_size, seed, config.shuffle, config.last_batch, **common, **order)
    if config.workers and not train_loader.workers:
        _log.info("--workers %d has no effect: these samples lie in memory", config.workers)
    return train_loader, None if val is None else Loader(val, batch_size, shuffle="none", **common)


def stack(samples: Sequence) -> tuple:
    """B' samples (x, ..., y) -> arrays x: (B', ...) to y: (B', ...), in the samples' own types."""
    return tuple(np.stack(column) for column in zip(*samples))
