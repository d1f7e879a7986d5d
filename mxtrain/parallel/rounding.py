"""Whether the cuts of a network into stages change the bits of what is computed, found by trying.

On CPUs oneDNN keeps what a convolution gives in an order of its own, which is lost on the way to another device; and
batch normalization, forward and backward, adds up in the order in which it finds its input. So a cut behind a
convolution, or even a layer further on, may round otherwise than the same network on one device.
"""

from __future__ import annotations

from typing import List, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block

from mxtrain.parallel.program import compile_chain
from mxtrain.parallel.statistics import statistics_kept


def rounding_cuts(segments: Sequence[Block], starts: Sequence[int], inputs: Sequence[mx.nd.NDArray],
                  label: mx.nd.NDArray, head: Block) -> List[int]:
    """Those of `starts`, the first segment of each stage, in front of which a cut changes bits.

    Gradients and running statistics keep their values; the state of the random generator changes. segments: of a
    network that is initialized on one context, its shapes known. inputs, label: a few rows, there. head: (output,
    label) -> [loss of each sample, report].
    """
    last = len(segments) - 1
    chains = [compile_chain([segment], head if i == last else None) for i, segment in enumerate(segments)]
    parameters = [p for chain in chains[:-1] for p in chain.collect_params().values()]
    parameters += chains[-1].collect_params().values()
    trained = [p for p in dict.fromkeys(parameters) if p.grad_req != "null"]
    data, kept, requests = ([p.data() for p in trained], [p.grad() for p in trained], [p.grad_req for p in trained])

    def bits(own_starts: Sequence[int]) -> List[bytes]:
        gradients = [mx.nd.zeros_like(array) for array in data]
        autograd.mark_variables(data, gradients, "write")
        with statistics_kept(chains, label.context) as moving:
            loss = _pass(chains, own_starts, inputs, label)
            return [array.asnumpy().tobytes() for array in (loss, *gradients, *moving)]

    try:
        expected = bits([0])
        if bits(starts) == expected:
            return []
        return [start for start in starts[1:] if bits([0, start]) != expected] or list(starts[1:])
    finally:
        autograd.mark_variables(data, kept, requests)


def _pass(chains: Sequence[Block], starts: Sequence[int], inputs: Sequence[mx.nd.NDArray],
          label: mx.nd.NDArray) -> mx.nd.NDArray:
    """The loss of each sample; runs forward and backward, and copies what goes from stage to stage."""
    x, passed = list(inputs), []
    for start, end in zip(starts, [*starts[1:], len(chains)]):
        x = [_copy(array) for array in x]
        if start:
            x[0].attach_grad()
        trains = start > 0 or any(p.grad_req != "null" for chain in chains[:end]
                                  for p in chain.collect_params().values())
        first = x[0]
        with autograd.record():
            for i in range(start, end):
                mx.random.seed(i, ctx=first.context)
                output = chains[i](*x, *([label] if i == len(chains) - 1 else []))
                x = [output[0] if isinstance(output, (list, tuple)) else output]
        passed.append((first, x[0], trains))
    gradient = None
    for first, output, trains in reversed(passed):
        if trains:
            output.backward(gradient)
        gradient = first.grad if first.grad is None else _copy(first.grad)
    return passed[-1][1]


def _copy(array: mx.nd.NDArray) -> mx.nd.NDArray:
    """A copy in the plain order of rows."""
    return mx.nd.array(array.asnumpy(), ctx=array.context, dtype=array.dtype)
