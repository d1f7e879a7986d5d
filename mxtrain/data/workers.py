"""Who reads the samples of a batch: nobody else, threads, or forked processes.

Each kind offers the same: `start(epoch, batch)` begins to assemble a batch, `finish(assembly)` waits for it,
`close()` ends the workers. A batch is cut into chunks of rows, which workers write into its arrays; so neither
the number of workers nor their kind nor their order can change a batch.

Threads serve where reading releases the interpreter's lock (files and OpenCV), processes where it is a user's
Python code. Processes write into anonymous shared memory, which they inherit when they are forked: it has no
name in /dev/shm, is not bound by its size, and is gone with the processes, however they end.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager
from multiprocessing import connection
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from mxtrain.data.sampler import BatchSampler
from mxtrain.errors import BadSample, TrainingError, UserError
from mxtrain.parallel.world import processes_here

_log = logging.getLogger("mxtrain")

SECONDS_TO_WARN, SECONDS_TO_GIVE_UP = 10, 600
"""How long a batch may take before it is said which samples are being read, and before the training ends,
when all the while the same are being read."""

_SECONDS_TO_END = 5  # for threads, in the middle of a sample, when the loader is closed

Bad = Tuple[int, str]


def everything(rows: int) -> Tuple[int, int]:
    """The part of a batch's rows that a single process reads."""
    return 0, rows


class Column(NamedTuple):
    """One array of a sample: what the rows of a batch are made of."""

    shape: Tuple[int, ...]
    dtype: np.dtype


class Assembly:
    """A batch in the making."""

    def __init__(self, epoch: int, batch: int, first: int, arrays: List[np.ndarray]):
        self.epoch, self.batch, self.first, self.arrays = epoch, batch, first, arrays
        self.rows = len(arrays[-1])
        self.bad: List[Bad] = []
        """Rows that could not be read, and why."""
        self.missing = 0
        """Chunks that are not done."""
        self.error: Optional[BaseException] = None
        self.cancelled = False

    def take(self, bad: List[Bad], error: Optional[BaseException]) -> None:
        """Takes note of a chunk that is done."""
        self.missing -= 1
        self.bad += bad
        self.error = self.error or error


class Reader:
    """Reads rows of batches into arrays; what all workers do."""

    def __init__(self, dataset, sampler: BatchSampler, part: Callable[[int], Tuple[int, int]] = everything):
        self.dataset, self.sampler, self.part = dataset, sampler, part
        self._columns: Optional[List[Column]] = None

    def columns(self) -> List[Column]:
        """Shapes and types of a sample; found out from the first sample that can be read."""
        if self._columns is None:
            self._columns = self._find_columns()
        return self._columns

    def _find_columns(self) -> List[Column]:
        for index in range(self.sampler.length):
            try:
                sample = self.dataset[(0, index)]
            except BadSample as error:
                bad = error
                continue
            return [Column(x.shape, x.dtype) for x in map(np.asarray, sample)]
        raise BadSample(f"none of {self.sampler.length} samples can be read; the last: {bad}")

    def most(self) -> int:
        """The most rows of a batch that are read here. (A short last batch can have more of them than the others.)"""
        bounds = [self.part(self.sampler.rows(batch)) for batch in (0, len(self.sampler) - 1)]
        return max(stop - first for first, stop in bounds)

    def new(self, epoch: int, batch: int) -> Assembly:
        """A batch to be read, of which this process reads its part."""
        first, stop = self.part(self.sampler.rows(batch))
        return Assembly(epoch, batch, first, [np.empty((stop - first, *column.shape), column.dtype)
                                              for column in self.columns()])

    def read(self, arrays: Sequence[np.ndarray], first: int, epoch: int, batch: int, start: int, stop: int,
             note=None) -> List[Bad]:
        """Reads rows start..stop-1 of a batch into arrays that begin with row `first`; returns those that are bad,
        whose content is undefined."""
        bad = []
        for row, index in enumerate(self.sampler.indices(epoch, batch, start, stop).tolist(), start):
            if note is not None:
                note(index)
            try:
                sample = self.dataset[(epoch, index)]
            except BadSample as error:
                bad.append((row, str(error)))
                continue
            self._check(sample, arrays, index)
            for array, value in zip(arrays, sample):
                array[row - first] = value
        return bad

    def _check(self, sample: Sequence, arrays: Sequence[np.ndarray], index: int) -> None:
        """Raises UserError for a sample that its place in the arrays would change."""
        if len(sample) != len(arrays):
            raise UserError(f"{self.describe(index)} has {len(sample)} parts, others have {len(arrays)}")
        for array, value in zip(arrays, sample):
            value = np.asarray(value)
            if value.shape != array.shape[1:]:
                raise UserError(f"{self.describe(index)} has shape {value.shape}, others have {array.shape[1:]}: "
                                "samples of a batch are of one shape")
            if value.dtype != array.dtype and not np.can_cast(value.dtype, array.dtype, "same_kind"):
                raise UserError(f"{self.describe(index)} is {value.dtype}, others are {array.dtype}: "
                                "samples of a batch are of one type")

    def describe(self, index: int) -> str:
        """Name of a sample, for messages."""
        describe = getattr(self.dataset, "describe", None)
        return describe(index) if describe else f"sample {index}"


