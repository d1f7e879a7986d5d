"""SIGINT, SIGTERM and SIGHUP as a request that the loop answers between two updates."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from contextlib import suppress
from typing import Optional

from mxtrain.signals import SAME_SECONDS, Handlers


class Stopped(Exception):
    """The training was stopped by a signal, at a point where everything has been saved."""

    def __init__(self, number: int, where: str):
        super().__init__(where)
        self.number = number


class Signals(Handlers):
    """While entered, remembers the first SIGINT, SIGTERM or SIGHUP. Others are ignored for SAME_SECONDS; after that,
    one ends the process at once."""

    received = 0
    """Number of the signal that came, 0 while none has."""
    _timer: Optional[threading.Timer] = None

    def _receive(self, number):
        self.received = number
        for each in self._before:
            signal.signal(each, signal.SIG_IGN)
        self._timer = threading.Timer(SAME_SECONDS, self._give_in)
        self._timer.daemon = True
        self._timer.start()
        # Not by the log: the signal may have come while a line was being written, and streams cannot be re-entered.
        text = (f"\n{signal.Signals(number).name}: saving after this update "
                f"(another one in {SAME_SECONDS:.0f} seconds or later stops at once)\n")
        with suppress(OSError):  # Ctrl-C ends also the `tee` or `less` that read our lines; the training is to be saved
            os.write(2, text.encode())

    def _give_in(self) -> None:
        """From now on the system ends the process: a handler of Python's would wait for MXNet's call to return. Of the
        ways to say so, only this one is open to a thread."""
        for each in self._before:
            ctypes.pythonapi.PyOS_setsig(int(each), None)  # None: SIG_DFL

    def __exit__(self, *_):
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        super().__exit__()
