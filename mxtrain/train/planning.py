"""train.py --plan: what a layout takes of every device, told before anything is trained.

The activations are measured with few rows, one segment of each kind, on the host or the first GPU that is there; all
else follows from the sizes of the parameters. `plan` is that computation; `report` does the rest.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from mxtrain import cli
from mxtrain.devices import parse_gpus, visible_gpus
from mxtrain.errors import UserError
from mxtrain.models import plan as network_plan
from mxtrain.models import weights
from mxtrain.optim.optimizer import arrays_of_state
from mxtrain.parallel import cut
from mxtrain.parallel.grid import Grid, grid
from mxtrain.parallel.measure import measure, starts_within
from mxtrain.parallel.memory import Cost, activations, group_peak
from mxtrain.parallel.program import group_starts, modes
from mxtrain.parallel.schedule import SCHEDULES, bubble, most_in_flight
from mxtrain.parallel.settings import number_of_shards
from mxtrain.parallel.shards import assigned
from mxtrain.parallel.statistics import running_parameters
from mxtrain.parallel.zero import deal
from mxtrain.sizes import format_bytes, parse_bytes
from mxtrain.tasks.heads import heads_for

PARTS = ("weights", "gradients", "optimizer", "activations", "batch")


class Segment(NamedTuple):
    """What a segment is made of, in elements."""

    cost: Cost
    parameters: int
    trained: List[int]
    """Of each parameter that gets a gradient."""
    statistics: int
    """Running ones."""


class Layout(NamedTuple):
    """What of the settings decides what a device holds."""

    stages: List[int]
    """First segment of each."""
    groups: List[int]
    """First segment of each group of the program."""
    recompute: bool
    static: bool
    """Whether the graph's memory is static."""
    zero: int
    whole: bool
    """See zero.deal."""
    exact: bool
    schedule: str
    batch_size: int
    shards: int
    states: int
    """Arrays of the optimizer for each weight."""


