"""How long the devices have nothing to do because the next batch is not there."""

from __future__ import annotations

import queue
import threading
import time
from typing import Callable, Iterable, Iterator, Optional, Sequence

import mxnet as mx


class _Mark:
    """The moment at which arrays were computed: `time`, None before."""

    def __init__(self, arrays: Sequence[mx.nd.NDArray]):
        self.arrays, self.time = list(arrays), None


def timed(batches: Iterable, ready: Callable[[], bool], latest: Callable[[], Sequence[mx.nd.NDArray]],
          times) -> Iterator:
    """The batches; the time that passes is added to `times.seconds`, that in which devices wait to `times.waited`.

    The host runs ahead of the devices, so that its own waiting tells nothing. When a batch is not `ready`, another
    thread waits for `latest()`, the results of what was begun last: the devices wait from then until the batch comes.
    Nothing is synchronized, and nothing measured, as long as batches are ready. Errors of the results are raised here,
    at the latest when the batches are over.
    """
    watcher, batches = _Watcher(), iter(batches)
    try:
        while True:
            asked = time.perf_counter()
            mark = None if ready() else watcher.watch(latest())
            batch = next(batches, None)
            got = time.perf_counter()
            if mark is not None and mark.time is not None:
                times.waited += max(0.0, got - max(mark.time, asked))
            if batch is None:
                watcher.join()
                got = time.perf_counter()
            times.seconds += got - asked
            if watcher.error is not None:
                raise watcher.error
            if batch is None:
                return
            yield batch
            times.seconds += time.perf_counter() - got
    finally:
        watcher.close()


class _Watcher:
    """The thread that waits; started when it is first needed."""

    error: Optional[Exception] = None
    """The first failure. MXNet reports one once, to whoever waits first: only this thread may have heard of it."""

    def __init__(self):
        self._marks: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: Optional[threading.Thread] = None

    def watch(self, arrays: Sequence[mx.nd.NDArray]) -> _Mark:
        mark = _Mark(arrays)
        if not mark.arrays:
            mark.time = time.perf_counter()
            return mark
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mxtrain-watcher", daemon=True)
            self._thread.start()
        self._marks.put(mark)
        return mark

    def close(self) -> None:
        """Ends the thread when what it waits for is there."""
        self._marks.put(None)

    def join(self) -> None:
        """Waits for all that is being watched."""
        self.close()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        for mark in iter(self._marks.get, None):
            try:
                for array in mark.arrays:
                    array.wait_to_read()
            except Exception as error:
                self.error = self.error or error
            mark.time = time.perf_counter()
