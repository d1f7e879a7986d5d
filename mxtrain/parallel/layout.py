"""Runs a global batch forward and backward over replicas of a network.

A batch of B' rows is cut into V shards; shard s holds rows s*B'//V to (s+1)*B'//V. Replica r of R runs the
shards r*V//R to (r+1)*V//R one after the other and adds up their gradients. So devices, accumulation and
micro-batches are one idea, and with exact sums the result does not depend on R.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Parameter

from mxtrain.models import plan
from mxtrain.parallel.gradients import ExactGradients, FloatGradients
from mxtrain.parallel.program import build
from mxtrain.parallel.statistics import ShardStatistics, moving_layers, unreached_by_backward
from mxtrain.seeds import mix

Arrays = List[mx.nd.NDArray]


def shard_bounds(rows: int, shards: int) -> List[Tuple[int, int]]:
    """First row and end of every shard of a batch."""
    return [(s * rows // shards, (s + 1) * rows // shards) for s in range(shards)]


def bounds_in(batch: Sequence, shards: int) -> List[Tuple[int, int]]:
    """First row and end of every shard in the arrays of a batch, some of whose rows may have been left out, or are read
    by other processes (mxtrain.data.loader.Batch): the shards are those of the whole batch, without these rows."""
    if not hasattr(batch, "positions") or batch.size == len(batch[-1]):
        return shard_bounds(len(batch[-1]), shards)
    return [tuple(np.searchsorted(batch.positions, pair).tolist()) for pair in shard_bounds(batch.size, shards)]


def assigned(replica: int, replicas: int, shards: int) -> range:
    """The shards that a replica runs."""
    return range(replica * shards // replicas, (replica + 1) * shards // replicas)


def part_of(rows: int, first: int, count: int, replicas: int, shards: int) -> Tuple[int, int]:
    """First row and end of what `count` replicas from number `first` on run of a batch."""
    own = assigned(first, replicas, shards).start, assigned(first + count - 1, replicas, shards).stop
    return own[0] * rows // shards, own[1] * rows // shards


class _Replica(NamedTuple):
    ctx: mx.Context
    gradients: Union[FloatGradients, ExactGradients]
    statistics: Optional[ShardStatistics]


class Layout:
    """Replicas of one network, one per context.

    net: initialized on all contexts, its shapes known.
    head: (output, label) -> [loss of each sample (rows,), report]; reports are handed out for metrics.
    evaluation_head: (output, label) -> an array whose first axis is the samples.
    shards, exact, recompute: see ParallelConfig.
    preprocess: block applied to the inputs on each device, before the network.
    sample: inputs of a row or two, preprocessed, on the first context; to check the network's plan with.
    rank, size: of this process, among those that have as many contexts each.

    After `forward_backward`, a communicator's `allreduce(layout.sums)` and `finish`, `gradients[r]` are the
    gradients of `parameters` on context r: sums over the samples of the whole batch.
    """

    def __init__(self, net: Block, head: Block, evaluation_head: Block, contexts: Sequence[mx.Context], shards: int,
                 exact: bool = False, recompute: str = "none", seed: int = 0, preprocess: Optional[Block] = None,
                 sample: Sequence[mx.nd.NDArray] = (), rank: int = 0, size: int = 1):
        self.contexts, self.shards, self.exact, self._seed = list(contexts), shards, exact, seed
        first, replicas = rank * len(contexts), size * len(contexts)
        self.first, self.replicas = first, replicas  # number of the first one here, and how many there are
        self._assigned = [assigned(first + r, replicas, shards) for r in range(len(contexts))]
        self._preprocess = preprocess
        # With a single shard MXNet's own running statistics are right as they are, where it is run.
        own_statistics = not exact and shards == replicas == 1 and recompute == "none"
        static = not exact and recompute == "none" and (own_statistics or not moving_layers(net))
        self._program = program = build(net, head, evaluation_head, recompute, static)
        if len(program.segments) > 1:
            plan.check(net, program.segments, *sample)
        owned = _each_once([_trainable(chunks) for chunks in program.groups])
        layers = _each_once([[] if own_statistics else _moving(chunks) for chunks in program.groups])
        self.parameters: List[Parameter] = sum(owned, [])
        several_passes = shards > replicas or len(program.groups) > 1
        # An imperative block may leave out a parameter, whose gradient of an earlier batch would then count again.
        may_leave_out = not all(isinstance(c.block, HybridBlock) for group in program.groups for c in group)
        self._input_gradient = unreached_by_backward(net)
        # Groups that are frozen from the input on need no backward (and MXNet refuses one that reaches nothing).
        self._first_group = 0 if self._input_gradient else next((i for i, own in enumerate(owned) if own), 0)
        self._replicas = [
            _Replica(ctx, ExactGradients(self.parameters, ctx, shards, may_leave_out) if exact
                     else FloatGradients(self.parameters, ctx, several_passes, may_leave_out),
                     ShardStatistics(layers, ctx, exact, shards) if any(layers) else None)
            for ctx in contexts]
        self.gradients = [replica.gradients.arrays for replica in self._replicas]
        self.watched_gradient = None
        # For each array to be reduced, its copies on all contexts.
        self.sums = [list(copies) for copies in zip(*(
            [*r.gradients.parts, *(r.statistics.parts if r.statistics else [])] for r in self._replicas))]

    def forward_backward(self, batch: Sequence, update: int, watched: Optional[int] = None) -> Arrays:
        """Runs the batch (*inputs, label), arrays on the host with the same number of rows.

        Returns the head's reports in the order of the shards. `update` names the random numbers to draw. The gradient
        of the shard `watched`, when it is run here and sums are exact, is kept as a vector in `watched_gradient`.
        """
        bounds = bounds_in(batch, self.shards)
        queues = self._queues(batch, bounds)
        for replica, queue in zip(self._replicas, queues):
            replica.gradients.begin(busy=bool(queue))
            if replica.statistics:
                replica.statistics.begin()
        reports = {}
        for replica, shard, arrays in self._in_turns(queues):
            reports[shard] = self._run_shard(replica, arrays, (self._seed, update, shard))
            if shard == watched:
                self.watched_gradient = replica.gradients.latest()
        for replica in self._replicas:
            replica.gradients.end()
            if replica.statistics:
                replica.statistics.end()
        return [reports[shard] for shard in sorted(reports)]

    def gradient_again(self, rows: Sequence, update: int, shard: int, context: int) -> mx.nd.NDArray:
        """The gradient of a shard, with exact sums, on one of the contexts: a vector, one parameter after the other.

        rows: (*inputs, label) of the shard. To be called between `forward_backward` and `finish`, where it changes
        nothing: what was summed stands, and the running statistics are about to be written.
        """
        replica = self._replicas[context]
        self._run_shard(replica, self._load(rows, 0, len(rows[-1]), replica.ctx), (self._seed, update, shard))
        return replica.gradients.latest()

    def owner(self, shard: int) -> int:
        """The replica that runs a shard, counted over all processes."""
        return next(r for r in range(self.replicas) if shard in assigned(r, self.replicas, self.shards))

    def shard_of(self, batch: Sequence, shard: int) -> List[np.ndarray]:
        """(*inputs, label) of a shard that is run here, on the host."""
        start, stop = bounds_in(batch, self.shards)[shard]
        return [(array.asnumpy() if isinstance(array, mx.nd.NDArray) else array)[start:stop] for array in batch]

    def rows_of(self, batch: Sequence) -> List[int]:
        """For every shard, how many rows of a batch are run here."""
        bounds = bounds_in(batch, self.shards)
        mine = {shard for own in self._assigned for shard in own}
        return [stop - start if shard in mine else 0 for shard, (start, stop) in enumerate(bounds)]

    def place_of(self, batch: Sequence) -> Tuple[int, np.ndarray, slice]:
        """(rows of the whole batch, which of them are run here, which rows of the arrays these are)."""
        bounds = [*bounds_in(batch, self.shards), (len(batch[-1]), None)]
        here = slice(bounds[self._assigned[0].start][0], bounds[self._assigned[-1].stop][0])
        if hasattr(batch, "positions"):
            return batch.size, batch.positions[here], here
        return len(batch[-1]), np.arange(here.start, here.stop), here

    def finish(self, shards_run: int) -> None:
        """Turns the sums over all contexts and processes into `gradients` and running statistics.

        shards_run: how many shards of the batch had rows, here and elsewhere.
        """
        for replica in self._replicas:
            replica.gradients.finish()
            if replica.statistics:
                replica.statistics.finish(shards_run)

    def wait(self) -> None:
        """Waits for all that was begun. Before running statistics are read: see `compile_chain` on static memory."""
        mx.nd.waitall()

    def evaluate(self, batch: Sequence) -> Arrays:
        """The evaluation head's outputs for a batch, in the order of the shards. Nothing is recorded or changed."""
        queues = self._queues(batch, bounds_in(batch, self.shards))
        outputs = {shard: self._program.inference(*arrays) for _, shard, arrays in self._in_turns(queues)}
        return [outputs[shard] for shard in sorted(outputs)]

    def _queues(self, batch, bounds) -> List[list]:
        """For each context, (shard, [*inputs, label]) of those of its shards that have rows.

        A context gets its rows in one copy and its shards are views; with exact sums each shard is sent by itself,
        into memory of its own, aligned as in any other layout. (Copying the views would do, but MXNet 1.9.1 fails to
        copy a view of an array that is in oneDNN's layout.)
        """
        if self.exact:
            batch = [array.asnumpy() if isinstance(array, mx.nd.NDArray) else array for array in batch]
        queues = []
        for r, ctx in enumerate(self.contexts):
            own = [s for s in self._assigned[r] if bounds[s][0] < bounds[s][1]]
            if self.exact or len(own) < 2:
                queues.append([(s, self._load(batch, *bounds[s], ctx)) for s in own])
            else:
                first = bounds[own[0]][0]
                arrays = self._load(batch, first, bounds[own[-1]][1], ctx)
                queues.append([(s, [array[bounds[s][0] - first:bounds[s][1] - first] for array in arrays])
                               for s in own])
        return queues

    def _in_turns(self, queues):
        """Yields (replica, shard, arrays), the contexts taking turns, so that all are kept busy."""
        for turn in range(max(map(len, queues))):
            for replica, queue in zip(self._replicas, queues):
                if turn < len(queue):
                    yield (replica, *queue[turn])

    def _load(self, batch, start, stop, ctx) -> Arrays:
        *inputs, label = batch
        return [*(input_to(x, start, stop, ctx, self._preprocess) for x in inputs), rows_to(label, start, stop, ctx)]

    def _run_shard(self, replica: _Replica, arrays: Arrays, key: Tuple[int, ...]) -> mx.nd.NDArray:
        """One forward and backward pass, group by group from the last; returns the head's report."""
        *x, label = arrays
        groups, kept, ctx, statistics = self._program.groups, [], replica.ctx, replica.statistics
        replica.gradients.before_shard()
        for chunks in self._program.ahead:
            kept.append(x)
            with autograd.train_mode():
                x = [_run(chunks, x, key, ctx)]
        for i in reversed(range(self._first_group, len(groups))):
            if i > self._first_group or self._input_gradient:
                x[0].attach_grad()
            if statistics:
                statistics.before_pass(i)
            with autograd.record():
                if i == len(groups) - 1:
                    loss, report = _run(groups[i], x, key, ctx, label)
                else:
                    output = _run(groups[i], x, key, ctx)
            if i == len(groups) - 1:
                loss.backward()
            else:
                output.backward(gradient)
            if statistics:
                statistics.after_pass(i)
            if i > self._first_group:
                gradient, x, output = x[0].grad, kept.pop(), None
                gradient.wait_to_read()  # MXNet makes arrays when it is asked to: those of the next group beside these
        replica.gradients.after_shard()
        return report


def _run(chunks, x, key, ctx, *label):
    for n, chunk in enumerate(chunks):
        if chunk.draws:
            mx.random.seed(mix(*key, chunk.segment), ctx=ctx)
        x = [chunk.block(*x, *(label if n == len(chunks) - 1 else ()))]
    return x[0]


def input_to(array, start: int, stop: int, ctx: mx.Context, preprocess: Optional[Block]) -> mx.nd.NDArray:
    """Rows start to stop of an input on a context, preprocessed there, or on the host where the block can do it."""
    if preprocess is None:
        return rows_to(array, start, stop, ctx)
    if ctx.device_type == "cpu" and isinstance(array, np.ndarray) and hasattr(preprocess, "on_host"):
        return preprocess.on_host(array[start:stop], ctx)
    return preprocess(rows_to(array, start, stop, ctx))


def rows_to(array, start: int, stop: int, ctx: mx.Context) -> mx.nd.NDArray:
    """Rows start to stop of an array on the host, on a context, in one copy (or none)."""
    if not isinstance(array, mx.nd.NDArray):
        return mx.nd.array(array[start:stop], ctx=ctx, dtype=array.dtype)
    rows = array if stop - start == len(array) else array[start:stop]
    return rows.as_in_context(ctx)


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