def plan(segments: Sequence[Segment], workspace: float, row: Tuple[int, int], devices: Grid,
         layout: Layout) -> List[dict]:
    """For the devices of every stage that hold most: bytes of PARTS and their `total`; `segments` (how many), `parameters`
    (how many); `sent`: bytes that one sends per update, as `gradients`, `weights` and `activations`.

    row: bytes of a sample's inputs and of its label.
    """
    shards = len(max((assigned(r, devices.replicas, layout.shards) for r in range(devices.replicas)), key=len))
    rows = -(-layout.batch_size // layout.shards)
    order = SCHEDULES[layout.schedule if len(layout.stages) > 1 else "1f1b"](len(layout.stages), shards)
    bounds = [*layout.stages, len(segments)]
    found = []
    for stage, (a, b) in enumerate(zip(bounds, bounds[1:])):
        own, in_flight = segments[a:b], most_in_flight(order[stage])
        starts = [start - a for start in layout.groups if a <= start < b]
        trained = [sum(sum(segment.trained) for segment in own[i:j]) for i, j in zip(starts, [*starts[1:], len(own)])]
        owned = _owned(own, devices.replicas, layout) if layout.zero else sum(trained)
        weights = sum(segment.parameters for segment in own)
        if layout.zero == 3:  # and groups that come one at a time; between processes, one is on its way
            weights += owned - sum(trained) + max(trained) * (2 if devices.processes > devices.span else 1)
        parts = {
            "weights": 4 * weights,
            "gradients": (_gradients(trained, owned if layout.zero > 1 else None, layout.exact, in_flight)
                          + sum(segment.statistics for segment in own) * (28 if layout.exact else 12)),
            "optimizer": 4 * layout.states * owned,
            "activations": workspace + _activations(own, starts, in_flight, layout, first=a == 0),
            "batch": shards * rows * ((row[0] if a == 0 else 0) + (row[1] if b == len(segments) else 0)),
        }
        # What comes in from the stage before, and goes out to the next one; and their gradients.
        between = (0 if a == 0 else own[0].cost.input) + (0 if b == len(segments) else own[-1].cost.output)
        found.append({"segments": b - a, "parameters": sum(segment.parameters for segment in own),
                      **{name: round(value) for name, value in parts.items()}, "total": round(sum(parts.values())),
                      "in_flight": in_flight,
                      "sent": {**_sent(trained, shards, devices, layout, last=b == len(segments)),
                               "activations": round(shards * between)}})
    return found


def _activations(segments: Sequence[Segment], starts: Sequence[int], in_flight: int, layout: Layout, first: bool) -> float:
    costs = [segment.cost for segment in segments]
    if layout.static:
        return group_peak(costs, first, static=True)
    return activations(costs, starts, in_flight, layout.recompute, first)


def _owned(segments: Sequence[Segment], replicas: int, layout: Layout) -> int:
    """Most elements that a replica owns of a stage."""
    sizes = [size for segment in segments for size in segment.trained]
    loads = [0] * replicas
    deal(dict(enumerate(sizes)), replicas, layout.whole, loads=loads)
    return max(loads)


def _gradients(trained: Sequence[int], owned: Optional[int], exact: bool, in_flight: int) -> int:
    """Bytes of gradients. trained: elements of each group. owned: elements that the device sums up, None for all."""
    one_pass = 4 * (max(trained, default=0) if owned is not None else sum(trained))
    if not exact:
        return one_pass + (4 * owned if owned is not None else 0)
    # Two float64 parts of each sum and the float32 total; a buffer for every micro-batch in flight, two at least.
    return 20 * (sum(trained) if owned is None else owned) + one_pass * (1 if owned is not None else max(2, in_flight))


def _sent(groups: Sequence[int], shards: int, devices: Grid, layout: Layout, last: bool) -> Dict[str, int]:
    """Bytes that a device sends per update: by rings, each of which passes on (R - 1) / R of the bytes twice to sum
    them, and once to hand them out.

    groups: trained elements of each. last: whether the last of them ends the network, and is run only once.
    """
    trained = sum(groups)
    share = (devices.replicas - 1) / devices.replicas
    number = 16 if layout.exact else 4
    if layout.zero < 2:
        gradients = 2 * share * number * trained
    elif devices.processes > 1:  # a part of the sum is cut from the whole, for every shard
        gradients = shards * 2 * share * number * trained
    else:
        gradients = shards * share * 4 * trained
    # Of a shard, all groups are brought together for forward, and again for backward.
    weights = [0, trained, trained, shards * (2 * trained - (groups[-1] if last else 0))][layout.zero]
    return {"gradients": round(gradients), "weights": round(share * 4 * weights)}


class Machine(NamedTuple):
    """The devices that are planned for."""

    contexts: int
    """Of each process."""
    processes: int
    name: str
    """Of the kind of device: gpu or cpu."""
    memory: Optional[List[int]]
    """Bytes that each context of a process has; None where it is not known."""


def machine(settings: SimpleNamespace, processes: int, memory: Optional[str]) -> Machine:
    """memory: of --device-memory, for devices that are not here. Raises UserError."""
    given = settings.devices
    there = visible_gpus()[0]
    ids = parse_gpus(given.gpus) if given.gpus is not None else None
    if ids is None and given.gpus is not None:
        if not there:
            raise UserError("--gpus all: there is none here to plan for; name them, such as --gpus 0,1")
        ids = list(range(there))
    if ids is None and given.cpus is None and there:
        ids = [0]
    count = len(ids) if ids else given.cpus or 1
    if ids and processes > 1:  # the list is the host's, which its processes share
        if count % processes and processes % count:
            raise UserError(f"--processes {processes}: {count} GPUs (--gpus {given.gpus}) cannot be shared equally by "
                            "them, nor hosts with as many GPUs")
        count = max(1, count // processes)
    if memory is not None:
        known = [_amount(memory)] * count
    elif ids is None:
        known = [_available() // (count * processes)] * count
    else:
        known = [mx.context.gpu_memory_info(i)[0] for i in ids[:count]] if there > max(ids) else None
    return Machine(count, processes, "cpu" if ids is None else "gpu", known)


def _amount(text: str) -> int:
    number = parse_bytes(text)
    if number is None:
        raise UserError(f"--device-memory {text}: must be an amount such as 16GB or 80GiB")
    return number


def _available() -> int:
    """Bytes that the host can still give out."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if not found:
        raise UserError("--plan: how much memory there is cannot be told here; say it by --device-memory")
    return int(found[1]) * 1024


def report(settings: SimpleNamespace, task, on: Machine, as_json: bool) -> int:
    """Prints the plan of a training; returns the exit code."""
    result = make(settings, task, on)
    if as_json:
        cli.print_json(result)
    else:
        print("\n".join(lines(result)))
    return 0


def make(settings: SimpleNamespace, task, on: Machine) -> Dict[str, Any]:
    """The plan of a training, as JSON. Initializes what of the network is run."""
    parallel = settings.parallel
    if parallel.tp > 1:
        raise UserError(f"--plan: does not know layers that are split; leave out --tp {parallel.tp}")
    devices = grid(parallel.pp, parallel.dp, on.contexts, on.processes)
    shards = number_of_shards(parallel, settings.train.batch_size, on.contexts * on.processes)
    rows = -(-settings.train.batch_size // shards)
    net, ctx = task.net, mx.gpu(0) if on.name == "gpu" and visible_gpus()[0] else mx.cpu()
    if settings.model.freeze:
        weights.freeze(net, settings.model.freeze)
    segments = network_plan.segments(net)
    head, _ = heads_for(task.loss, None if settings.train.task == "lm" else len(task.classes))
    *inputs, label = [mx.nd.array(x, ctx=ctx, dtype=x.dtype) for x in task.sample()]
    if task.preprocess is not None:
        inputs = [task.preprocess(x) for x in inputs]
    sample = (segments, head, inputs, label, rows)

    budget = parse_bytes(parallel.recompute) is not None
    groups = [0] if budget else group_starts(net, segments, parallel.recompute, parallel.zero)
    recompute = parallel.recompute != "none" or parallel.zero == 3
    static = modes(net, max(len(groups), parallel.pp), parallel.recompute, parallel.zero, parallel.exact, shards,
                   devices.replicas).static
    costs = measure(*sample, starts=groups, static=static)
    stages = _stages(parallel, type(net).__name__, costs.seconds)
    if budget:
        groups = starts_within(parallel.recompute, *sample, stages)
    layout = Layout(stages, sorted({*groups, *stages}), recompute, static, parallel.zero,
                    settings.optim.optimizer == "lamb", parallel.exact, parallel.pp_schedule, settings.train.batch_size,
                    shards, arrays_of_state(settings.optim))
    found = plan([_segment(cost, block) for cost, block in zip(costs.segments, costs.like)], costs.workspace,
                 (sum(map(_row_bytes, inputs)), _row_bytes(label)), devices, layout)
    own = [dict(found[d % parallel.pp], device=d, stage=d % parallel.pp, replica=d // parallel.pp,
                rank=d // on.contexts, context=f"{on.name}({d % on.contexts})",
                memory=on.memory and on.memory[d % on.contexts],
                too_small=on.memory and found[d % parallel.pp]["total"] > on.memory[d % on.contexts])
           for d in range(on.contexts * on.processes)]
    order = SCHEDULES[parallel.pp_schedule](parallel.pp, -(-shards // devices.replicas))
    return {"network": settings.model.model, "parameters": sum(one["parameters"] for one in found),
            "replicas": devices.replicas, "stages": stages, "groups": layout.groups, "batch_size": layout.batch_size,
            "shards": shards, "rows": rows, "bubble": bubble(order), "devices": own}


def _row_bytes(array: mx.nd.NDArray) -> int:
    return array[:1].size * np.dtype(array.dtype).itemsize


def _stages(parallel, name: str, seconds: Sequence[float]) -> List[int]:
    """First segment of each stage."""
    if parallel.cut:
        return cut.by_hand(parallel.cut, len(seconds), parallel.pp, name)
    return cut.balanced(seconds, parallel.pp, name) if parallel.pp > 1 else [0]


def _segment(cost: Cost, block) -> Segment:
    parameters = list(block.collect_params().values())
    sizes = {id(p): int(np.prod(p.shape)) for p in parameters}
    return Segment(cost, sum(sizes.values()), [sizes[id(p)] for p in parameters if p.grad_req != "null"],
                   sum(sizes[id(p)] for p in running_parameters(block)))


def lines(result: Dict[str, Any]) -> List[str]:
    """A plan as text. Devices with the same numbers share a line."""
    stages, devices = len(result["stages"]), result["devices"]
    text = [f"network {result['network']}: {result['parameters']:,} parameters; {_count(result['replicas'], 'replica')} of "
            f"{_count(stages, 'stage')}; batches of {result['batch_size']} in {_count(result['shards'], 'shard')} of "
            f"{result['rows']}"]
    head = ("device", "segments", "parameters", *PARTS, "total", "of", "")
    table = [head]
    for stage in range(stages):
        same = [one for one in devices if one["stage"] == stage]
        for memory in sorted({one["memory"] or 0 for one in same}):
            alike = [one for one in same if (one["memory"] or 0) == memory]
            one = alike[0]
            table.append((_names(alike, stages), str(one["segments"]), f"{one['parameters']:,}",
                          *(format_bytes(one[part]) for part in (*PARTS, "total")),
                          format_bytes(memory) if memory else "?", "TOO SMALL" if one["too_small"] else ""))
    widths = [max(map(len, column)) for column in zip(*table)]
    text += ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                       for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in table]
    for stage in range(stages):
        sent = next(one for one in devices if one["stage"] == stage)["sent"]
        of = f"stage {stage} of a replica" if stages > 1 else "a device"
        text.append(f"sent per update by {of}: " + ", ".join(f"{format_bytes(sent[name])} of {name}" for name in
                                                            ("gradients", "weights", "activations")))
    if stages > 1:
        text.append(f"idle between the stages: {100 * result['bubble']:.0f}% of the time, if they take the same time")
    small = sum(bool(one["too_small"]) for one in devices)
    if devices[0]["memory"] is None:
        text.append("whether that fits is not known: these GPUs are not here; give --device-memory")
    else:
        text.append(f"{small} of {_count(len(devices), 'device')} too small" if small else "all devices are large enough")
    return text


def _names(devices: Sequence[dict], stages: int) -> str:
    numbers = [one["device"] for one in devices]
    shown = ",".join(map(str, numbers)) if len(numbers) <= 4 else f"{numbers[0]},{numbers[1]},..,{numbers[-1]}"
    return f"stage {devices[0]['stage']}: {shown}" if stages > 1 else shown


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
