"""The memory that a network's activations take on a device, computed from the bytes of its segments (see measure.py).

Of a group of segments that is recorded there is, when its backward begins: its input; what its segments keep; and then,
segment by segment from the last one, the gradients of a segment's output and input and what its backward takes inside.
Segments compiled into one chunk are given up together, chunks one by one. With recomputation only the groups' inputs
are there all the time, and the rest for one group after the other.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Iterator, List, NamedTuple, Sequence, Tuple


class Cost(NamedTuple):
    """Bytes of a segment for the rows of a shard, compiled as it will be used (with static memory or not)."""

    input: float
    output: float
    kept: float
    """What its recorded forward leaves while its input is there, its output included."""
    passing: float
    """What its recorded forward takes besides, for a moment."""
    frees: float
    """Its input, where nobody's backward needs it: inside a group it is gone when the segment has run. Else 0."""
    inner: float
    """What its backward takes besides the gradients of its output and input."""
    draws: bool
    """Whether a chunk begins with it."""


class Costs(NamedTuple):
    """What is known of a network for shards of a size."""

    segments: List[Cost]
    workspace: float
    """Bytes that operators share for a moment each, but which MXNet never gives up."""
    seconds: List[float] = []
    """Of forward and backward of each segment."""
    like: List[Any] = []
    """For each segment the block that was run: itself, or one equal to it."""


def recorded(segments: Sequence[Cost]) -> float:
    """Bytes kept by a group of segments from its recorded forward to its backward, besides its input."""
    return sum(s.kept for s in segments) - sum(s.frees for s in segments[1:])


def group_peak(segments: Sequence[Cost], first: bool = False, static: bool = False) -> float:
    """Most bytes of a group, from the beginning of its recorded forward to the end of its backward, besides its input.

    first: its input needs no gradient. static: the graph's memory is planned once and never given up; see
    program.compile_chain.
    """
    now, highest, total = 0.0, 0.0, 0.0
    for n, chunk in enumerate(_chunks(segments)):
        gradients = _gradients(chunk, first and n == 0)
        for segment in chunk:
            highest = max(highest, now + segment.kept + segment.passing)
            now += segment.kept - (segment.frees if segment is not segments[0] else 0)
        highest = max(highest, now + gradients)
        total += max(segment.passing for segment in chunk) + gradients
    return now + total if static else highest


def _chunks(segments: Sequence[Cost]) -> List[List[Cost]]:
    chunks: List[List[Cost]] = []
    for segment in segments:
        if segment.draws or not chunks:
            chunks.append([])
        chunks[-1].append(segment)
    return chunks


def _gradients(chunk: Sequence[Cost], first: bool) -> float:
    """Most bytes that the backward of a chunk takes, with the gradients of its output and (not when first) its input,
    which are there all the time."""
    most = 0.0
    for i, segment in enumerate(chunk):
        taken = segment.inner + (segment.input if i else 0)
        if i < len(chunk) - 1:  # the gradient of its output belongs to the chunk, and may be written over
            taken = max(segment.output, segment.inner) + (segment.input if i and not _elementwise(segment) else 0)
        most = max(most, taken)
    return most + chunk[-1].output + (0 if first else chunk[0].input)


def _elementwise(segment: Cost) -> bool:
    """Whether it is like an activation or a dropout: MXNet writes their input's gradient over that of the output."""
    return segment.frees == segment.input == segment.output > 0


def activations(segments: Sequence[Cost], starts: Sequence[int], in_flight: int = 1, recompute: bool = True,
                first: bool = True) -> float:
    """Most bytes that activations take on one device, which runs these segments; without the network's own input.

    starts: the segments that begin a group, from 0 on. in_flight: micro-batches whose forward is done and whose
    backward is not, the one at work included. recompute: keep only the inputs of groups until their backward. first: these are
    the network's first segments.
    """
    groups = [segments[a:b] for a, b in zip(starts, [*starts[1:], len(segments)])]
    if recompute:
        kept = [0 if first and i == 0 else group[0].input for i, group in enumerate(groups)]
        before = list(accumulate(kept))  # a group's own input included
    else:
        kept = [0 if first else segments[0].input, *map(recorded, groups)]
        before = list(accumulate(kept))[:-1]
    # The last group's backward comes first, and then what was kept for it is not needed any more.
    now = max(b + group_peak(group, first and i == 0) for i, (b, group) in enumerate(zip(before, groups)))
    return (in_flight - 1) * sum(kept) + now


def fewest_groups(segments: Sequence[Cost], budget: float, first: bool = True) -> Tuple[List[int], float]:
    """Starts of the fewest groups with which a shard's activations fit into a budget in bytes, and what they take.

    Where no number of groups is enough, those that take least. first: see activations.
    """
    best = None
    for starts in _even_groups(segments, first):
        needed = activations(segments, starts, first=first)
        if best is None or needed < best[1]:
            best = starts, needed
        if needed <= budget:
            break
    return best


def _even_groups(segments: Sequence[Cost], first: bool) -> Iterator[List[int]]:
    """Starts of 1, 2, 3 ... groups whose largest peak is as small as can be."""
    count = len(segments)
    peaks = {(a, b): (0 if first and a == 0 else segments[a].input) + group_peak(segments[a:b], first and a == 0)
             for a in range(count) for b in range(a + 1, count + 1)}
    # best[b]: (largest peak, starts) of so many groups of the first b segments
    best = {b: (peaks[0, b], [0]) for b in range(1, count + 1)}
    for number in range(1, count + 1):
        yield best[count][1]
        best = {b: min(((max(best[a][0], peaks[a, b]), [*best[a][1], a]) for a in range(number, b)),
                       key=lambda found: found[0]) for b in range(number + 1, count + 1)}
