"""Tensor parallelism: a stage of the network on a team of contexts, each with its slices of the layers.

Every segment of the plan is one or more *pieces* (`mxtrain.models.split`). All ranks of a team run a piece on the same
input, each with its slices; what they give is added up, and so are the gradients of its input. A piece that is not
split is run by the first rank alone: its output, and the gradient of its input, are sent to the others. The last piece
is of this kind: it gives the loss. Contexts of one process are run by one thread, in turn; where a team goes over
several processes, their sums are added by Horovod.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Parameter

from mxtrain.errors import UserError
from mxtrain.models import plan
from mxtrain.models.split import Origin, Slices
from mxtrain.parallel.communicator import Communicator
from mxtrain.parallel.gradients import FloatGradients
from mxtrain.parallel.passing import Boundary
from mxtrain.parallel.program import Chunk, compile_chain
from mxtrain.parallel.stage import Arrays, Backward, run
from mxtrain.parallel.statistics import moving_layers
from mxtrain.tasks.heads import LossHead


class Piece(NamedTuple):
    """What is run between two sums. The chunks are of every rank, or of the first alone."""

    recorded: List[List[Chunk]]
    ahead: List[List[Chunk]]
    """For a pass without recording when backward runs the piece again."""
    inference: List[List[Chunk]]
    segment: int
    """Index of its first segment in the finest plan."""
    last: int
    """Of its last one."""
    labelled: bool
    """Whether it takes the labels, too."""
    goes_on: bool = False
    """Whether it draws random numbers that follow those of the piece before, of the same segment."""


class Split(NamedTuple):
    """A network as pieces."""

    pieces: List[Piece]
    origins: List[Dict[Parameter, Origin]]
    """For each rank what its parameters are slices of."""

    def of_stages(self, starts: Sequence[int]) -> List[List[Piece]]:
        """starts: index of the first segment of each."""
        ends = [*starts[1:], self.pieces[-1].segment + 1]
        return [[piece for piece in self.pieces if a <= piece.segment < b] for a, b in zip(starts, ends)]


def split(net: Block, segments: Sequence[Block], head: LossHead, evaluation_head: Block, size: int,
          starts: Sequence[int]) -> Split:
    """Cuts a network for a team of `size` ranks; its slices hold zeros. Raises UserError where that cannot be done.

    starts: segments in front of which a piece begins: those of stages and groups.
    """
    name = type(net).__name__
    slices = [Slices(rank, size) for rank in range(size)]
    pieces: List[Piece] = []
    alone: List[Tuple[int, Block]] = []  # segments in a row that are not split
    done = False

    def close(end=None, evaluation_end=None, *, labelled=False) -> None:
        """Makes a piece of the segments in `alone`."""
        if alone or end:
            pieces.append(_piece([alone], end, evaluation_end, labelled, len(segments) - 1))
            alone.clear()

    for number, segment in enumerate(segments):
        if number in starts:
            close()
        if hasattr(segment, "split_layers"):
            close()
            parts = [segment.split_layers(own) for own in slices]
            for k, of_ranks in enumerate(zip(*parts)):
                pieces.append(_piece([[(number, block)] for block in of_ranks], seeds=k == 0))
        elif hasattr(segment, "split_scores") and number == len(segments) - 1:
            close()
            loss = getattr(head, "loss", None)
            if not hasattr(loss, "split_loss"):
                raise UserError(f"--tp {size}: {type(loss).__name__} cannot be computed where each context has a part of "
                                f"the scores, as {type(segment).__name__} gives them; a loss that offers split_loss() can")
            scores = [segment.split_scores(own) for own in slices]
            shares = [loss.split_loss(own, count) for own, (_, count) in zip(slices, scores)]
            ends = [share for share, _ in shares]
            pieces.append(_piece([[(number, block)] for block, _ in scores], ends, ends, True))
            close(_Report(shares[0][1], True), _Report(shares[0][1], False))
            done = True
        else:
            alone.append((number, slices[0].whole(segment)))
    if not done:
        close(head, evaluation_head, labelled=True)
    if not any(len(piece.recorded) > 1 for piece in pieces):
        raise UserError(f"--tp {size}: {name} has no layer that says how it is split (mxtrain.models.split)")
    if moving_layers(net):
        raise UserError(f"--tp {size}: {name} has batch normalization, whose running statistics are not split; use "
                        "layer normalization")
    if any(parameter.grad_req == "null" for parameter in net.collect_params().values()):
        raise UserError(f"--tp {size}: --freeze: parameters that are not trained are not split; leave one out")
    return Split(pieces, [own.origins for own in slices])


def _piece(ranks, end=None, evaluation_end=None, labelled=False, last=0, seeds=True) -> Piece:
    """ranks: (number, segment) of each rank. end, evaluation_end: what follows, for training and evaluation: a block, or
    one of each rank. last: number of the network's last segment. seeds: whether random numbers begin anew with it."""
    def of(number: int, ends) -> Optional[Block]:
        return ends[number] if isinstance(ends, list) else ends

    def chunks(ends) -> List[List[Chunk]]:
        return [_chunks(own, of(rank, ends), seeds) for rank, own in enumerate(ranks)]

    first, last = (ranks[0][0][0], ranks[0][-1][0]) if ranks[0] else (last, last)
    return Piece(chunks(end), chunks(None) if end is None else [], chunks(evaluation_end), first, last, labelled,
                 not seeds and plan.draws(ranks[0][0][1]))


