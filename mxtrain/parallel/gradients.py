"""The gradients of one context, added up over its shards: by MXNet in float32, or exactly.

Both kinds are used in this order: begin (a batch); before_shard and after_shard around each pass; end; then the
arrays in `parts` are summed over all contexts and processes; finish. Then `arrays` are the gradients.
"""

from __future__ import annotations

from collections import deque
from typing import List, Sequence

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

    def before_shard(self) -> None:
        pass

    def after_shard(self) -> None:
        pass

    def end(self) -> None:
        pass

    def finish(self) -> None:
        pass


class ExactGradients:
    """Gradients whose sum has the same bits in any order of the shards.

    The passes of a context write to two buffers in turn: while the host adds up one on a CPU, the next pass runs.
    shards: number of shards of a batch, over all contexts.
    """

    def __init__(self, parameters: Sequence[Parameter], ctx: mx.Context, shards: int, may_leave_out: bool):
        for parameter in parameters:
            parameter.grad_req = "write"
        self._weights = [parameter.data(ctx) for parameter in parameters]
        size = sum(weight.size for weight in self._weights)
        self._sum = ExactSum(size, ctx, shards)
        self.parts = self._sum.parts
        self.arrays = views(self._sum.total, self._weights)
        buffers = [mx.nd.zeros((size,), ctx=ctx) for _ in range(2)]
        self._free = deque((buffer, views(buffer, self._weights)) for buffer in buffers)
        self._written = deque()
        self._may_leave_out = may_leave_out

    def begin(self, busy: bool) -> None:
        self._free.extend(self._written)  # left by a batch that could not be summed, or by an audit
        self._written.clear()
        self._sum.clear()

    def before_shard(self) -> None:
        if not self._free:
            self._add_oldest()
        buffer, views = self._free[0]
        if self._may_leave_out:
            _clear([buffer])
        autograd.mark_variables(self._weights, views, "write")

    def after_shard(self) -> None:
        self._written.append(self._free.popleft())

    def latest(self) -> mx.nd.NDArray:
        """The gradient of the pass that was run last: a vector (a copy), one parameter after the other."""
        return self._written[-1][0].copy()

    def end(self) -> None:
        while self._written:
            self._add_oldest()

    def finish(self) -> None:
        self._sum.finish()

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
