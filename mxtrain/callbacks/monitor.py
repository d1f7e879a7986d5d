"""Which epoch was best, and when to stop early."""

from __future__ import annotations

import math
from typing import Optional


class Monitor:
    """Watches one value of the last row of each epoch (validation, or training where there is none).

    name: its column; values of "loss" and of names ending in _loss are better when smaller, others when larger.
    "auto" is accuracy where the rows have one, else loss.
    patience: epochs in a row that may pass without an improvement of more than min_delta, None for any number.
    """

    def __init__(self, name: str = "auto", patience: Optional[int] = None, min_delta: float = 0.0):
        self.name, self._patience, self._min_delta = name, patience, min_delta
        self.best: Optional[float] = None
        self.best_epoch: Optional[int] = None
        self.improved = False
        """Whether the latest epoch was the best."""
        self._reference: Optional[float] = None  # the value that an improvement is counted from
        self._bad_epochs = 0

    def epoch(self, row: dict) -> Optional[str]:
        """Takes note of an epoch's row. Returns the reason to stop, or None to go on."""
        if self.name == "auto":
            self.name = "loss" if row.get("accuracy") is None else "accuracy"
        value = row[self.name]
        self.improved = self._better(value, self.best, 0.0)
        if self.improved:
            self.best, self.best_epoch = value, row["epoch"]
        if self._better(value, self._reference, self._min_delta):
            self._reference, self._bad_epochs = value, 0
        else:
            self._bad_epochs += 1
        if not self.exhausted:
            return None
        return (f"{self.name} has not improved for {self._bad_epochs} epochs "
                f"(best {self.best} in epoch {self.best_epoch})")

    @property
    def exhausted(self) -> bool:
        """Whether the patience is at its end."""
        return self._patience is not None and self._bad_epochs >= self._patience

    def _better(self, value: float, than: Optional[float], by: float) -> bool:
        if not math.isfinite(value):
            return False
        if than is None:
            return True
        return value < than - by if self.smaller_is_better else value > than + by

    @property
    def smaller_is_better(self) -> bool:
        return self.name == "loss" or self.name.endswith("_loss")

    def state(self) -> dict:
        return {"name": self.name, "best": self.best, "best_epoch": self.best_epoch, "reference": self._reference,
                "bad_epochs": self._bad_epochs}

    def load(self, state: dict) -> None:
        """Goes on from a saved state; when another value is watched now, from nothing."""
        if self.name not in ("auto", state["name"]):
            return
        self.name, self.best, self.best_epoch = state["name"], state["best"], state["best_epoch"]
        self._reference, self._bad_epochs = state["reference"], state["bad_epochs"]
