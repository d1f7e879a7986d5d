"""Events for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import List

from mxtrain.callbacks.base import Callback


class Events(Callback):
    """Writes every number of the rows, and of the log within an epoch, to <folder>/events."""

    def __init__(self, folder: Path):
        self._folder, self._writer = Path(folder) / "events", None

    def start(self, state) -> None:
        from tensorboardX import SummaryWriter  # half a second, for those who want it

        # After a resume TensorBoard drops what an earlier process wrote beyond this update.
        self._writer = SummaryWriter(str(self._folder), purge_step=state.update or None)

    def log(self, values: dict) -> None:
        for name, value in values.items():
            if name not in ("epoch", "batch", "update"):
                self._writer.add_scalar(f"progress/{name}", value, values["update"])

    def epoch(self, rows: List[dict]) -> None:
        for row in rows:
            for name, value in row.items():
                if name not in ("epoch", "update", "split") and value is not None:
                    self._writer.add_scalar(f"{row['split']}/{name}", value, row["update"])
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
