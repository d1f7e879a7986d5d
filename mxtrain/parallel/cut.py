"""Where a network is cut into the stages of a pipeline: by hand, or by what each segment costs."""

from __future__ import annotations

import time
from itertools import accumulate
from typing import Callable, List, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block

from mxtrain.errors import UserError
from mxtrain.parallel.program import compile_chain
from mxtrain.parallel.statistics import statistics_kept


def check(stages: int, segments: int, name: str) -> None:
    """Raises UserError where a stage would be empty. name: of the network."""
    if stages > 1 and segments == 1:
        raise UserError(f"--pp {stages}: {name} offers no segments; a HybridSequential, gluoncv's ResNets and networks "
                        "with a plan() do")
    if stages > segments:
        raise UserError(f"--pp {stages}: {name} has {segments} segments, and each stage needs one")


def by_hand(firsts: Sequence[int], segments: int, stages: int, name: str) -> List[int]:
    """The first segment of each stage, given those of all stages but the first (--cut).

    Raises UserError unless each stage has a segment. name: of the network.
    """
    check(stages, segments, name)
    starts = [0, *firsts]
    if len(starts) != stages or any(b <= a for a, b in zip(starts, [*firsts, segments])):
        raise UserError(f"--cut {' '.join(map(str, firsts))}: must be the first segment of each stage after the first: "
                        f"{stages - 1} increasing numbers from 1 to {segments - 1}, since --pp is {stages} and {name} "
                        f"has {segments} segments")
    return starts


def balanced(costs: Sequence[float], stages: int, name: str, barred: Sequence[int] = ()) -> List[int]:
    """The first segment of each stage, such that the dearest stage is as cheap as can be.

    Of all such cuts it is that of the least sum of squares of the stages' costs, then the first in order.
    costs: of each segment, none negative. barred: segments that no stage may begin with. name: of the network.
    Raises UserError where a stage would be empty.
    """
    check(stages, len(costs), name)
    free = [i for i in range(len(costs)) if i not in barred]
    if stages > len(free):
        raise UserError(f"--pp {stages}: {name} has {len(costs)} segments, of which {len(free)} can begin a stage with "
                        f"--exact; {unlike(barred)}")
    before = [0.0, *accumulate(costs)]
    sums = [before[i] for i in [*free, len(costs)]]
    limit, _ = _least(sums, stages, max)
    _, starts = _least(sums, stages, lambda total, cost: total + (cost ** 2 if cost <= limit else float("inf")))
    return [free[i] for i in starts]


def unlike(firsts: Sequence[int]) -> str:
    """What is wrong with stages that begin with these segments: see parallel.rounding."""
    numbers = ", ".join(map(str, sorted(firsts)))
    return (f"a cut in front of segment{'s' * (len(firsts) > 1)} {numbers} has this machine round otherwise than on one "
            "device")


def _least(sums: Sequence[float], stages: int, join: Callable[[float, float], float]) -> Tuple[float, List[int]]:
    """(value, starts) of the cut of least value: that of no stages is 0, and join(value, cost) adds a stage.

    sums: sums[i] is what the segments before i cost.
    """
    segments = len(sums) - 1
    best = {0: (0.0, [])}  # number of segments in the stages so far -> (value, starts)
    for stage in range(1, stages + 1):
        ends = range(stage, segments - (stages - stage) + 1)
        best = {end: min((join(value, sums[end] - sums[start]), [*starts, start])
                         for start, (value, starts) in best.items() if start < end) for end in ends}
    return best[segments]


def measure(segments: Sequence[Block], inputs: Sequence[mx.nd.NDArray], label: mx.nd.NDArray, head: Block,
            ctx: mx.Context, input_gradient: bool = False) -> List[float]:
    """Seconds that forward and backward of each segment take: the least of three, after one to warm up.

    Gradients and running statistics keep their values; the state of the random generator changes.

    segments: of a network that is initialized on ctx, its shapes known. inputs, label: a few rows, on ctx. head:
    (output, label) -> [loss of each sample, report]; it counts with the last segment. input_gradient: whether training
    asks for a gradient of the inputs. Without it, segments before the first that has something to train have no
    backward.
    """
    costs, x, reached = [], list(inputs), input_gradient
    for i, segment in enumerate(segments):
        last = i == len(segments) - 1
        chain = compile_chain([segment], head if last else None)
        weights = [p for p in chain.collect_params().values() if p.grad_req != "null"]
        data, kept = [p.data(ctx) for p in weights], [p.grad(ctx) for p in weights]
        requests = [p.grad_req for p in weights]
        autograd.mark_variables(data, [mx.nd.zeros_like(gradient) for gradient in kept], requests)
        with statistics_kept([chain], ctx):
            seconds, output = _time(chain, [*x, label] if last else x, reached, reached or bool(weights))
        autograd.mark_variables(data, kept, requests)
        costs.append(seconds)
        x, reached = [output], reached or bool(weights)
    return costs


def _time(block: Block, inputs: Sequence[mx.nd.NDArray], input_gradient: bool,
          backward: bool) -> Tuple[float, mx.nd.NDArray]:
    """(seconds of forward and backward, output without its graph)"""
    first = inputs[0].detach()  # so that it can be marked here
    if input_gradient:
        first.attach_grad()
    times = []
    for _ in range(4):
        mx.nd.waitall()
        begin = time.perf_counter()
        with autograd.record():
            output = block(first, *inputs[1:])
        main = output[0] if isinstance(output, (list, tuple)) else output  # a head's loss
        if backward:
            main.backward()
        mx.nd.waitall()
        times.append(time.perf_counter() - begin)
    return min(times[1:]), main.detach()
