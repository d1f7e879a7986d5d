"""Measures the bytes that the segments of a network take, by running each kind of them on a few rows.

What an operator keeps for its backward is MXNet's affair and differs between devices, so it is not derived from the
graph: segments are run, forward and backward, and MXNet's arrays are counted. What they take is in proportion to the
rows, but for constants (such as weights brought into another order), which a second number of rows shows.
"""

from __future__ import annotations

import gc
import json
import time
from functools import partial
from typing import Dict, List, Sequence, Set, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock

from mxtrain.errors import UserError
from mxtrain.models import plan
from mxtrain.parallel.counting import counting, live, peak
from mxtrain.parallel.memory import Cost, Costs, fewest_groups
from mxtrain.parallel.program import compile_chain
from mxtrain.parallel.statistics import statistics_kept
from mxtrain.sizes import format_bytes, parse_bytes

_ENOUGH = 250 * 10**6
"""Bytes of activations to measure with, where a shard has as many: then constants are small."""
_TRIES = 8
Arrays = List[mx.nd.NDArray]


def measure(segments: Sequence[Block], head: Block, inputs: Sequence[mx.nd.NDArray], label: mx.nd.NDArray,
            rows: int, starts: Sequence[int] = (0,), static: bool = False) -> Costs:
    """Costs of the segments of a network, the last one with the training head, for shards of `rows` rows.

    inputs, label: what the network and the head take, a row or more, on the context to measure on. starts: of the
    groups that workspaces are for. static: measure with static memory. Of three or more equal segments in a row two are
    run; what is run and not initialized yet gets zeros. Changes gradients, the random generator and nothing else. Not
    for a process whose MXNet profiler is in use.
    """
    row = [x[:1].copy() for x in (*inputs, label)]
    ctx, draws = label.context, [plan.draws(segment) for segment in segments]
    links, places = _chain(segments, head, row)
    blocks = [compile_chain([link], head if link is links[-1] else None) for link in links]
    chunks = _chunks(links, places, head, {*starts, *np.flatnonzero(draws)})
    with counting(), statistics_kept(links, ctx):
        begun, found = live(ctx), {}
        _add(found, 1, blocks, chunks, row, begun)  # small first: a workspace stays as large as it ever was
        size = int(np.clip(_ENOUGH / max(1, found[1][0][:, 2].sum()), 1, rows))
        for some in [size] if size == rows else [-(-size // 2), size]:
            _add(found, some, blocks, chunks, row, begun)
        backward = {some: np.array(_backward(blocks, links, static, *_batch(row, some))) for some in found}
    numbers = np.column_stack([_at({some: table for some, (table, _) in found.items()}, size, rows),
                               _at(backward, size, rows)])
    # In proportion even where it looks constant, as it does while the weights are larger than the activations.
    workspace = found[size][1] * rows / size
    return Costs([Cost(*numbers[place, :-1], draw) for place, draw in zip(places, draws)], workspace,
                 [max(0.0, numbers[place, -1]) for place in places], [links[place] for place in places])


def starts_within(budget: str, segments: Sequence[Block], head: Block, inputs: Sequence[mx.nd.NDArray],
                  label: mx.nd.NDArray, rows: int, stages: Sequence[int] = (0,)) -> List[int]:
    """First segments of the fewest groups such that a shard's activations fit into --recompute BYTES on each device.

    stages: first segment of each stage. The other arguments are those of `measure`. Raises UserError when no groups do.
    """
    costs, starts = measure(segments, head, inputs, label, rows), []
    for a, b in zip(stages, [*stages[1:], len(segments)]):
        own, needed = fewest_groups(costs.segments[a:b], parse_bytes(budget) - costs.workspace, first=a == 0)
        if needed + costs.workspace > parse_bytes(budget):
            stage = f" in stage {list(stages).index(a)}" if len(stages) > 1 else ""
            raise UserError(f"--recompute {budget}: the activations of a shard of {rows} rows take "
                            f"{format_bytes(needed + costs.workspace)} at the least{stage}; give that much, or smaller "
                            "shards (--micro-batch)")
        starts += [a + start for start in own]
    return starts


def _chain(segments: Sequence[Block], head: Block, row: Arrays) -> Tuple[List[Block], List[int]]:
    """The segments to be run, and for every segment the place in this list of one like it. Finds out shapes."""
    kinds = [_kind(segment) for segment in segments]
    links: List[Block] = []
    places: List[int] = []
    *x, label = row
    before = None
    for i, segment in enumerate(segments):
        last = i == len(segments) - 1
        if last or i < 2 or not kinds[i - 2] == kinds[i - 1] == kinds[i] or x[0].shape != before:
            before = x[0].shape
            links.append(segment)
            _initialize(segment, label.context)
            if not last:
                with autograd.train_mode():
                    x = [segment(*x)]
        places.append(len(links) - 1)
    return links, places


def _kind(segment: Block):
    """Equal for segments that compute the same with parameters of the same shapes, as far as can be told."""
    if not isinstance(segment, HybridBlock):
        return id(segment)
    try:
        graph = json.loads(segment(mx.sym.var("x")).tojson())
    except Exception:  # several inputs, or whatever its forward does to a symbol
        return id(segment)
    nodes = [(node["op"], node["op"] != "null" and node.get("attrs"), node["inputs"]) for node in graph["nodes"]]
    parameters = [(p.shape, p.grad_req, str(p.dtype)) for p in segment.collect_params().values()]
    return json.dumps([nodes, parameters, graph["heads"]])


def _initialize(block: Block, ctx: mx.Context) -> None:
    for parameter in block.collect_params().values():
        if parameter._data is None and not parameter._deferred_init:
            parameter.initialize(mx.init.Zero(), ctx=ctx)


def _chunks(links: Sequence[Block], places: Sequence[int], head: Block, cuts: Set[int]) -> List[Tuple[int, Block]]:
    """(place of its first link, compiled links) of the different chunks that begin at `cuts`; in a long run of equal
    segments that are one link, two."""
    bounds, found = [*sorted(cuts), len(places)], {}
    for a, b in zip(bounds, bounds[1:]):
        chunk = tuple(place for i, place in enumerate(places[a:b]) if i < 2 or places[a + i - 2:a + i] != [place] * 2)
        if len(chunk) > 1 and chunk not in found:
            last = chunk[-1] == len(links) - 1
            found[chunk] = chunk[0], compile_chain([links[place] for place in chunk], head if last else None)
    return list(found.values())


def _add(found: Dict, rows: int, blocks: Sequence[Block], chunks: Sequence, row: Arrays, begun: int) -> None:
    """Puts into found[rows] what recorded blocks take: an array (blocks, the first five numbers of a Cost), and the
    bytes that workspaces have grown to since there were `begun`."""
    if rows in found:
        return
    x, label = _batch(row, rows)
    ctx, batch = label.context, sum(map(_bytes, [*x, label]))
    for _ in range(_TRIES):  # until workspaces have grown
        gc.collect()
        before = live(ctx)
        _pass(chunks, blocks, x, label)
        numbers = _forward(blocks, x, label)
        gc.collect()
        if live(ctx) == before:
            break
    found[rows] = np.array(numbers, float), before - begun - batch


def _batch(row: Arrays, rows: int) -> Tuple[Arrays, mx.nd.NDArray]:
    *x, label = (mx.nd.concat(*[array] * rows, dim=0) for array in row)
    return x, label


def _forward(blocks: Sequence[Block], x: Arrays, label: mx.nd.NDArray) -> List[Tuple[int, ...]]:
    """(input, output, kept, passing, frees) of every block, recorded one after the other."""
    ctx, found = label.context, []
    there = live(ctx)
    for block in blocks:
        last = block is blocks[-1]
        size = sum(map(_bytes, x))
        output, highest = peak(ctx, partial(_recorded, block, [*x, *([label] if last else [])]))
        held = live(ctx)
        x = list(output) if last else [output]
        del output  # and with the last reference goes an input that nobody needs
        after = live(ctx)
        found.append((size, _bytes(x[0]), held - there, highest - held, size if held - after > 0.9 * size else 0))
        there = after
    return found


def _backward(blocks: Sequence[Block], links: Sequence[Block], static: bool, x: Arrays,
              label: mx.nd.NDArray) -> List[Tuple[int, float]]:
    """For every link: what its backward takes besides the gradients of output and input, and seconds of both passes."""
    inputs, found, gradient = _inputs(blocks, x), [], None
    for place in reversed(range(len(blocks))):
        block = blocks[place]
        if static:
            block = compile_chain([links[place]], block._head, static=True)
        began = time.perf_counter()
        output = _output(block, inputs[place], place, label)
        held = taken = live(label.context)
        if place or _trainable(block):
            taken = peak(label.context, partial(output.backward, gradient))[1]
        found.append((taken - held, time.perf_counter() - began))
        gradient = inputs[place][0].grad
    return found[::-1]


def _pass(chunks: Sequence[Tuple[int, Block]], blocks: Sequence[Block], x: Arrays, label: mx.nd.NDArray) -> None:
    """Runs blocks and chunks forward and backward. Compiled together, segments can need more of a workspace: the order
    of elements that oneDNN has chosen stays from one to the next."""
    inputs = _inputs(blocks, x)
    for place, block in [*enumerate(blocks), *chunks]:
        output = _output(block, inputs[place], place, label)
        if place or _trainable(block):
            output.backward()


def _inputs(blocks: Sequence[Block], x: Arrays) -> List[Arrays]:
    """The input of every block."""
    inputs = [x]
    with autograd.train_mode():
        for block in blocks[:-1]:
            inputs.append([block(*inputs[-1])])
    return inputs


def _output(block: Block, inputs: Arrays, place: int, label: mx.nd.NDArray) -> mx.nd.NDArray:
    """What a recorded block returns, or its loss. The input gets a gradient, but not that of the network."""
    if place:
        inputs[0].attach_grad()
    output = _recorded(block, [*inputs, *([label] if block._head else [])])
    return output[0] if block._head else output


def _recorded(block: Block, arrays: Arrays):
    with autograd.record():
        return block(*arrays)


def _trainable(block: Block) -> bool:
    return any(parameter.grad_req != "null" for parameter in block.collect_params().values())


def _at(found: Dict[int, np.ndarray], size: int, rows: int) -> np.ndarray:
    """What was found for `size` rows, on the line through what was found for fewer (or through 0), at `rows`."""
    less = max((some for some in found if some < size), default=0)
    return found[size] + (found[size] - found.get(less, 0)) / (size - less) * (rows - size)


def _bytes(array: mx.nd.NDArray) -> int:
    return array.size * np.dtype(array.dtype).itemsize
