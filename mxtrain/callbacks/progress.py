"""The progress of a training, for people."""

from __future__ import annotations

import logging
import sys
import time
from typing import List

from tqdm import tqdm

from mxtrain.callbacks.base import Callback

_log = logging.getLogger("mxtrain")

_SECONDS_BETWEEN_LINES = 30
_WORTH_SAYING = 0.01  # share of the time spent waiting for data, in the line of an epoch


class Progress(Callback):
    """A bar per epoch on a terminal, lines now and then elsewhere, and a line per epoch in both. On stderr."""

    def __init__(self, epochs: int, updates_per_epoch: int):
        self._epochs, self._updates = epochs, updates_per_epoch
        self._bar, self._terminal = None, sys.stderr.isatty()
        self._last_line = time.monotonic()

    def log(self, values: dict) -> None:
        shown = {name: _short(values[name]) for name in ("loss", "accuracy", "perplexity", "lr")
                 if values.get(name) is not None}
        shown["data wait"] = f"{100 * values['wait_share']:.0f}%"
        if self._terminal:
            if self._bar is None:
                self._bar = tqdm(total=self._updates, initial=values["batch"], unit="batch", leave=False,
                                 desc=f"epoch {values['epoch']}/{self._epochs}", file=sys.stderr, dynamic_ncols=True)
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(values["batch"] - self._bar.n)
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._line(f"epoch {values['epoch']}/{self._epochs} batch {values['batch']}/{self._updates} "
                       + " ".join(f"{name} {value}" for name, value in shown.items()))

    def epoch(self, rows: List[dict]) -> None:
        self.close()
        parts = [f"epoch {rows[0]['epoch']}/{self._epochs}"]
        for row in rows:
            values = [f"{name} {_short(row[name])}" for name in ("loss", "accuracy", "top5", "f1", "perplexity")
                      if row.get(name) is not None]
            parts.append(f"{row['split']} {' '.join(values)}")
        parts.append(f"lr {_short(rows[0]['lr'])}  {rows[0]['samples_per_second']:.0f} samples/s")
        if rows[0]["wait_share"] >= _WORTH_SAYING:
            parts.append(f"{100 * rows[0]['wait_share']:.0f}% of the time waiting for data")
        skipped = sum(row.get("skipped", 0) for row in rows)
        if skipped:
            parts.append(f"{skipped} bad samples left out")
        self._last_line = time.monotonic()
        _log.info("%s", "  ".join(parts))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        tqdm.write(text, file=sys.stderr)


def _short(value: float) -> str:
    return f"{value:.4g}"
