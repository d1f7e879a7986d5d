"""Global batches: a gluon DataLoader that can start at any batch of any epoch."""

from __future__ import annotations

import logging
from typing import Iterator, Tuple

import numpy as np
from mxnet import gluon

from mxtrain.data.sampler import BatchSampler

logger = logging.getLogger("mxtrain")

Batch = Tuple[np.ndarray, ...]


def stack(samples: list) -> Batch:
    """B' samples (x, ..., y) -> arrays x: (B', ...) to y: (B', ...), in the samples' own types.

    numpy and not NDArray: the batch is cut into shards by views, and each shard is copied once, to its device.
    """
    return tuple(np.stack(column) for column in zip(*samples))


class Loader(gluon.data.DataLoader):
    """Delivers the global batches of a dataset whose keys are (epoch, index).

    A dataset with `rows(indices) -> (x, y)` lies in memory: a batch is one call of it, in the caller's
    thread, and workers have nothing to do. Every other dataset is read sample by sample, by `workers` threads
    (or forked processes with thread_pool=False) that run up to 2 * workers batches ahead. The order of the
    batches and their content are the same for every number of workers.

    dataset: a gluon Dataset with items (x, y) for keys (epoch, index). batch_size: samples of a global batch.
    seed, shuffle, last_batch: see BatchSampler, whose errors are raised here too. workers: number of workers,
    0 for none.
    """

    # gluon's __del__ reads it also after an __init__ that raised.
    _worker_pool = None

    def __init__(
        self,
        dataset: gluon.data.Dataset,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        last_batch: str = "keep",
        workers: int = 0,
        thread_pool: bool = True,
    ):
        self.sampler = BatchSampler(len(dataset), batch_size, seed, shuffle, last_batch)
        self._rows = getattr(dataset, "rows", None)
        super().__init__(
            dataset,
            batch_sampler=self.sampler,
            batchify_fn=stack,
            num_workers=0 if self._rows else workers,
            thread_pool=thread_pool,
        )
        if self.sampler.dropped:
            logger.info(
                "--last-batch drop leaves out %d of %d samples in every epoch",
                self.sampler.dropped,
                len(dataset),
            )

    @property
    def samples(self) -> int:
        """Number of samples of the dataset."""
        return self.sampler.length

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches (x, y) of one epoch, from batch number `start` on.

        x: (B', ...) and y: (B', ...), numpy arrays with the rows of the *global* batch. IndexError when
        `start` is not within 0..len(self).
        """
        self.sampler.start_at(epoch, start)
        yield from self

    def __iter__(self) -> Iterator[Batch]:
        if not self._rows:
            yield from super().__iter__()
            return
        for epoch, batch in self.sampler.positions():
            yield self._rows(self.sampler.indices(epoch, batch))

    def close(self) -> None:
        """Stop the workers. The loader cannot be used afterwards."""
        if self._worker_pool is not None:
            self._worker_pool.terminate()
            self._worker_pool.join()
