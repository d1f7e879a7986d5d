"""One start: all processes of it, from the first to the last."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Callable, List, Optional

from mxtrain.launch.processes import Output, Process, Task
from mxtrain.launch.worker import LOST_PEER
from mxtrain.signals import SAME_SECONDS, Handlers

_POLL_SECONDS = 0.02
_SERVICE_SECONDS = 2.0  # that servers have to end by themselves after the workers; they have nothing to save
_CULPRIT_SECONDS = 5.0  # that it has to end by itself, with its own words, when the first to end has but lost it
_KILL_SECONDS = 3.0  # that a guard has to do so


class Signals(Handlers):
    """While entered, remembers SIGINT, SIGTERM and SIGHUP: the first, and how many came; those within SAME_SECONDS of
    the first are the same."""

    first, count, _since = 0, 0, 0.0

    def _receive(self, number):
        if not self.first:
            self.first, self.count, self._since = number, 1, time.monotonic()
        elif time.monotonic() - self._since > SAME_SECONDS:
            self.count += 1


@dataclass
class Outcome:
    """How a start ended. `cause` is the process that failed first, None when none did: then the code is 0, or 128 + n
    where the workers ended as signal n had asked them to."""

    code: int
    cause: Optional[Process] = None


class Group:
    """Runs tasks until all workers are done, one has failed, or a signal has come."""

    def __init__(self, signals: Signals, grace: float, output: Output, announced: Callable[[str], None]):
        self._signals, self._grace = signals, grace
        self._output, self._announced = output, announced
        self._running: List[Process] = []
        self._failed: List[Process] = []
        self._forwarded, self._stopped = False, False

    def run(self, tasks: List[Task]) -> Outcome:
        """Starts the tasks, services first, and returns when none of their processes is left."""
        try:
            for task in tasks:
                self._running.append(Process(task, self._grace, self._output, self._announced))
            self._run_workers()
            self._end_services()
        finally:
            self._kill(self._running)
        if not self._failed:
            return Outcome(128 + self._signals.first if self._stopped or self._signals.count > 1 else 0)
        return Outcome(self._cause().code, self._cause())

    def _cause(self) -> Process:
        """The first that failed, of those that did not only lose another."""
        return min(self._failed, key=lambda process: process.code == LOST_PEER)

    def _workers(self) -> List[Process]:
        return [process for process in self._running if process.task.rank is not None]

    def _run_workers(self) -> None:
        stopping = None  # since when
        while self._workers():
            self._forward()
            if self._signals.count > 1:
                return self._kill(self._workers())
            ended = self._reap()
            if stopping is None and self._stopping(ended):
                stopping = time.monotonic()
            elapsed = 0 if stopping is None else time.monotonic() - stopping
            if elapsed > self._grace:
                return self._kill(self._workers())
            if self._failed and (self._cause().code != LOST_PEER or elapsed > _CULPRIT_SECONDS):
                self._ask(signal.SIGTERM)
            time.sleep(_POLL_SECONDS)

    def _stopping(self, ended: List[Process]) -> bool:
        # After a signal the workers save together, which takes what it takes, until the first has ended.
        return bool(self._failed or self._signals.count and any(process.task.rank is not None for process in ended))

    def _forward(self) -> None:
        if self._signals.count and not self._forwarded:
            self._forwarded = True
            self._ask(self._signals.first)

    def _ask(self, number: int) -> None:
        """Signals the workers that have had none yet: the second one would end them at once."""
        for process in self._workers():
            if not process.signalled:
                process.signal(number)

    def _reap(self) -> List[Process]:
        """Takes out the processes that have ended, and notes those that failed by themselves."""
        ended = [process for process in self._running if process.poll() is not None]
        for process in self._running:
            process.beat()
        self._running = [process for process in self._running if process.code is None]
        # Of several in one look, those that a signal ended have hardly been ended by the others.
        for process in sorted(ended, key=lambda process: process.code <= 128):
            if process.task.rank is not None and self._forwarded and process.code == 128 + self._signals.first:
                self._stopped = True
            elif process.code != 0 and not self._as_asked(process):
                self._failed.append(process)
        return ended

    def _as_asked(self, process: Process) -> bool:
        """Whether it ended because another one had failed."""
        return bool(self._failed and process.signalled and process.code == 128 + signal.SIGTERM)

    def _end_services(self) -> None:
        until = time.monotonic() + (0 if self._failed else _SERVICE_SECONDS)
        while self._running and self._signals.count < 2:
            if time.monotonic() > until:
                return self._kill(self._running)
            for process in self._running:
                process.poll()
                process.beat()
            self._running = [process for process in self._running if process.code is None]
            time.sleep(_POLL_SECONDS)

    def _kill(self, processes: List[Process]) -> None:
        """Ends processes at once, with all that they have started."""
        for process in processes:
            process.signal(signal.SIGKILL)
        until = time.monotonic() + _KILL_SECONDS
        while any(process.poll() is None for process in processes):
            if time.monotonic() > until:
                for process in processes:
                    with suppress(OSError):
                        process.abandon()
            time.sleep(_POLL_SECONDS)
        self._running = [process for process in self._running if process.code is None]
