"""How long the devices have nothing to do because the next batch is not there."""

from __future__ import annotations

import queue
import threading
import time
from typing import Callable, Iterable, Iterator, Optional, Sequence

import mxnet as mx


class _Mark:
    """The moment at which arrays were computed: `time`, None before. An error of theirs is kept, not lost."""

    def __init__(self, arrays: Sequence[mx.nd.NDArray]):
        self.arrays, self.time, self.error = list(arrays), None, None

    def wait(self) -> None:
        try:
            for array in self.arrays:
                array.wait_to_read()
        except Exception as error:  # MXNet reports an operator's failure once, to whoever waits first
            self.error = error
        self.time = time.perf_counter()


def timed(batches: Iterable, ready: Callable[[], bool], latest: Callable[[], Sequence[mx.nd.NDArray]],
          times) -> Iterator:
    """The batches; the time that passes is added to `times.seconds`, that in which devices wait to `times.waited`.

    The host runs ahead of the devices, so that its own waiting tells nothing. When a batch is not `ready`, another
    thread waits for `latest()`, the results of what was begun last: the devices wait from then until the batch comes.
    Nothing is synchronized, and nothing measured, as long as batches are ready.
    """
    watcher, batches = _Watcher(), iter(batches)
    began = time.perf_counter()
    try:
        while True:
            asked = time.perf_counter()
            mark = None if ready() else watcher.watch(latest())
            batch = next(batches, None)
            now = time.perf_counter()
            if mark is not None:
                if mark.error is not None:
                    raise mark.error
                if mark.time is not None:
                    times.waited += max(0.0, now - max(mark.time, asked))
            if batch is not None:
                yield batch
                now = time.perf_counter()
            times.seconds += now - began
            began = now
            if batch is None:
                return
    finally:
        watcher.close()


class _Watcher:
    """The thread that waits; started when it is first needed."""

    def __init__(self):
        self._marks: Optional[queue.SimpleQueue] = None

    def watch(self, arrays: Sequence[mx.nd.NDArray]) -> _Mark:
        mark = _Mark(arrays)
        if not mark.arrays:
            mark.wait()
            return mark
        if self._marks is None:
            self._marks = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(self._marks,), name="mxtrain-watcher", daemon=True).start()
        self._marks.put(mark)
        return mark

    def close(self) -> None:
        if self._marks is not None:
            self._marks.put(None)

    @staticmethod
    def _work(marks: queue.SimpleQueue) -> None:
        for mark in iter(marks.get, None):
            mark.wait()
