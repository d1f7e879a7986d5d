"""Runs a global batch forward and backward over replicas of a network, each on one device or as a pipeline of several.

A batch of B' rows is cut into V shards (mxtrain.parallel.shards). Replica r of R runs the shards r*V//R to (r+1)*V//R
one after the other and adds up their gradients. So devices, accumulation and micro-batches are one idea, and with exact
sums the result depends neither on R nor on the number of a pipeline's stages.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager, nullcontext
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, Parameter

from mxtrain.errors import UserError
from mxtrain.models import plan
from mxtrain.parallel.communicator import ALONE, Communicator
from mxtrain.parallel.exact import MOST, NotSummable
from mxtrain.parallel.gathering import GatheredGradients, Gathering
from mxtrain.parallel.gradients import ExactGradients, FloatGradients
from mxtrain.parallel.grid import Grid
from mxtrain.parallel.holdings import Held, Holdings
from mxtrain.parallel.passing import Passing, boundaries
from mxtrain.parallel.program import Stage, build, group_starts, is_compiled, modes, moving_by, trained_by
from mxtrain.parallel.schedule import SCHEDULES, Instruction
from mxtrain.parallel.shards import assigned, bounds_in, send
from mxtrain.parallel.stage import StageRunner, backward_by
from mxtrain.parallel.statistics import ShardStatistics, unreached_by_backward
from mxtrain.parallel.trace import Row
from mxtrain.parallel.words import in_words
from mxtrain.parallel.zero import Scatter, ScatteredGradients, flat

Arrays = List[mx.nd.NDArray]
_UNNOTED = nullcontext()


class Feed(NamedTuple):
    """What a replica gets of a batch: its shards that have rows, the first first."""

    shards: List[int]
    rows: List[int]
    inputs: List[Arrays]
    """Of each shard, on the context of the first stage; empty when that is in another process."""
    labels: List[Arrays]
    """The same, one array each, on the context of the last stage."""


class Layout:
    """Replicas of one network over the devices of all processes.

    net: initialized, its shapes known: on all contexts; for several stages, or zero 3, on the context of `sample`. In
        these cases `forget_others` must be called before anything is run.
    head: (output, label) -> [loss of each sample (rows,), report]; reports are handed out for metrics.
    evaluation_head: (output, label) -> an array whose first axis is the samples.
    contexts: of this process. communicator: of all processes, each with as many contexts.
    stages: index of the first segment of each stage of a pipeline.
    shards, exact, recompute, zero, schedule: see ParallelConfig.
    preprocess: block applied to the inputs on each device, before the network.
    sample: inputs of a row or two, preprocessed; to check the network's plan with.
    whole_parameters: with zero, update each parameter in one place (for optimizers that need norms of them).
    groups: index of the first segment of each group to recompute, where `recompute` is an amount of memory.

    After `forward_backward`, `add_up` and `finish`, `held` has the gradients: sums over the samples of the whole batch.
    When weights have been updated by them, `share` brings them to all who need them.
    """

    def __init__(self, net: Block, head: Block, evaluation_head: Block, contexts: Sequence[mx.Context], shards: int,
                 exact: bool = False, recompute: str = "none", seed: int = 0, preprocess: Optional[Block] = None,
                 sample: Sequence[mx.nd.NDArray] = (), communicator: Communicator = ALONE,
                 stages: Sequence[int] = (0,), schedule: str = "1f1b", zero: int = 0, whole_parameters: bool = False,
                 groups: Optional[Sequence[int]] = None):
        grid = Grid(len(contexts), communicator.size, communicator.rank, len(stages))
        self._begin(grid, contexts, shards, exact, seed, preprocess, communicator, schedule)
        segments = plan.segments(net)
        if groups is None:
            groups = group_starts(net, segments, recompute, zero)
        mode = modes(net, len({*stages, *groups}), recompute, zero, exact, shards, grid.replicas)
        program = build(net, head, evaluation_head, segments, stages, groups, recompute != "none" or zero == 3,
                        mode.static, by_groups=zero == 3)
        if len(program.segments) > 1:
            plan.check(net, program.segments, *sample)
        self._passing = Passing(grid, self.contexts, communicator, boundaries(program.segments, stages, sample))
        self.words = in_words(grid, contexts, stages, len(segments), shards, schedule, zero)
        """Of stages, and what is shared out; None where there is nothing of it."""
        trained, layers = trained_by(program), moving_by(program)
        ties = _trained_ties(net)
        self._numbers = shards * (2 if ties else 1)  # that a gradient is the sum of
        if exact and self._numbers > MOST:
            raise UserError(f"--shards {shards}: exact sums hold for up to {MOST // 2} shards where weights are tied")
        self._backward = backward_by(trained, unreached_by_backward(net))
        self._holdings = Holdings(trained, [
            [p for block in stage.inference for p in block.collect_params().values()] for stage in program.stages],
            grid, contexts, communicator, self._peers, zero, whole_parameters, ties)
        self.parameters: List[Parameter] = self._holdings.parameters
        self._scatter = Scatter(self._holdings.owners, exact, self._numbers) if zero > 1 else None
        # Processes gather weights in one order, as if all replicas had as many shards.
        self._rounds = -(-shards // grid.replicas) if zero == 3 and self._peers.size > 1 else None
        leaves_out = zero > 1 and any(map(plan.leaves_out, segments))
        self._runners: List[StageRunner] = []
        for c, ctx in enumerate(contexts):
            stage = grid.place(c)[1]
            own, moving = program.stages[stage], layers[stage] if not mode.own_statistics else []
            self._runners.append(StageRunner(
                own, ctx, self._gradients(c, own, shards > grid.replicas or not mode.one_pass, leaves_out),
                ShardStatistics(moving, ctx, exact, shards) if any(moving) else None,
                self._backward[stage], self._holdings.untrained(stage) if grid.stages > 1 else [],
                len(contexts) == 1, self._gathering(c)))
        self.held: List[List[Held]] = [self._held(c) for c in range(len(contexts))]
        """For each context what it updates: the gradients are there after `finish`."""
        self.sums = self._sums()
        """For each array to be summed, its copies on the contexts that have it; gradients before statistics."""

    def _begin(self, grid: Grid, contexts: Sequence[mx.Context], shards: int, exact: bool, seed: int,
               preprocess: Optional[Block], communicator: Communicator, schedule: str) -> None:
        """What is the same for all kinds of layouts."""
        self.grid, self.contexts, self.shards, self.exact, self._seed = grid, list(contexts), shards, exact, seed
        self._preprocess, self._schedule = preprocess, SCHEDULES[schedule if grid.stages > 1 else "1f1b"]
        self._communicator = communicator
        self._peers = communicator if grid.span == 1 else communicator.among(grid.peers)
        self._assigned = {replica: assigned(replica, grid.replicas, shards) for replica in grid.here}
        self._scatter: Optional[Scatter] = None
        self._rounds: Optional[int] = None
        self.watched_gradient: Optional[mx.nd.NDArray] = None
        self.traced_update: Optional[int] = None
        """Of this update is noted in `trace` when each instruction was run; every one is then waited for."""
        self.trace: List[Row] = []

    def forward_backward(self, batch: Sequence, update: int, watched: Optional[int] = None) -> Arrays:
        """Runs the batch (*inputs, label), arrays on the host with the same number of rows.

        Returns the head's reports in the order of the shards; none where the last stage is in another process. `update`
        names the random numbers to draw. The gradient of the shard `watched`, when it is run here and sums are exact,
        is kept as a vector in `watched_gradient`.
        """
        feeds = self._feeds(batch)
        if self._scatter:
            self._scatter.begin([self._rounds or len(feeds[r].shards) for r in self.grid.here],
                                -(-self.shards // self.replicas))
        queues, reports = [], {}
        self._passing.clear()
        for c, runner in enumerate(self._runners):
            replica, stage = self.grid.place(c)
            runner.begin(bool(feeds[replica].shards))
            count = self._rounds or len(feeds[replica].shards)
            queues.append(deque(self._schedule(self.grid.stages, count)[stage]))
        # Contexts take turns, so that all are kept busy; whoever needs what is not there yet misses its turn.
        while any(queues):
            for c, queue in enumerate(queues):
                if queue and self._can_run(c, queue[0]):
                    instruction, feed = queue.popleft(), feeds[self.grid.place(c)[0]]
                    report = self._run(c, instruction, feed, update)
                    if report is not None:
                        shard = feed.shards[instruction.micro_batch]
                        reports[shard] = report
                        if shard == watched:
                            self.watched_gradient = self._runners[c].gradients.latest()
        for runner in self._runners:
            runner.end()
        if self._scatter:
            self._scatter.end()
        return [reports[shard] for shard in sorted(reports)]

    def add_up(self) -> None:
        """Sums gradients and statistics over contexts and processes, and over the places of a tied weight."""
        self._peers.allreduce(self.sums)
        for one, other in self._holdings.ties:
            self._tie(one, other)

    def finish(self, shards_run: int) -> None:
        """Turns the sums over all contexts and processes into gradients and running statistics.

        shards_run: how many shards of the batch had rows, here and elsewhere. Raises NotSummable, in all processes.
        """
        self._holdings.make_plain()
        broken = False
        try:
            for runner in self._runners:
                runner.finish(shards_run)
        except NotSummable:
            broken = True
        if self.exact and self.grid.span > 1:  # other processes have other stages
            broken = bool(self._communicator.total(np.array([float(broken)]))[0])
        if broken:
            raise NotSummable

    def gradient_norm(self) -> float:
        """The Euclidean norm of the gradient, over all processes. Waits for it."""
        return self._holdings.norm(self.held)

    def share(self) -> None:
        """Brings updated weights to those who have not updated them themselves."""
        self._holdings.share()

    def evaluate(self, batch: Sequence) -> Arrays:
        """The evaluation head's outputs for a batch, in the order of the shards; none where the last stage is in
        another process. Nothing is recorded or changed."""
        feeds, outputs = self._feeds(batch), {}
        for m in range(self._rounds or max(len(feed.shards) for feed in feeds.values())):
            for replica, feed in feeds.items():
                if m < (self._rounds or len(feed.shards)):
                    output = self._infer(replica, feed, m)
                    if output is not None:
                        outputs[feed.shards[m]] = output
        for runner in self._runners:
            runner.end_inference()
        return [outputs[shard] for shard in sorted(outputs)]

    def wait(self) -> None:
        """Waits for all that was begun. Before running statistics are read: see `compile_chain` on static memory."""
        mx.nd.waitall()

    @property
    def replicas(self) -> int:
        """How many there are, over all processes."""
        return self.grid.replicas

    @property
    def size(self) -> int:
        """Elements of the network's parameters; those of a tied weight count once."""
        return self._holdings.size

    def rows_of(self, batch: Sequence) -> List[int]:
        """For every shard, how many rows of a batch are run to their end here."""
        bounds = bounds_in(batch, self.shards)
        mine = {shard for own in self._assigned.values() for shard in own} if self.grid.has_last else set()
        return [stop - start if shard in mine else 0 for shard, (start, stop) in enumerate(bounds)]

    def bad_of(self, batch: Sequence) -> int:
        """How many samples of a batch could not be read for what is run to its end here."""
        return len(getattr(batch, "bad", ())) if self.grid.has_last else 0

    def place_of(self, batch: Sequence) -> Tuple[int, np.ndarray, slice]:
        """(rows of the whole batch, which of them are run to their end here, which rows of the arrays these are)."""
        bounds = [*bounds_in(batch, self.shards), (len(batch[-1]), None)]
        own = list(self._assigned.values())
        here = slice(bounds[own[0].start][0], bounds[own[-1].stop][0]) if self.grid.has_last else slice(0, 0)
        if hasattr(batch, "positions"):
            return batch.size, batch.positions[here], here
        return len(batch[-1]), np.arange(here.start, here.stop), here

    # For audits, where each replica is one device.

    def gradient_again(self, rows: Sequence, update: int, shard: int, context: int) -> mx.nd.NDArray:
        """The gradient of a shard, with exact sums, on one of the contexts: a vector, one parameter after the other.

        rows: (*inputs, label) of the shard. To be called between `forward_backward` and `finish`, where it changes
        nothing: what was summed stands, and the running statistics are about to be written.
        """
        runner, key = self._runners[context], (self._seed, update, shard)
        bounds = [(0, len(rows[-1]))]
        inputs, = send(rows[:-1], bounds, runner.ctx, True, self._preprocess)
        label, = send(rows[-1:], bounds, runner.ctx, True)
        runner.forward(shard, inputs, label, key)
        runner.backward(shard, None, label, key)
        return runner.gradients.latest()

    def owner(self, shard: int) -> int:
        """The replica that runs a shard, counted over all processes."""
        return next(r for r in range(self.replicas) if shard in assigned(r, self.replicas, self.shards))

    def shard_of(self, batch: Sequence, shard: int) -> List[np.ndarray]:
        """(*inputs, label) of a shard that is run here, on the host."""
        start, stop = bounds_in(batch, self.shards)[shard]
        return [array[start:stop] for array in _on_host(batch)]

    # For checkpoints.

    def weight(self, parameter: Parameter) -> np.ndarray:
        """The value of a parameter, in rank 0. All processes call it."""
        return self._holdings.weight(parameter)

    def assemble(self, arrays: Sequence[Sequence[Arrays]], count: int) -> List[List[np.ndarray]]:
        """For each of `parameters` `count` arrays of its shape, in rank 0, of what devices have for what they hold.

        arrays: for each context here, and each of its `held`, `count` arrays. All processes call it.
        """
        return self._holdings.assemble(arrays, count)

    def forget_others(self) -> None:
        """Gives up what others are to have, parameters of stages in other processes or their parts (zero 3); until then
        all have them, on the host."""
        self._holdings.forget_others()

    def bring_home(self) -> None:
        """Puts all parameters on all contexts, as if the network had not been cut. All processes call it."""
        self._holdings.bring_home()

    # Running a batch.

    def _feeds(self, batch: Sequence) -> Dict[int, Feed]:
        """What each replica here gets of a batch."""
        bounds, last = bounds_in(batch, self.shards), self.grid.stages - 1
        if self.exact:
            batch = _on_host(batch)
        feeds = {}
        for replica, shards in self._assigned.items():
            own = [shard for shard in shards if bounds[shard][0] < bounds[shard][1]]
            cuts = [bounds[shard] for shard in own]
            first, final = (self.grid.context_of(replica, stage) for stage in (0, last))
            feeds[replica] = Feed(
                own, [stop - start for start, stop in cuts],
                [] if first is None else send(batch[:-1], cuts, self.contexts[first], self.exact, self._preprocess),
                [] if final is None else send(batch[-1:], cuts, self.contexts[final], self.exact))
        return feeds

    def _can_run(self, c: int, instruction: Instruction) -> bool:
        """Whether what an instruction needs of other contexts of this process is there."""
        stage = self.grid.place(c)[1]
        if instruction.kind == "forward":
            return stage == 0 or self._passing.is_there(c, stage - 1, instruction)
        return not self._gets_gradient(stage) or self._passing.is_there(c, stage + 1, instruction)

    def _run(self, c: int, instruction: Instruction, feed: Feed, update: int) -> Optional[mx.nd.NDArray]:
        """Runs an instruction and passes on what comes of it; returns the head's report where there is one."""
        replica, stage = self.grid.place(c)
        m, runner = instruction.micro_batch, self._runners[c]
        if m >= len(feed.shards):
            return self._stand_by(c, instruction)
        shard, label = feed.shards[m], feed.labels[m] if stage == self.grid.stages - 1 else []
        key = self._seed, update, shard
        if instruction.kind == "forward":
            x = feed.inputs[m] if stage == 0 else [self._passing.take(c, stage - 1, instruction, feed.rows[m])]
            with self._noting(c, instruction, update):
                output = runner.forward(shard, x, label, key)
            if output is not None:
                self._passing.give(c, stage + 1, instruction, output)
            return None
        gradient = None
        if self._gets_gradient(stage):
            gradient = self._passing.take(c, stage + 1, instruction, feed.rows[m])
        with self._noting(c, instruction, update):
            gradient, report = runner.backward(shard, gradient, label, key)
        if stage and self._gets_gradient(stage - 1):
            self._passing.give(c, stage - 1, instruction, gradient)
        return report

    def _stand_by(self, c: int, instruction: Instruction) -> None:
        """What there is to do for an instruction when the replica has no such shard, but others may."""
        stage = self.grid.place(c)[1]
        self._runners[c].stand_by(instruction.kind)
        if instruction.kind == "forward" and stage < self.grid.stages - 1:
            self._passing.skip(c, stage + 1, instruction)
        if instruction.kind == "backward" and stage and self._gets_gradient(stage - 1):
            self._passing.skip(c, stage - 1, instruction)

    def _gets_gradient(self, stage: int) -> bool:
        """Whether a gradient comes to a stage from the one behind it."""
        return stage < self.grid.stages - 1 and self._backward[stage].first_group is not None

    def _infer(self, replica: int, feed: Feed, m: int) -> Optional[mx.nd.NDArray]:
        """Runs a shard through the stages of a replica that are here; its output, None where others come after them."""
        last = self.grid.stages - 1
        for stage in range(self.grid.stages):
            c = self.grid.context_of(replica, stage)
            if c is None:
                continue
            if m >= len(feed.shards):
                self._runners[c].stand_by("infer")
                continue
            x = feed.inputs[m] if stage == 0 else [self._passing.take(c, stage - 1, m, feed.rows[m])]
            output = self._runners[c].infer(x, feed.labels[m] if stage == last else [])
            if stage == last:
                return output
            self._passing.give(c, stage + 1, m, output)
        return None

    def _tie(self, one: int, other: int) -> None:
        """Adds up the gradients of two parameters that are one weight, each in its place."""
        stages = self._holdings.stage_of(one), self._holdings.stage_of(other)
        for replica in self.grid.here:
            contexts = [self.grid.context_of(replica, stage) for stage in stages]
            parts = [[] if c is None else self._runners[c].gradients.parts_of(self._holdings.place_in_stage(number))
                     for c, number in zip(contexts, (one, other))]
            self._passing.add_from_each_other(replica, stages, parts)

    def _noting(self, c: int, instruction: Instruction, update: int):
        """Notes how long what is begun within takes, if it is to be traced."""
        if update != self.traced_update or self.grid.rank % self.grid.team:
            return _UNNOTED
        return self._noted(c, instruction)

    @contextmanager
    def _noted(self, c: int, instruction: Instruction):
        mx.nd.waitall()  # also for what comes from other processes
        began = time.time()
        yield
        mx.nd.waitall()
        replica, stage = self.grid.place(c)
        name = f"stage {stage}, {self.contexts[c]}"
        if self.grid.processes > 1:
            name += f" of rank {self.grid.rank}"
        device = replica * self.grid.stages + stage
        self.trace.append(Row(device, name, instruction.kind, instruction.micro_batch, began, time.time()))

    # Setting up.

    def _gradients(self, c: int, stage: Stage, several_passes: bool, leaves_out: bool):
        """leaves_out: whether some pass may give no gradient to a parameter, even where all is compiled."""
        replica, number = self.grid.place(c)
        groups, ctx = self._holdings.numbered[number], self.contexts[c]
        own = [parameter for group in groups for parameter in group.values()]
        if self._scatter:
            place = self._scatter, number, replica - self.grid.here.start, leaves_out
            for parameter in own:
                parameter.grad_req = "null"
            if self._holdings.kept:
                return GatheredGradients([dict.fromkeys(group) for group in groups], ctx, *place)
            return ScatteredGradients([{n: p.data(ctx) for n, p in group.items()} for group in groups], ctx, *place)
        # An imperative block may leave out a parameter, whose gradient of an earlier batch would then count again.
        may_leave_out = not is_compiled(stage)
        if self.exact and own:
            return ExactGradients(own, ctx, self._numbers, may_leave_out)
        return FloatGradients(own, ctx, several_passes, may_leave_out)

    def _gathering(self, c: int) -> Optional[Gathering]:
        replica, stage = self.grid.place(c)
        holdings = self._holdings
        return Gathering(holdings.numbered[stage], holdings.owners[stage], holdings.kept[stage],
                         replica - self.grid.here.start) if holdings.kept else None

    def _held(self, c: int) -> List[Held]:
        replica, stage = self.grid.place(c)
        here, holdings, scatter = replica - self.grid.here.start, self._holdings, self._scatter
        parts, numbers = holdings.parts_on(c), [number for group in holdings.numbered[stage] for number in group]
        cut = flat if holdings.owners else lambda array, part: array
        if scatter:
            total, places = scatter.sums[stage, here].total, scatter.parts(stage, here)
            gradients = [total[places[part]] for part in parts]
        else:
            whole = dict(zip(numbers, self._runners[c].gradients.arrays))
            gradients = [cut(whole[part.parameter], part) for part in parts]
        if holdings.kept:
            weights = [holdings.kept[stage][here][part] for part in parts]
        else:
            holdings.make_plain()
            weights = [cut(self.parameters[part.parameter].data(self.contexts[c]), part) for part in parts]
        return list(map(Held, parts, weights, gradients))

    def _sums(self) -> List[Arrays]:
        by_stage: Dict[int, List[StageRunner]] = {}
        for c, runner in enumerate(self._runners):
            by_stage.setdefault(self.grid.place(c)[1], []).append(runner)
        gradients = [list(copies) for runners in by_stage.values()
                     for copies in zip(*(runner.gradients.parts for runner in runners))]
        statistics = [list(copies) for runners in by_stage.values()
                      for copies in zip(*(runner.statistics.parts if runner.statistics else [] for runner in runners))]
        return gradients + statistics


def _trained_ties(net: Block) -> List[Tuple[Parameter, Parameter]]:
    """The pairs of plan.tied that are trained. Raises UserError for one of which one place alone is."""
    ties = plan.tied(net)
    for pair in ties:
        if len({parameter.grad_req == "null" for parameter in pair}) > 1:
            raise UserError(f"--freeze: {pair[0].name} and {pair[1].name} are one weight; freeze both or none")
    return [pair for pair in ties if pair[0].grad_req != "null"]


def _on_host(batch: Sequence) -> List[np.ndarray]:
    return [array.asnumpy() if isinstance(array, mx.nd.NDArray) else array for array in batch]
