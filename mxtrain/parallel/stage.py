"""A stage of the network on one context: runs shards forward and backward."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Parameter

from mxtrain.parallel.gathering import Gathering
from mxtrain.parallel.program import Chunk, Stage
from mxtrain.parallel.statistics import ShardStatistics
from mxtrain.seeds import mix

Arrays = List[mx.nd.NDArray]


class Backward(NamedTuple):
    """What of a stage takes part in backward."""

    first_group: Optional[int]
    """Groups before it are frozen from the network's input on and need none (and MXNet refuses one that reaches
    nothing); None where all are."""
    input_gradient: bool
    """Whether a gradient is taken for the stage's input, too."""


def backward_by(trained: List[List[List[Parameter]]], input_gradient: bool) -> List[Backward]:
    """What of each stage takes part in backward. trained: of stages, by groups. input_gradient: whether some running
    statistics need one for the network's input."""
    starts = [sum(map(len, trained[:stage])) for stage in range(len(trained))]
    groups = [group for stage in trained for group in stage]
    first = 0 if input_gradient else next((i for i, own in enumerate(groups) if own), 0)
    return [Backward(max(0, first - start) if first < start + len(own) else None,
                     input_gradient if start == 0 else first < start)
            for start, own in zip(starts, trained)]


class StageRunner:
    """Runs shards through a stage. Between forward and backward of a shard may be those of others.

    gradients: of parallel.gradients. statistics: None where the stage has none to collect. untrained: parameters of the
    stage that get no gradient. alone: whether this process has no other context. weights: what brings the weights of a
    group that is run; None where they are there. Groups are all run again in backward, then.
    """

    def __init__(self, stage: Stage, ctx: mx.Context, gradients, statistics: Optional[ShardStatistics],
                 backward: Backward, untrained: Sequence[Parameter] = (), alone: bool = True,
                 weights: Optional[Gathering] = None):
        self.ctx, self.gradients, self.statistics = ctx, gradients, statistics
        self._groups, self._inference, self._backward = stage.groups, stage.inference, backward
        self._untrained, self._weights = list(untrained), weights
        self._kept: Dict[int, List[tuple]] = {}
        # Who waits for a group's backward saves memory. GPUs of one process would wait for each other.
        self._waits = ctx.device_type == "cpu" or alone
        # cuDNN writes running statistics in forward. Elsewhere a look at them in between would find zeros.
        self._look_twice = ctx.device_type == "gpu"

    def begin(self, busy: bool) -> None:
        """To be called before the first shard of a batch; busy: whether there is one."""
        self._kept.clear()
        self.gradients.begin(busy)
        if self.statistics:
            self.statistics.begin()

    def end(self) -> None:
        """To be called after the last shard of a batch."""
        self.gradients.end()
        if self.statistics:
            self.statistics.end()
        if self._weights:
            self._weights.end()

    def finish(self, shards_run: int) -> None:
        """To be called when the sums over all contexts and processes are there; see Layout.finish."""
        self.gradients.finish()
        if self.statistics:
            self.statistics.finish(shards_run)

    def forward(self, shard: int, x: Arrays, label: Arrays, key: Tuple[int, ...]) -> Optional[mx.nd.NDArray]:
        """The stage's output, None of the last stage, which has the label.

        x: the network's inputs, or the output of the stage before. key: (seed, update, shard), for what is drawn.
        """
        kept, opened = [], False
        for i, group in enumerate(self._groups):
            last = label if i == len(self._groups) - 1 else []
            if group.ahead is not None:
                kept.append((x if self._needs_backward(i) else None, None))
                if self._weights and group.ahead:
                    self._weights.open(i)
                with autograd.train_mode():
                    x = [run(group.ahead, x, key, self.ctx)]
                if self._weights and group.ahead:
                    self._weights.close(i)
            elif self._needs_backward(i):
                if not opened:
                    self.gradients.before_shard(shard)
                    opened = True
                outputs = self._record(i, x, last, key)
                if self._look_twice and self.statistics:
                    self.statistics.after_pass(i)
                kept.append((x, outputs))
                self._separate()
                x = [_output(outputs).detach()]
            else:
                kept.append((None, None))
                with autograd.train_mode():
                    x = [_output(run(group.recorded, x, key, self.ctx, *last))]
        self._kept[shard] = kept
        return None if label else x[0]

    def backward(self, shard: int, gradient: Optional[mx.nd.NDArray], label: Arrays, key: Tuple[int, ...]):
        """(gradient of the stage's input or None, the head's report in the last stage, else None).

        gradient: of the stage's output; None in the last stage, and where nothing here needs it.
        """
        kept, report, first = self._kept.pop(shard), None, self._backward.first_group
        if first is None:
            return None, None
        if self._groups[first].ahead is not None:
            self.gradients.before_shard(shard)
        for i in reversed(range(first, len(self._groups))):
            last = label if i == len(self._groups) - 1 else []
            x, outputs = kept[i]
            kept[i] = None
            if self._weights:
                self.gradients.before_group(shard, i, self._weights.open(i))
            if outputs is None:
                outputs = self._record(i, x, last, key)
            elif self.statistics:
                self.statistics.before_pass(i)
            if last:
                outputs, report = outputs
                outputs.backward()
            else:
                outputs.backward(gradient)
            if self.statistics:
                self.statistics.after_pass(i)
            if self._weights:
                self._weights.close(i)
            self.gradients.after_group(shard, i)
            gradient = x[0].grad
            del outputs, x
            if self._waits and gradient is not None and self._groups[i].ahead is not None:
                gradient.wait_to_read()  # MXNet makes arrays when it is asked to: those of the next group beside these
        self.gradients.after_shard(shard)
        return (gradient if self._backward.input_gradient else None), report

    def infer(self, x: Arrays, label: Arrays) -> mx.nd.NDArray:
        """The stage's output in predict mode; the last stage has the label, and gives the evaluation head's."""
        with autograd.pause(train_mode=False):
            for i, block in enumerate(self._inference):
                if self._weights:
                    self._weights.open(i, predict=True)
                x = [block(*x, *(label if i == len(self._inference) - 1 else []))]
                if self._weights:
                    self._weights.close(i, x[0])
        return x[0]

    def end_inference(self) -> None:
        """To be called after the last shard of a batch."""
        if self._weights:
            self._weights.end()

    def stand_by(self, kind: str) -> None:
        """Takes part in what processes do together for a shard that only others have. kind: what they do with it,
        forward, backward or infer."""
        if kind == "backward":
            first = self._backward.first_group
            for i in reversed(range(len(self._groups) if first is None else first, len(self._groups))):
                self._weights.join(i)
                self.gradients.join(i)
        else:
            for i, group in enumerate(self._groups):
                if kind == "infer" or group.ahead:
                    self._weights.join(i)

    def _separate(self) -> None:
        """Has the next pass record the untrained parameters by themselves. MXNet 1.9.1 gives an array without gradient a
        node in the graph that it first meets, and backward of that graph takes the node from all others."""
        for parameter in self._untrained:
            arrays = parameter.list_data()
            place = parameter.list_ctx().index(self.ctx)
            arrays[place] = arrays[place].detach()

    def _needs_backward(self, group: int) -> bool:
        return self._backward.first_group is not None and group >= self._backward.first_group

    def _record(self, i: int, x: Arrays, label: Arrays, key: Tuple[int, ...]):
        """What the recorded pass of a group gives: its output, or (loss, report)."""
        if i > self._backward.first_group or self._backward.input_gradient:
            x[0].attach_grad()
        if self.statistics:
            self.statistics.before_pass(i)
        with autograd.record():
            return run(self._groups[i].recorded, x, key, self.ctx, *label)


def run(chunks: Sequence[Chunk], x: Arrays, key: Tuple[int, ...], ctx: mx.Context, *label: mx.nd.NDArray):
    """What the last of some chunks gives, which takes the label, too."""
    for n, chunk in enumerate(chunks):
        if chunk.draws:
            mx.random.seed(mix(*key, chunk.segment), ctx=ctx)
        x = [chunk.block(*x, *(label if n == len(chunks) - 1 else ()))]
    return x[0]


def _output(outputs) -> mx.nd.NDArray:
    return outputs[0] if isinstance(outputs, (list, tuple)) else outputs
