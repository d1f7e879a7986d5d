"""What other processes than rank 0 warn of, for the log.txt that rank 0 writes."""

from __future__ import annotations

import logging
import logging.handlers
from typing import List

from mxtrain.callbacks.base import Callback
from mxtrain.train import folder

_log = logging.getLogger("mxtrain")

READERS = ("loader", "workers", "jpeg")
"""Modules whose warnings are about samples, of which every process reads others."""

_MOST = 100  # lines of a process in an epoch


class Relay(Callback):
    """At the end of every epoch rank 0 writes into log.txt what others have said about their samples meanwhile.

    On the screen they have said so themselves, at once.
    """

    def __init__(self, communicator):
        self._communicator = communicator
        self._said = logging.handlers.MemoryHandler(_MOST, logging.CRITICAL + 1, flushOnClose=False)
        self._said.addFilter(lambda record: record.module in READERS and len(self._said.buffer) < _MOST)
        if communicator.rank:
            _log.addHandler(self._said)

    def epoch(self, rows: List[dict]) -> None:
        own = [(record.levelno, record.getMessage()) for record in self._said.buffer]
        self._said.buffer.clear()
        for rank, lines in enumerate(self._communicator.gather(own)):
            for level, text in lines if self._communicator.rank == 0 else ():
                folder.write_line(level, f"rank {rank}: {text}")

    def close(self) -> None:
        _log.removeHandler(self._said)
