"""Handlers for the signals by which people and systems ask a program to end."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SAME_SECONDS = 2.0
"""What follows the first signal so soon is the same wish: schedulers, systemd and terminals send it to every process of
a group, launchers pass theirs on, and so a process gets it twice. A later one is a second wish: to end at once."""


class Handlers:
    """While entered, `_receive(number)` is called for SIGINT, SIGTERM and, unless nohup has it ignored, SIGHUP."""

    def __enter__(self):
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [number for number in SIGNALS if not (ignored and number == signal.SIGHUP)]
        self._before = {number: signal.signal(number, lambda number, _: self._receive(number)) for number in numbers}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int) -> None:
        raise NotImplementedError
