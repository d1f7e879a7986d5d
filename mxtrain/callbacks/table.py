"""metrics.csv: one row per epoch and split."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import List

from mxtrain.callbacks.base import Callback

COLUMNS = ["epoch", "update", "split", "samples", "loss", "accuracy", "lr", "seconds", "samples_per_second",
           "wait_share"]


class Table(Callback):
    """Writes the rows; on a resume it is cut back to the epochs that the checkpoint has completed."""

    def __init__(self, path: Path):
        self._path = Path(path)

    def start(self, state) -> None:
        rows = [row for row in read(self._path) if int(row["epoch"]) <= state.epoch]
        self._write(rows)

    def epoch(self, rows: List[dict]) -> None:
        self._write([*read(self._path), *rows])

    def _write(self, rows: List[dict]) -> None:
        others = [name for row in rows for name in row if name not in COLUMNS]
        temporary = self._path.with_name(f".{self._path.name}")
        with open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, [*COLUMNS, *dict.fromkeys(others)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        temporary.replace(self._path)


def read(path: Path) -> List[dict]:
    """The rows as text; none when there is no file."""
    if not Path(path).exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