class NoWorkers:
    """The caller reads, when it needs the batch."""

    ahead = 0

    def __init__(self, reader: Reader):
        self._reader = reader

    def start(self, epoch: int, batch: int) -> Assembly:
        return self._reader.new(epoch, batch)

    def finish(self, assembly: Assembly) -> None:
        assembly.bad = self._reader.read(assembly.arrays, assembly.first, assembly.epoch, assembly.batch,
                                         assembly.first, assembly.first + assembly.rows)

    def ready(self, assembly: Assembly) -> bool:
        return False

    def cancel(self, assembly: Assembly) -> None:
        pass

    def close(self) -> None:
        pass


class Threads:
    """Threads of this process; a chunk goes to whoever is free."""

    def __init__(self, reader: Reader, count: int):
        self._reader, self._count = reader, count
        self.ahead = _batches_ahead(reader.most(), count)
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._done: queue.SimpleQueue = queue.SimpleQueue()
        self._reading: List[Optional[int]] = [None] * count
        self._closed = False
        self._threads = []
        for number in range(count):
            name = f"mxtrain-loader-{number}"
            self._threads.append(threading.Thread(target=self._work, args=(number,), name=name, daemon=True))
            self._threads[-1].start()

    def start(self, epoch: int, batch: int) -> Assembly:
        assembly = self._reader.new(epoch, batch)
        stop = assembly.first + assembly.rows
        chunk = max(1, math.ceil(assembly.rows / (4 * self._count)))
        starts = range(assembly.first, stop, chunk)
        assembly.missing = len(starts)
        for start in starts:
            self._tasks.put((assembly, start, min(start + chunk, stop)))
        return assembly

    def finish(self, assembly: Assembly) -> None:
        patience = _Patience()
        while assembly.missing:
            try:
                self._take(self._done.get(timeout=patience.next()))
            except queue.Empty:
                patience.lost("; ".join(f"loader thread {number} reads {self._reader.describe(index)}"
                                        for number, index in enumerate(self._reading) if index is not None))
        if assembly.error is not None:
            raise assembly.error

    def ready(self, assembly: Assembly) -> bool:
        while not self._done.empty():
            self._take(self._done.get())
        return not assembly.missing

    def cancel(self, assembly: Assembly) -> None:
        assembly.cancelled = True

    def close(self) -> None:
        self._closed = True
        for _ in range(self._count):
            self._tasks.put(None)
        # A thread that is inside OpenCV when the interpreter ends would abort the process; one that is stuck may.
        deadline = time.monotonic() + _SECONDS_TO_END
        for thread in self._threads:
            if thread is not threading.current_thread():  # in which garbage may be collected, too
                thread.join(max(0.0, deadline - time.monotonic()))

    def _take(self, result) -> None:
        assembly, bad, error = result
        assembly.take(bad, error)

    def _work(self, number: int) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            assembly, start, stop = task
            bad, error = [], None

            def note(index):
                if assembly.cancelled or self._closed:
                    raise _Unwanted
                self._reading[number] = index

            try:
                bad = self._reader.read(assembly.arrays, assembly.first, assembly.epoch, assembly.batch, start, stop,
                                        note)
            except BaseException as caught:  # it is raised where the batch is wanted
                error = caught
            self._reading[number] = None
            self._done.put((assembly, bad, error))
            del task, assembly, note, error  # or the last batch would stay in memory


