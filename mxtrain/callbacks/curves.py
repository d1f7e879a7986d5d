"""curves.png: loss, accuracy, F1 where it is told, and learning rate by epoch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import List

from mxtrain.callbacks import table
from mxtrain.callbacks.base import Callback


class Curves(Callback):
    """Draws the columns of metrics.csv, after an epoch but at most every 20 seconds, and at the end."""

    def __init__(self, folder: Path):
        self._folder, self._drawn_at = Path(folder), time.monotonic()

    def epoch(self, rows: List[dict]) -> None:
        if time.monotonic() - self._drawn_at > 20:
            draw(self._folder)
            self._drawn_at = time.monotonic()

    def close(self) -> None:
        draw(self._folder)


def draw(folder: Path) -> None:
    """Draws <folder>/metrics.csv to <folder>/curves.png."""
    rows = table.read(folder / "metrics.csv")
    panels = [name for name in ("loss", "accuracy", "f1", "lr") if any(row.get(name) for row in rows)]
    if not panels:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: it keeps state and may want a screen
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(panels), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for split in ("train",) if name == "lr" else ("train", "val"):
            points = [(int(row["epoch"]), float(row[name])) for row in rows if row["split"] == split and row.get(name)]
            if points:
                axes.plot(*zip(*points), label=split, marker="." if len(points) < 30 else "")
        axes.set_xlabel("epoch")
        axes.set_title(name)
        axes.legend()
    temporary = folder / ".curves.png"
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(folder / "curves.png")