def _chunks(numbered: Sequence[Tuple[int, Block]], end: Optional[Block], seeds: bool) -> List[Chunk]:
    """Compiled neighbouring segments; a new chunk begins at each that draws random numbers. See parallel.program."""
    found: List[Tuple[int, bool, List[Block]]] = []
    for number, block in numbered:
        draws = plan.draws(block)
        if draws and seeds or not found:
            found.append((number, draws and seeds, []))
        found[-1][2].append(block)
    if not found:
        return [Chunk(compile_chain([end]), 0, False)]
    return [Chunk(compile_chain(blocks, end if k == len(found) - 1 else None), number, draws)
            for k, (number, draws, blocks) in enumerate(found)]


class _Report(HybridBlock):
    """What LossHead gives, for a loss that has seen the labels already; or LossEvaluation."""

    def __init__(self, loss: HybridBlock, training: bool):
        super().__init__(prefix="")
        self.loss, self._training = loss, training

    def hybrid_forward(self, F, x):
        loss = self.loss(x)
        return (loss, F.expand_dims(loss, axis=1)) if self._training else F.expand_dims(loss, axis=1)


class Team:
    """What the ranks of a team that are in this process do together.

    contexts: theirs. mates: the communicator of the team's processes, each with as many contexts; ALONE for one.
    """

    def __init__(self, contexts: Sequence[mx.Context], mates: Communicator):
        self.contexts, self._mates = list(contexts), mates
        self.ranks = range(mates.rank * len(contexts), (mates.rank + 1) * len(contexts))

    def spread(self, array: mx.nd.NDArray) -> Arrays:
        """Copies for all here of what the first one here has."""
        return [array, *(array.as_in_context(ctx) for ctx in self.contexts[1:])]

    def sum(self, arrays: Sequence[mx.nd.NDArray], shape: Tuple[int, ...]) -> Arrays:
        """The sum over the team, for all here. arrays: of those here that have one; all are of that shape."""
        total = None
        for array in arrays:
            total = array if total is None else total + array.as_in_context(total.context)
        if self._mates.size > 1:
            if total is None:
                total = mx.nd.zeros(shape, ctx=self.contexts[0])
            total = self._mates.added(total, "team")
        return self.spread(total)


