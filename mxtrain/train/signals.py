"""SIGINT, SIGTERM and SIGHUP as a request that the loop answers between two updates."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from mxtrain.signals import Handlers


class Stopped(Exception):
    """The training was stopped by a signal, at a point where everything has been saved."""

    def __init__(self, number: int, where: str):
        super().__init__(where)
        self.number = number


class Signals(Handlers):
    """While entered, remembers the first SIGINT, SIGTERM or SIGHUP; a second one ends the process at once."""

    received = 0
    """Number of the signal that came, 0 while none has."""

    def _receive(self, number):
        self.received = number
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)  # by the system: Python would wait for MXNet's call to return
        # Not by the log: the signal may have come while a line was being written, and streams cannot be re-entered.
        text = f"\n{signal.Signals(number).name}: saving after this update (a second one stops at once)\n"
        with suppress(OSError):  # Ctrl-C ends also the `tee` or `less` that read our lines; the training is to be saved
            os.write(2, text.encode())
