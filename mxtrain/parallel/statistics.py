"""Running statistics of batch normalization when a batch is normalized shard by shard.

Each shard is normalized by its own statistics. The running ones move once per update, by the mean over the
shards, so that they do not depend on which replica ran which shard. To see what a shard adds, its layers' running
arrays are set to zero before its recorded pass and read after its backward, since MXNet's operator writes
(1 - momentum) * statistic into them in backward on a CPU and in forward with cuDNN.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, List, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, Parameter, nn

from mxtrain.parallel.exact import ExactSum, FloatSum


def moving_layers(block: Block) -> List[nn.BatchNorm]:
    """The batch normalizations below a block whose running statistics follow the batches, each once."""
    found = {}

    def visit(child):
        if isinstance(child, nn.BatchNorm) and not child._kwargs["use_global_stats"]:
            found[id(child)] = child

    block.apply(visit)
    return list(found.values())


def running_parameters(block: Block) -> List[Parameter]:
    """Those of `moving_layers`: mean and variance of each."""
    return [parameter for layer in moving_layers(block) for parameter in (layer.running_mean, layer.running_var)]


@contextmanager
def statistics_kept(blocks: Sequence[Block], ctx: mx.Context) -> Iterator[List[mx.nd.NDArray]]:
    """Gives the running statistics of some blocks on a context, and sets them back at the end."""
    arrays = [parameter.data(ctx) for block in blocks for parameter in running_parameters(block)]
    values = [array.copy() for array in arrays]
    try:
        yield arrays
    finally:
        for array, value in zip(arrays, values):
            value.copyto(array)


class RunningStatistics:
    """The running arrays of some layers on one context, as one vector."""

    def __init__(self, layers: List[nn.BatchNorm], ctx: mx.Context):
        pairs = [(p.data(ctx), layer._kwargs["momentum"])
                 for layer in layers for p in (layer.running_mean, layer.running_var)]
        self._arrays = [array for array, _ in pairs]
        self._starts = np.cumsum([0] + [array.size for array in self._arrays])
        self.size = int(self._starts[-1])
        momentum = np.concatenate([np.full(array.size, m, "float32") for array, m in pairs])
        self._momentum = mx.nd.array(momentum, ctx=ctx)
        self._before = None

    def begin(self) -> None:
        """Keeps the values from before an update."""
        self._before = self.read()

    def clear(self) -> None:
        mx.nd.reset_arrays(*self._arrays, num_arrays=len(self._arrays))

    def read(self) -> mx.nd.NDArray:
        """The arrays as one vector (a copy)."""
        return mx.nd.concat(*self._arrays, dim=0)

    def finish(self, total: mx.nd.NDArray, shards: int) -> None:
        """Writes the new running values, given the sum over `shards` shards of what each added to zero."""
        values = self._momentum * self._before + total / shards
        for array, a, b in zip(self._arrays, self._starts, self._starts[1:]):
            values[int(a):int(b)].copyto(array)


class ShardStatistics:
    """The running statistics of one context, collected shard by shard and group by group of the layers.

    Used in this order: begin (a batch); before_pass and after_pass around the recorded pass of each group of each
    shard; end; then the arrays in `parts` are summed over all contexts and processes; finish.
    shards: number of shards of a batch, over all contexts.
    """

    def __init__(self, layers: List[List[nn.BatchNorm]], ctx: mx.Context, exact: bool, shards: int):
        self._groups = [RunningStatistics(group, ctx) if group else None for group in layers]
        sizes = [group.size if group else 0 for group in self._groups]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._sum = ExactSum(sum(sizes), ctx, shards) if exact else FloatSum(sum(sizes), ctx)
        self.parts = self._sum.parts
        self._to_add = []

    def begin(self) -> None:
        self._to_add = []
        self._sum.clear()
        for group in filter(None, self._groups):
            group.begin()

    def before_pass(self, group: int) -> None:
        if self._groups[group]:
            self._groups[group].clear()

    def after_pass(self, group: int) -> None:
        if self._groups[group]:
            self._to_add.append((self._starts[group], self._groups[group].read()))

    def end(self) -> None:
        # Not before: on a CPU an exact sum waits for what it adds, and the passes should follow without a pause.
        for start, vector in self._to_add:
            self._sum.add(start, vector)

    def finish(self, shards: int) -> None:
        """shards: how many had rows."""
        total = self._sum.finish()
        for group, start in zip(self._groups, self._starts):
            if group:
                group.finish(total[start:start + group.size], shards)


def unreached_by_backward(net: Block) -> bool:
    """Whether some moving statistics need a gradient for the network's input to be seen.

    On a CPU they are written in backward, and MXNet leaves out the backward of an operator that has nothing
    trainable in or before it; a normalization of the input without scale and shift, as in ResNet V2, is one.
    """
    trainable_before = False
    layers = {id(layer): layer for layer in moving_layers(net)}
    for block in _in_order(net):
        trainable_before |= any(p.grad_req != "null" for p in block._reg_params.values())
        if id(block) in layers and not trainable_before:
            return True
    return False


def _in_order(block: Block):
    yield block
    for child in block._children.values():
        yield from _in_order(child)