class TeamRunner:
    """Runs shards through a stage, as StageRunner does: it takes and gives arrays on the first context here.

    pieces: of the stage. bounds: index of the first piece of each group; recompute: whether backward runs them again.
    outputs: what comes out of each segment of the network; needed where the team goes over several processes.
    ends: whether the stage is the last one. gradients: of each rank here. summed: the gradients, likewise, of each
    parameter that all ranks have whole. alone: whether this process has no other team.
    """

    statistics = None

    def __init__(self, pieces: List[Piece], bounds: Sequence[int], recompute: bool, outputs: Sequence[Boundary], ends: bool,
                 team: Team, gradients: List[FloatGradients], summed: List[Sequence[mx.nd.NDArray]],
                 backward: Backward, alone: bool):
        self.ctx, self._team, self.gradients, self._summed = team.contexts[0], team, gradients, summed
        self._pieces, self._outputs, self._ends, self._backward = pieces, outputs, ends, backward
        self._bounds = list(zip(bounds, [*bounds[1:], len(pieces)]))
        self._recompute, self._waits = recompute, recompute and (alone or self.ctx.device_type == "cpu")
        # MXNet has one generator for all CPU contexts of a process.
        self._draws_again = len(team.contexts) > 1 and self.ctx.device_type == "cpu"
        self._kept: Dict[int, list] = {}

    def begin(self, busy: bool) -> None:
        self._kept.clear()
        for own in self.gradients:
            own.begin(busy)

    def end(self) -> None:
        """Adds up what every rank has of the gradient of a parameter that all have."""
        for copies in self._summed:
            for total, own in zip(self._team.sum(copies, copies[0].shape), copies):
                if total is not own:
                    total.copyto(own)

    def finish(self, shards_run: int) -> None:
        pass

    def forward(self, shard: int, x: Arrays, label: Arrays, key: Tuple[int, ...]) -> Optional[mx.nd.NDArray]:
        """See StageRunner."""
        rows, kept = len(x[0]), []
        inputs, labels = self._on_all(x), self._on_all(label)
        for first, end in self._bounds:
            if self._recompute:
                kept.append((inputs, None))
                if not (self._ends and end == len(self._pieces)):
                    inputs = self._through(first, end, inputs, labels, key, rows)
            else:
                passes, after = self._record(first, end, inputs, labels, key, rows)
                kept.append((inputs, passes))
                inputs = after
        self._kept[shard] = [rows, labels, *kept]
        return None if self._ends else inputs[0][0]

    def backward(self, shard: int, gradient: Optional[mx.nd.NDArray], label: Arrays, key: Tuple[int, ...]):
        """See StageRunner."""
        rows, labels, *kept = self._kept.pop(shard)
        report, lowest = None, self._backward.first_group
        if lowest is None:
            return None, None
        gradients = None if self._ends else self._team.spread(gradient)
        for first, end in reversed(self._bounds):
            inputs, passes = kept.pop()
            if end <= lowest:
                continue
            if passes is None:
                passes, _ = self._record(first, end, inputs, labels, key, rows)
            for number in reversed(range(max(first, lowest), end)):
                inputs, outputs = passes.pop()
                if self._ends and number == len(self._pieces) - 1:
                    if outputs:
                        outputs[0][0].backward()
                        report = outputs[0][1]
                else:
                    for output, own in zip(outputs, gradients):
                        output.backward(own)
                if self._gives_gradient(number):
                    gradients = self._team.sum([x[0].grad for x in inputs[:len(outputs)]], inputs[0][0].shape)
                    if self._waits and number == first:
                        gradients[0].wait_to_read()  # as in StageRunner, to save memory
        return (gradients[0] if self._backward.input_gradient else None), report

    def infer(self, x: Arrays, label: Arrays) -> Optional[mx.nd.NDArray]:
        """See StageRunner; None in the last stage where the first rank is elsewhere."""
        inputs, labels = self._on_all(x), self._on_all(label)
        with autograd.pause(train_mode=False):
            for number, piece in enumerate(self._pieces):
                given = [_infer(chunks, own, *(labels[m] if piece.labelled else ()))
                         for m, (chunks, own) in enumerate(zip(self._members(piece.inference), inputs))]
                if self._ends and number == len(self._pieces) - 1:
                    return given[0] if given else None
                inputs = self._summed_up(number, given, len(x[0]))
        return inputs[0][0]

    def end_inference(self) -> None:
        pass

    def _on_all(self, arrays: Sequence[mx.nd.NDArray]) -> List[Arrays]:
        return [list(own) for own in zip(*map(self._team.spread, arrays))] or [[] for _ in self._team.contexts]

    def _members(self, chunks: List[List[Chunk]]) -> List[List[Chunk]]:
        """Of those here, the first ones of which run a piece."""
        return chunks[self._team.ranks[0]:self._team.ranks[-1] + 1]

    def _through(self, first: int, end: int, inputs, labels, key, rows: int):
        """What comes out of pieces, in train mode but without recording."""
        history = []
        for number in range(first, end):
            history = self._history(number, history, inputs)
            with autograd.train_mode():
                given = self._run(number, "ahead", history, labels, key)
            inputs = self._summed_up(number, given, rows)
        return inputs

    def _record(self, first: int, end: int, inputs, labels, key, rows: int):
        """([(inputs, outputs) of each piece], inputs of the next one)."""
        passes, history = [], []
        for number in range(first, end):
            history = self._history(number, history, inputs)
            recorded = self._backward.first_group is not None and number >= self._backward.first_group
            for x in inputs if recorded and self._gives_gradient(number) else ():
                x[0].attach_grad()
            with autograd.record() if recorded else autograd.train_mode():
                outputs = self._run(number, "recorded", history, labels, key)
            passes.append((inputs, outputs))
            if self._ends and number == len(self._pieces) - 1:
                return passes, None
            inputs = self._summed_up(number, [output.detach() for output in outputs], rows)
        return passes, inputs

    def _history(self, number: int, history: List[List[Arrays]], inputs: List[Arrays]) -> List[List[Arrays]]:
        """The inputs of the pieces of a segment up to one of them, given those up to the piece before."""
        same = number and self._pieces[number].segment == self._pieces[number - 1].segment
        return [*(history if same else []), inputs]

    def _run(self, number: int, purpose: str, history: List[List[Arrays]], labels, key) -> list:
        """What a piece gives, of each rank here that runs it. history: see _history; the last are its inputs."""
        piece = self._pieces[number]
        given = []
        for m, chunks in enumerate(self._members(getattr(piece, purpose))):
            ctx = self._team.contexts[m]
            if piece.goes_on and self._draws_again:
                with autograd.pause(train_mode=True):
                    for back, inputs in zip(range(len(history) - 1, 0, -1), history):
                        run(self._pieces[number - back].ahead[self._team.ranks[m]], inputs[m], key, ctx)
            given.append(run(chunks, history[-1][m], key, ctx, *(labels[m] if piece.labelled else ())))
        return given

    def _summed_up(self, number: int, given: Arrays, rows: int) -> List[Arrays]:
        shape = given[0].shape if given else self._outputs[self._pieces[number].last].shape(rows)
        return [[array] for array in self._team.sum(given, shape)]

    def _gives_gradient(self, number: int) -> bool:
        return number > self._backward.first_group or self._backward.input_gradient


def _infer(chunks: Sequence[Chunk], x: Arrays, *label: mx.nd.NDArray):
    for n, chunk in enumerate(chunks):
        x = [chunk.block(*x, *(label if n == len(chunks) - 1 else ()))]
    return x[0]
