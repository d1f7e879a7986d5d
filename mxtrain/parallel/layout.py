"""Runs a global batch forward and backward over replicas of a network.

A batch of B' rows is cut into V shards; shard s holds rows s*B'//V to (s+1)*B'//V. Replica r of R runs the
shards r*V//R to (r+1)*V//R one after the other and adds up their gradients. So devices, accumulation and
micro-batches are one idea, and with exact sums the result does not depend on R.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Parameter

from mxtrain.models import plan
from mxtrain.parallel.exact import ExactSum, FloatSum
from mxtrain.parallel.program import build
from mxtrain.parallel.statistics import RunningStatistics, moving_layers, unreached_by_backward
from mxtrain.seeds import mix

Arrays = List[mx.nd.NDArray]


def shard_bounds(rows: int, shards: int) -> List[Tuple[int, int]]:
    """First row and end of every shard of a batch."""
    return [(s * rows // shards, (s + 1) * rows // shards) for s in range(shards)]


def assigned(replica: int, replicas: int, shards: int) -> range:
    """The shards that a replica runs."""
    return range(replica * shards // replicas, (replica + 1) * shards // replicas)


class _Share(NamedTuple):
    """What one group of chunks has on one context."""

    gradients: Arrays
    start: int  # place of its first gradient in the vector of all gradients
    statistics: Optional[RunningStatistics]
    statistics_start: int


class Layout:
    """Replicas of one network, one per context.

    net: initialized on all contexts, its shapes known.
    head: (output, label) -> [loss of each sample (rows,), report]; reports are handed out for metrics.
    evaluation_head: (output, label) -> an array whose first axis is the samples.
    shards, exact, recompute: see ParallelConfig.
    preprocess: block applied to the inputs on each device, before the network.
    sample: inputs of a row or two, preprocessed, on the first context; to check the network's plan with.

    After `forward_backward`, a communicator's `allreduce(layout.sums)` and `finish`, `gradients[r]` are the
    gradients of `parameters` on context r: sums over the samples of the whole batch.
    """

    def __init__(self, net: Block, head: Block, evaluation_head: Block, contexts: Sequence[mx.Context], shards: int,
                 exact: bool = False, recompute: str = "none", seed: int = 0, preprocess: Optional[Block] = None,
                 sample: Sequence[mx.nd.NDArray] = ()):
        self.contexts, self.shards, self.exact, self._seed = list(contexts), shards, exact, seed
        self._preprocess = preprocess
        # With a single shard MXNet's own running statistics are right as they are.
        own_statistics = not exact and shards == 1 and recompute == "none"
        static = recompute == "none" and (own_statistics or not moving_layers(net))
        self._program = program = build(net, head, evaluation_head, recompute, static)
        if len(program.segments) > 1:
            plan.check(net, program.segments, *sample)
        owned = _each_once([_trainable(chunks) for chunks in program.groups])
        layers = _each_once([[] if own_statistics else _moving(chunks) for chunks in program.groups])
        self.parameters: List[Parameter] = sum(owned, [])
        one_pass = shards <= len(contexts) and len(program.groups) == 1
        self._adds = not exact and not one_pass
        for parameter in self.parameters:
            parameter.grad_req = "add" if self._adds else "write"
        # An imperative block may leave out a parameter, whose gradient of an earlier batch would then count again.
        self._may_leave_out = not all(isinstance(c.block, HybridBlock) for group in program.groups for c in group)
        self._input_gradient = unreached_by_backward(net)
        self._shares = [_shares(owned, layers, ctx) for ctx in self.contexts]
        self._statistics_sums, self._gradient_sums = [], []
        if any(layers):
            size = sum(share.statistics.size for share in self._shares[0] if share.statistics)
            self._statistics_sums = [ExactSum(size, ctx, shards) if exact else FloatSum(size, ctx)
                                     for ctx in self.contexts]
        if exact:
            size = sum(p.data(self.contexts[0]).size for p in self.parameters)
            self._gradient_sums = [ExactSum(size, ctx, shards) for ctx in self.contexts]
            self.gradients = [_views(sums.total, self.parameters) for sums in self._gradient_sums]
        else:
            self.gradients = [[p.grad(ctx) for p in self.parameters] for ctx in self.contexts]
        self.sums = self._arrays_to_reduce()

    def _arrays_to_reduce(self) -> List[Arrays]:
        """For each array, its copies on all contexts."""
        over_contexts = [sum((sums.parts for sums in per_context), []) for per_context in
                         zip(*(s for s in (self._gradient_sums, self._statistics_sums) if s))]
        if not self.exact:
            over_contexts = [gradients + (over_contexts[r] if over_contexts else [])
                             for r, gradients in enumerate(self.gradients)]
        return [list(copies) for copies in zip(*over_contexts)]

    def forward_backward(self, batch: Sequence, update: int) -> Arrays:
        """Runs the batch (*inputs, label), arrays on the host with the same number of rows.

        Returns the head's reports in the order of the shards. `update` names the random numbers to draw.
        """
        bounds = shard_bounds(len(batch[-1]), self.shards)
        self._clear(bounds)
        reports = {}
        for replica, shard, arrays in self._pieces(batch, bounds):
            reports[shard] = self._run_shard(replica, arrays, (self._seed, update, shard))
        self._shards_run = len(reports)
        return [reports[shard] for shard in sorted(reports)]

    def finish(self) -> None:
        """Turns the sums over all contexts into `gradients` and running statistics."""
        for sums in self._gradient_sums:
            sums.finish()
        for shares, sums in zip(self._shares, self._statistics_sums):
            total = sums.finish()
            for share in shares:
                if share.statistics:
                    a = share.statistics_start
                    share.statistics.finish(total[a:a + share.statistics.size], self._shards_run)

    def evaluate(self, batch: Sequence) -> Arrays:
        """The evaluation head's outputs for a batch, in the order of the shards. Nothing is recorded or changed."""
        outputs = {}
        for _, shard, arrays in self._pieces(batch, shard_bounds(len(batch[-1]), self.shards)):
            outputs[shard] = self._program.inference(*arrays)
        return [outputs[shard] for shard in sorted(outputs)]

    def _clear(self, bounds) -> None:
        for r, shares in enumerate(self._shares):
            gradients = [g for share in shares for g in share.gradients]
            busy = any(a < b for a, b in (bounds[s] for s in assigned(r, len(self.contexts), self.shards)))
            if gradients and not self.exact and (self._adds or self._may_leave_out or not busy):
                mx.nd.reset_arrays(*gradients, num_arrays=len(gradients))
            for share in shares:
                if share.statistics:
                    share.statistics.begin()
        for sums in [*self._gradient_sums, *self._statistics_sums]:
            sums.clear()

    def _pieces(self, batch, bounds):
        """Yields (replica, shard, [*inputs, label] on its context) of every shard that has rows.

        Each context gets its rows in one copy. Contexts take turns, so that all are kept busy.
        """
        queues = []
        for r, ctx in enumerate(self.contexts):
            own = [s for s in assigned(r, len(self.contexts), self.shards) if bounds[s][0] < bounds[s][1]]
            queues.append(_cut(self._load(batch, bounds[own[0]][0], bounds[own[-1]][1], ctx), bounds, own, self.exact)
                          if own else [])
        for turn in range(max(map(len, queues))):
            for r, queue in enumerate(queues):
                if turn < len(queue):
                    yield (r, *queue[turn])

    def _load(self, batch, start, stop, ctx) -> Arrays:
        arrays = [rows_to(array, start, stop, ctx) for array in batch]
        if self._preprocess is not None:
            arrays[:-1] = [self._preprocess(array) for array in arrays[:-1]]
        return arrays

    def _run_shard(self, replica: int, arrays: Arrays, key: Tuple[int, ...]) -> mx.nd.NDArray:
        """One forward and backward pass, group by group from the last; returns the head's report."""
        ctx, (*x, label) = self.contexts[replica], arrays
        groups, kept = self._program.groups, []
        for chunks in self._program.ahead:
            kept.append(x)
            with autograd.train_mode():
                x = [_run(chunks, x, key, ctx)]
        for i in reversed(range(len(groups))):
            share = self._shares[replica][i]
            if i or self._input_gradient:
                x[0].attach_grad()
            self._before_recording(share)
            with autograd.record():
                if i == len(groups) - 1:
                    loss, report = _run(groups[i], x, key, ctx, label)
                else:
                    output = _run(groups[i], x, key, ctx)
            if i == len(groups) - 1:
                loss.backward()
            else:
                output.backward(gradient)
            self._after_backward(replica, share)
            if i:
                gradient, x = x[0].grad, kept[i - 1]
        return report

    def _before_recording(self, share: _Share) -> None:
        if share.statistics:
            share.statistics.clear()
        if self.exact and self._may_leave_out and share.gradients:
            mx.nd.reset_arrays(*share.gradients, num_arrays=len(share.gradients))

    def _after_backward(self, replica: int, share: _Share) -> None:
        if self.exact and share.gradients:
            flat = mx.nd.concat(*[g.reshape((-1,)) for g in share.gradients], dim=0)
            self._gradient_sums[replica].add(share.start, flat)
        if share.statistics:
            self._statistics_sums[replica].add(share.statistics_start, share.statistics.read())


