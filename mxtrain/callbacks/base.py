"""Callbacks watch a training; none of them can stop or change it.

They are given values that are already means over all samples, and know neither layout nor rank.
"""

from __future__ import annotations

import logging
from typing import Iterable, List

from mxtrain.errors import Elsewhere

_log = logging.getLogger("mxtrain")


class Callback:
    """Events in the order of `mxtrain.train.loop`; override the ones of interest."""

    def start(self, state) -> None:
        """Training begins or goes on at `state` (train.state.State)."""

    def log(self, values: dict) -> None:
        """Now and then in an epoch: epoch, batch, update, lr, and over the epoch so far means and wait_share."""

    def epoch(self, rows: List[dict]) -> None:
        """An epoch is over; the rows of metrics.csv, training and, where there is one, validation."""

    def end(self, state) -> None:
        """The training is finished."""

    def close(self) -> None:
        """Called at the very end, also after a failure."""


class Callbacks:
    """Several callbacks as one. One that fails is reported and left out; the training goes on."""

    def __init__(self, callbacks: Iterable[Callback]):
        self._callbacks = list(callbacks)

    def start(self, state):
        self._each("start", state)

    def log(self, values):
        self._each("log", values)

    def epoch(self, rows):
        self._each("epoch", rows)

    def end(self, state):
        self._each("end", state)

    def close(self):
        self._each("close")

    def _each(self, event, *arguments):
        for callback in list(self._callbacks):
            try:
                getattr(callback, event)(*arguments)
            except Elsewhere:
                raise
            except Exception as error:  # a logger must never end a training, whatever its library does
                self._callbacks.remove(callback)
                _log.warning("%s failed and is switched off: %s: %s", type(callback).__name__,
                             type(error).__name__, error)
