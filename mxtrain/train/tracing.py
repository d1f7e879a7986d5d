"""--trace: when each device ran which shard, in one update of a start."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Optional

from mxtrain.parallel import trace
from mxtrain.parallel.schedule import idle_share
from mxtrain.train import folder

_log = logging.getLogger("mxtrain")

_SECOND = 1  # the first update compiles the network


def plan(run, path: Optional[Path]) -> None:
    """Has an update be traced. All processes call it when they have the state that they go on from."""
    run.layout.traced_update = run.state.update + _SECOND
    run.trace_at, run.trace_to = run.state.update + _SECOND + 1, path


def write(run) -> None:
    """Writes what was traced to the run folder. All processes call it."""
    rows = [row for rows in run.communicator.gather([list(row) for row in run.layout.trace]) for row in rows]
    if run.layout.grid.contexts > 1:
        rows = trace.side_by_side(rows, run.layout.grid.stages)

    def draw() -> None:
        with folder.naming(run.trace_to):
            trace.write(rows, run.trace_to)
        lines = trace.by_device([trace.Row(*row) for row in rows])
        idle = idle_share([[(row.begin, row.end) for row in line] for line in lines])
        _log.info("update %d traced: devices are idle in %.0f%% of it; see %s", run.trace_at, 100 * idle,
                  run.trace_to / "trace.png")

    run.communicator.together(draw if run.communicator.rank == 0 and rows else lambda: None)
