"""In which order each stage of a pipeline runs its micro-batches: a plain list of instructions per stage.

Both schedules run the backwards of a stage in the order of the micro-batches, so that sums of gradients have the same
bits in either of them, whatever the number of stages.
"""

from __future__ import annotations

from collections import deque
from typing import List, NamedTuple, Sequence, Union

Cost = Union[float, Sequence[float]]


class Instruction(NamedTuple):
    kind: str
    """"forward" or "backward"."""
    micro_batch: int


class Span(NamedTuple):
    """When an instruction ran, or would run."""

    start: float
    end: float
    instruction: Instruction


def gpipe(stages: int, micro_batches: int) -> List[List[Instruction]]:
    """All forwards, then all backwards (Huang et al. 2019); every stage holds all micro-batches at once."""
    return [_with_warm_up(micro_batches, micro_batches) for _ in range(stages)]


def one_forward_one_backward(stages: int, micro_batches: int) -> List[List[Instruction]]:
    """Backward as soon as possible (PipeDream-Flush: Narayanan et al. 2021); of P stages, stage s holds at most P - s
    micro-batches at once."""
    return [_with_warm_up(stages - 1 - stage, micro_batches) for stage in range(stages)]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def _with_warm_up(ahead: int, micro_batches: int) -> List[Instruction]:
    """`ahead` forwards, then a forward and a backward in turns, then the backwards that are left."""
    forwards = deque(Instruction("forward", m) for m in range(micro_batches))
    backwards = deque(Instruction("backward", m) for m in range(micro_batches))
    instructions = [forwards.popleft() for _ in range(min(ahead, micro_batches))]
    while forwards:
        instructions += [forwards.popleft(), backwards.popleft()]
    return [*instructions, *backwards]


def most_in_flight(instructions: Sequence[Instruction]) -> int:
    """The most micro-batches that a stage holds at a time: forward begun, backward not ended."""
    held = most = 0
    for instruction in instructions:
        held += 1 if instruction.kind == "forward" else -1
        most = max(most, held)
    return most


def timeline(schedule: Sequence[Sequence[Instruction]], forward: Cost = 1.0, backward: Cost = 2.0) -> List[List[Span]]:
    """When each instruction of each stage runs, if sending takes no time and no sender waits.

    forward, backward: what they take; a number, or one for each stage.
    Raises RuntimeError where no stage can go on, each waiting for another one.
    """
    last = len(schedule) - 1
    costs = {"forward": _per_stage(forward, len(schedule)), "backward": _per_stage(backward, len(schedule))}
    ends = {}  # (stage, instruction) -> time
    spans: List[List[Span]] = [[] for _ in schedule]
    queues = [deque(instructions) for instructions in schedule]
    while any(queues):
        done = len(ends)
        for stage, queue in enumerate(queues):
            while queue:
                needs = _needs(stage, queue[0], last)
                if not all(need in ends for need in needs):
                    break
                instruction = queue.popleft()
                start = max([0.0, *(ends[need] for need in needs), *(span.end for span in spans[stage][-1:])])
                ends[stage, instruction] = end = start + costs[instruction.kind][stage]
                spans[stage].append(Span(start, end, instruction))
        if len(ends) == done:
            waiting = [f"stage {stage} at {queue[0].kind} {queue[0].micro_batch}"
                       for stage, queue in enumerate(queues) if queue]
            raise RuntimeError(f"deadlock in a schedule: {', '.join(waiting)}")
    return spans


def _needs(stage: int, instruction: Instruction, last: int) -> List[tuple]:
    """The (stage, instruction) that must have been run before."""
    kind, m = instruction
    if kind == "forward":
        return [(stage - 1, instruction)] if stage > 0 else []
    return [(stage, Instruction("forward", m)), *([(stage + 1, instruction)] if stage < last else [])]


def _per_stage(cost: Cost, stages: int) -> List[float]:
    return list(cost) if isinstance(cost, Sequence) else [cost] * stages


def bubble(schedule: Sequence[Sequence[Instruction]], forward: Cost = 1.0, backward: Cost = 2.0) -> float:
    """The share of the devices' time that is idle; (P - 1) / (m + P - 1) for P equal stages and m micro-batches.

    forward, backward: see timeline.
    """
    return idle_share([[(span.start, span.end) for span in spans] for spans in timeline(schedule, forward, backward)])


def idle_share(lines: Sequence[Sequence[tuple]]) -> float:
    """The share of the time from the first start to the last end that devices are idle; 0 where nothing ran.

    lines: for each device, the (start, end) of what it ran, none overlapping.
    """
    spans = [span for line in lines for span in line]
    whole = max((end for _, end in spans), default=0) - min((start for start, _ in spans), default=0)
    return 1 - sum(end - start for start, end in spans) / (whole * len(lines)) if whole else 0.0