class Processes:
    """Forked processes; each batch gives every one of them a chunk."""

    def __init__(self, reader: Reader, count: int):
        self._reader, self._count = reader, count
        self.ahead = _batches_ahead(reader.most(), count)
        self._slots = [_shared_arrays(reader) for _ in range(self.ahead + 1)]
        self._free = list(range(len(self._slots)))
        self._busy: Dict[int, Assembly] = {}
        self._reading = np.frombuffer(mmap.mmap(-1, 8 * count), np.int64)
        self._reading[:] = -1
        fork, self._parent = multiprocessing.get_context("fork"), os.getpid()
        self._pipes, self._processes = [], []
        for number in range(count):
            here, there = fork.Pipe()
            process = fork.Process(target=self._work, args=(number, there, [*self._pipes, here]), daemon=True,
                                   name=f"mxtrain-loader-{number}")
            with _opencv_without_threads():
                process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def start(self, epoch: int, batch: int) -> Assembly:
        patience = _Patience()
        while not self._free:  # all are of batches that nobody waits for any more
            self._receive(patience)
        slot, (first, stop) = self._free.pop(), self._reader.part(self._reader.sampler.rows(batch))
        assembly = Assembly(epoch, batch, first, [array[:stop - first] for array in self._slots[slot]])
        self._busy[slot] = assembly
        bounds = [first + assembly.rows * number // self._count for number in range(self._count + 1)]
        for number, (start, stop) in enumerate(zip(bounds, bounds[1:]), batch):  # small batches take turns
            if start < stop:
                assembly.missing += 1
                try:
                    self._pipes[number % self._count].send((slot, first, epoch, batch, start, stop))
                except OSError:  # it has died, which finish() will say
                    pass
        return assembly

    def finish(self, assembly: Assembly) -> None:
        patience = _Patience()
        while assembly.missing:
            self._receive(patience)
        assembly.arrays = [array.copy() for array in assembly.arrays]
        self._release(assembly)
        if assembly.error is not None:
            raise assembly.error

    def ready(self, assembly: Assembly) -> bool:
        while assembly.missing and connection.wait(self._pipes, 0):
            self._receive(_Patience())
        return not assembly.missing

    def cancel(self, assembly: Assembly) -> None:
        assembly.cancelled = True
        if not assembly.missing:
            self._release(assembly)

    def close(self) -> None:
        if os.getpid() != self._parent:  # a child of a user's own fork, which has them from us
            return
        for pipe, process in zip(self._pipes, self._processes):
            process.kill()  # they hold nothing that would have to be put in order
            pipe.close()
        for process in self._processes:
            process.join()

    def _release(self, assembly: Assembly) -> None:
        """Gives the shared memory of a batch free, once."""
        for slot in [slot for slot, busy in self._busy.items() if busy is assembly]:
            del self._busy[slot]
            self._free.append(slot)

    def _receive(self, patience: _Patience) -> None:
        """Takes what workers have done, and waits for it at most as long as patience lasts."""
        ready = connection.wait(self._pipes, patience.next())
        if not ready:
            patience.lost(self._state())
        for pipe in ready:
            try:
                slot, bad, error, where = pipe.recv()
            except (EOFError, OSError):
                self._report_death(self._processes[self._pipes.index(pipe)])
            if where is not None:
                cause = RuntimeError(f"in a loader process:\n{where}")
                error = error or cause
                error.__cause__ = None if error is cause else cause
            assembly = self._busy[slot]
            assembly.take(bad, error)
            if assembly.cancelled and not assembly.missing:
                self._release(assembly)

    def _report_death(self, process) -> None:
        process.join(1)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with {code}"
        index = int(self._reading[self._processes.index(process)])
        where = f" while it read {self._reader.describe(index)}" if index >= 0 else ""
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        raise TrainingError(f"{process.name}, process {process.pid}, {how}{where}{hint}")

    def _state(self) -> str:
        return "; ".join(f"{process.name}, process {process.pid}, reads {self._reader.describe(index)}"
                         for process, index in zip(self._processes, self._reading.tolist()) if index >= 0)

    def _work(self, number: int, pipe, others: list) -> None:
        """The life of a worker process."""
        os.setpgid(0, 0)  # Ctrl-C, a closed terminal and `timeout` signal the whole group; the parent decides
        _die_with(self._parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        for other in others:
            other.close()

        def note(index):
            self._reading[number] = index

        while True:
            try:
                slot, *chunk = pipe.recv()
            except EOFError:
                return
            bad, error, where = [], None, None
            try:
                bad = self._reader.read(self._slots[slot], *chunk, note)
            except Exception as caught:
                error, where = _portable(caught), traceback.format_exc()
            note(-1)
            try:
                pipe.send((slot, bad, error, where))
            except BrokenPipeError:
                return


def best_kind(dataset) -> str:
    """"thread" for datasets that say that reading them releases the interpreter's lock, else "process"."""
    return "thread" if getattr(dataset, "threads", False) else "process"


def cores() -> int:
    """Cores that this process may use: its share, where several of a training are on this host. At least 1."""
    return max(1, len(os.sched_getaffinity(0)) // processes_here())


class _Unwanted(Exception):
    """What is being read is not wanted any more."""


class _Patience:
    """The time that a batch may take: first a warning, then the end, unless the workers have gone on meanwhile."""

    def __init__(self):
        self._began = self._since = time.monotonic()
        self._state: Optional[str] = None

    def next(self) -> float:
        """Seconds to wait before `lost` is to be called."""
        limit = SECONDS_TO_WARN if self._state is None else SECONDS_TO_GIVE_UP
        return max(0.0, self._since + limit - time.monotonic())

    def lost(self, state: str) -> None:
        """Says what holds the batch up; raises TrainingError when it was the same the last time."""
        now = time.monotonic()
        text = f"no batch for {now - self._began:.0f} s; {state or 'no worker is reading'}"
        if state == self._state:
            raise TrainingError(text)
        _log.warning("%s", text)
        if self._state is not None:
            self._since = now
        self._state = state


def _batches_ahead(rows: int, workers: int) -> int:
    """Two, or as many as keep all workers busy while the caller is not looking. rows: those of a batch read here."""
    return max(2, math.ceil(2 * workers / rows) if rows else 2)


def _shared_arrays(reader: Reader) -> List[np.ndarray]:
    """The arrays of a batch in memory that forked processes share."""
    rows, arrays = reader.most(), []
    for column in reader.columns():
        count = rows * math.prod(column.shape)
        try:
            memory = mmap.mmap(-1, max(1, count * column.dtype.itemsize))
        except (OSError, OverflowError) as error:
            raise UserError(f"--batch-size {reader.sampler.batch_size}: no memory for {rows} x {column.shape} "
                            f"{column.dtype} ({error})") from None
        arrays.append(np.frombuffer(memory, column.dtype, count).reshape(rows, *column.shape))
    return arrays


@contextmanager
def _opencv_without_threads():
    """OpenCV's threads do not survive a fork, and a lock that one of them holds just then is never given back to the
    child: there, OpenCV is to do without them."""
    cv2 = sys.modules.get("cv2")
    count = cv2.getNumThreads() if cv2 else 0
    if count > 1:
        cv2.setNumThreads(0)
    try:
        yield
    finally:
        if count > 1:
            cv2.setNumThreads(count)


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _portable(error: Exception) -> Optional[Exception]:
    """The exception, or None when it cannot be sent to another process."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a user's class does
        return None
