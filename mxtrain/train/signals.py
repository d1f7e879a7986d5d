"""SIGINT, SIGTERM and SIGHUP as a request that the loop answers between two updates."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


class Stopped(Exception):
    """The training was stopped by a signal, at a point where everything has been saved."""

    def __init__(self, number: int, where: str):
        super().__init__(where)
        self.number = number


class Signals:
    """While entered, remembers the first SIGINT, SIGTERM or SIGHUP; a second one ends the process at once."""

    received = 0
    """Number of the signal that came, 0 while none has."""

    def __enter__(self):
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup leaves it
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number, _frame):
        self.received = number
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)  # by the system: Python would wait for MXNet's call to return
        # Not by the log: the signal may have come while a line was being written, and streams cannot be re-entered.
        text = f"\n{signal.Signals(number).name}: saving after this update (a second one stops at once)\n"
        with suppress(OSError):  # Ctrl-C ends also the `tee` or `less` that read our lines; the training is to be saved
            os.write(2, text.encode())