def _run(chunks, x, key, ctx, *label):
    for n, chunk in enumerate(chunks):
        if chunk.draws:
            mx.random.seed(mix(*key, chunk.segment), ctx=ctx)
        x = [chunk.block(*x, *(label if n == len(chunks) - 1 else ()))]
    return x[0]


def rows_to(array, start: int, stop: int, ctx: mx.Context) -> mx.nd.NDArray:
    """Rows start to stop of an array on the host, on a context, in one copy (or none)."""
    if not isinstance(array, mx.nd.NDArray):
        return mx.nd.array(array[start:stop], ctx=ctx, dtype=array.dtype)
    rows = array if stop - start == len(array) else array[start:stop]
    return rows.as_in_context(ctx)


def _cut(arrays: Arrays, bounds, own: Sequence[int], fresh: bool) -> List[Tuple[int, Arrays]]:
    """The shards of one context's rows. fresh: in memory of their own, aligned as in any other layout."""
    if len(own) == 1:
        return [(own[0], arrays)]
    first = bounds[own[0]][0]
    pieces = []
    for s in own:
        rows = [array[bounds[s][0] - first:bounds[s][1] - first] for array in arrays]
        pieces.append((s, [array.copy() for array in rows] if fresh else rows))
    return pieces


def _trainable(chunks) -> List[Parameter]:
    return [p for chunk in chunks for p in chunk.block.collect_params().values() if p.grad_req != "null"]


def _moving(chunks):
    return [layer for chunk in chunks for layer in moving_layers(chunk.block)]


def _each_once(lists: List[list]) -> List[list]:
    """The lists, without what stood in one of them before."""
    seen, kept = set(), []
    for items in lists:
        kept.append([])
        for item in items:
            if id(item) not in seen:
                seen.add(id(item))
                kept[-1].append(item)
    return kept


def _shares(owned, layers, ctx) -> List[_Share]:
    shares, start, statistics_start = [], 0, 0
    for parameters, moving in zip(owned, layers):
        statistics = RunningStatistics(moving, ctx) if moving else None
        shares.append(_Share([p.grad(ctx) for p in parameters], start, statistics, statistics_start))
        start += sum(g.size for g in shares[-1].gradients)
        statistics_start += statistics.size if statistics else 0
    return shares


def _views(flat: mx.nd.NDArray, parameters) -> Arrays:
    """The parts of a vector as arrays of the parameters' shapes, sharing its memory."""
    views, start = [], 0
    for p in parameters:
        size = p.data(flat.context).size
        views.append(flat[start:start + size].reshape(p.shape))
        start += size
    return views
