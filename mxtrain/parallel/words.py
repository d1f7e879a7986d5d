"""A layout in words, for the log."""

from __future__ import annotations

from typing import Optional, Sequence

import mxnet as mx

from mxtrain.parallel.grid import Grid
from mxtrain.parallel.schedule import SCHEDULES, bubble


def in_words(grid: Grid, contexts: Sequence[mx.Context], starts: Sequence[int], segments: int, shards: int,
             schedule: str = "1f1b", zero: int = 0) -> Optional[str]:
    """Stages, where they are, and what is shared out; None where there is nothing of it.

    contexts: of this process. starts: the first segment of each stage, of so many segments. shards, schedule, zero: see
    ParallelConfig.
    """
    said, replicas = [], grid.replicas
    if grid.stages > 1:
        several = f"{replicas} replicas of " if replicas > 1 else ""
        said += [f"{several}{grid.stages} stages of segments {_ranges(starts, segments)}, {_places(grid, contexts)}",
                 f"{schedule}, bubble {bubble(SCHEDULES[schedule](grid.stages, -(-shards // replicas))):.0%}"]
    if zero and replicas > 1:
        said.append(f"ZeRO {zero} over {replicas} replicas")
    return "; ".join(said) or None


def _ranges(starts: Sequence[int], segments: int) -> str:
    return ", ".join(f"{a}-{b - 1}" if b - a > 1 else f"{a}" for a, b in zip(starts, [*starts[1:], segments]))


def _places(grid: Grid, contexts: Sequence[mx.Context]) -> str:
    if grid.span > 1:
        return f"{'each ' * (grid.replicas > 1)}over {grid.span} processes"
    pieces = [contexts[i:i + grid.stages] for i in range(0, len(contexts), grid.stages)]
    return "on " + " and on ".join(", ".join(map(str, piece)) for piece in pieces) + (
        " of each process" if grid.processes > 1 else "")
