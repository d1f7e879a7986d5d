"""What --trace shows of a pipeline: when each device ran which micro-batch, as trace.json and trace.png."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence

from mxtrain.parallel.schedule import idle_share


class Row(NamedTuple):
    """An instruction that was run. It becomes a plain list in JSON, so that processes can gather rows."""

    device: int
    """Number of the device, over all processes."""
    name: str
    """What to call the device, such as "stage 0, cpu(0)"."""
    kind: str
    """"forward" or "backward"."""
    micro_batch: int
    begin: float
    """Seconds of time.time(): the one clock that processes share, those of several hosts as far as these agree."""
    end: float


def write(rows: Sequence[Sequence], folder: Path) -> None:
    """Writes <folder>/trace.json, which opens in Perfetto and in Chrome's tracing, and <folder>/trace.png.

    rows: Rows, or lists of the same values, at least one and in any order; those of a device do not overlap.
    """
    lines = by_device([Row(*row) for row in rows])
    (folder / "trace.json").write_text(json.dumps({"traceEvents": events(lines), "displayTimeUnit": "ms"}))
    draw(lines, folder / "trace.png")


def by_device(rows: Sequence[Row]) -> List[List[Row]]:
    """The rows of each device in their order, the first of all beginning at 0 seconds."""
    first = min(row.begin for row in rows)
    lines: Dict[int, List[Row]] = {device: [] for device in sorted({row.device for row in rows})}
    for row in sorted(rows, key=lambda row: row.begin):
        lines[row.device].append(row._replace(begin=row.begin - first, end=row.end - first))
    return list(lines.values())


def events(lines: Sequence[Sequence[Row]]) -> List[dict]:
    """The rows as complete events of Chrome's trace-event format (times in microseconds), with a thread per device."""
    names = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": line[0].device, "args": {"name": line[0].name}}
             for line in lines]
    order = [{"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": line[0].device,
              "args": {"sort_index": line[0].device}} for line in lines]
    spans = [{"ph": "X", "name": f"{row.kind} {row.micro_batch}", "cat": row.kind, "pid": 0, "tid": row.device,
              "ts": row.begin * 1e6, "dur": (row.end - row.begin) * 1e6} for line in lines for row in line]
    return names + order + spans


def draw(lines: Sequence[Sequence[Row]], path: Path) -> None:
    """Draws a bar per device. The title tells the share of the devices' time that is idle: the bubble."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: it keeps state and may want a screen
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.4 + 0.5 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    whole = max(line[-1].end for line in lines)
    for kind, color in (("forward", "C0"), ("backward", "C1")):
        for y, line in enumerate(lines):
            bars = [(row.begin, row.end - row.begin) for row in line if row.kind == kind]
            axes.broken_barh(bars, (y - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.3,
                             label=kind if y == 0 else None)
    for y, line in enumerate(lines):
        for row in line:
            if row.end - row.begin > 0.015 * whole:  # wide enough for a number
                axes.text((row.begin + row.end) / 2, y, row.micro_batch, ha="center", va="center", color="white")
    axes.set_yticks(range(len(lines)), [line[0].name for line in lines])
    axes.invert_yaxis()
    axes.set_xlim(0, whole)
    axes.set_xlabel("seconds")
    axes.set_title(f"idle: {idle_share([[(row.begin, row.end) for row in line] for line in lines]):.1%}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, format="png", dpi=120)
