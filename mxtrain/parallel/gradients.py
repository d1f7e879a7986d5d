"""The gradients of one context, added up over its shards: by MXNet in float32, or exactly.

All kinds are used in this order: begin (a batch); for each shard before_shard, before the first of its passes is
recorded, and after_shard, after its backward, with after_group after that of each group, and other shards may come in
between; end; then the arrays in `parts` are summed over all contexts and processes; finish. Then `arrays` are the
gradients.
"""

from __future__ import annotations

from collections import deque
from typing import Dict, List, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Parameter

from mxtrain.parallel.exact import ExactSum

Arrays = List[mx.nd.NDArray]


class FloatGradients:
    """Gradients that MXNet writes, or adds up when there are several passes per batch.

    may_leave_out: whether a pass may give no gradient to a parameter, whose gradient must then be zero.
    """

    def __init__(self, parameters: Sequence[Parameter], ctx: mx.Context, several_passes: bool, may_leave_out: bool):
        for parameter in parameters:
            parameter.grad_req = "add" if several_passes else "write"
        self.arrays: Arrays = [parameter.grad(ctx) for parameter in parameters]
        self.parts = self.arrays
        self._always_clear = several_passes or may_leave_out

    def begin(self, busy: bool) -> None:
        """busy: whether this context has a shard in the batch."""
        if self._always_clear or not busy:
            _clear(self.arrays)

    def before_shard(self, shard: int) -> None:
        pass

    def after_group(self, shard: int, group: int) -> None:
        pass

    def after_shard(self, shard: int) -> None:
        pass

    def end(self) -> None:
        pass

    def parts_of(self, number: int) -> Arrays:
        """What is summed of a parameter, by its place among those of this context."""
        return [self.arrays[number]]

    def finish(self) -> None:
        pass


class ExactGradients:
    """Gradients whose sum has the same bits in any order of the shards.

    The passes of a context write to two buffers in turn: while the host adds up one on a CPU, the next pass runs. There
    are more when more shards have been recorded and not gone backward yet.
    numbers: how many numbers are added per element, over all contexts.
    """

    def __init__(self, parameters: Sequence[Parameter], ctx: mx.Context, numbers: int, may_leave_out: bool):
        for parameter in parameters:
            parameter.grad_req = "null"  # without arrays of its own
        self._weights = [parameter.data(ctx) for parameter in parameters]
        size = sum(weight.size for weight in self._weights)
        self._sum = ExactSum(size, ctx, numbers)
        self.parts = self._sum.parts
        self.arrays = views(self._sum.total, self._weights)
        self._size, self._ctx = size, ctx
        self._free = deque(self._buffer() for _ in range(2))
        self._open: Dict[int, tuple] = {}
        self._written = deque()
        self._may_leave_out = may_leave_out

    def begin(self, busy: bool) -> None:
        self._free.extend([*self._written, *self._open.values()])  # of a batch that failed, or left by an audit
        self._written.clear()
        self._open.clear()
        self._sum.clear()

    def before_shard(self, shard: int) -> None:
        if not self._free and self._written:
            self._add_oldest()
        buffer, views = self._open[shard] = self._free.popleft() if self._free else self._buffer()
        if self._may_leave_out:
            _clear([buffer])
        autograd.mark_variables(self._weights, views, "write")

    def after_group(self, shard: int, group: int) -> None:
        pass

    def after_shard(self, shard: int) -> None:
        self._written.append(self._open.pop(shard))

    def latest(self) -> mx.nd.NDArray:
        """The gradient of the pass that was run last: a vector (a copy), one parameter after the other."""
        return self._written[-1][0].copy()

    def end(self) -> None:
        while self._written:
            self._add_oldest()

    def parts_of(self, number: int) -> Arrays:
        start = sum(weight.size for weight in self._weights[:number])
        return [part[start:start + self._weights[number].size] for part in self.parts]

    def finish(self) -> None:
        self._sum.finish()

    def _buffer(self) -> tuple:
        buffer = mx.nd.zeros((self._size,), ctx=self._ctx)
        return buffer, views(buffer, self._weights)

    def _add_oldest(self) -> None:
        self._free.append(self._written.popleft())
        self._sum.add(0, self._free[-1][0])


def _clear(arrays: Arrays) -> None:
    if arrays:
        mx.nd.reset_arrays(*arrays, num_arrays=len(arrays))


def views(flat: mx.nd.NDArray, like: Arrays) -> Arrays:
    """The parts of a vector as arrays of given shapes, sharing its memory."""
    views, start = [], 0
    for array in like:
        views.append(flat[start:start + array.size].reshape(array.shape))
        start += array.size
    return views
