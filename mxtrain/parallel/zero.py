"""ZeRO: replicas that share out the optimizer's states, the gradients, and the weights (Rajbhandari et al. 2020).

Every parameter is cut into parts, which are dealt out to the replicas. Stage 1: only the owner of a part keeps its
optimizer states and updates it; then all others get the part. Stage 2: a gradient is summed at its owners as soon as
backward has passed a group of the network, and nobody else keeps it. Stage 3: nobody else keeps a part of a weight,
either; all get it for as long as its group runs (see parallel.gathering).
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import autograd

from mxtrain.optim import clipping
from mxtrain.parallel.exact import ExactSum, FloatSum

Arrays = List[mx.nd.NDArray]


class Part(NamedTuple):
    """Elements of a parameter, counted in its flat form, that are updated in one place."""

    parameter: int
    """Its number."""
    start: int
    stop: int
    owner: Optional[int]
    """The replica that updates it; None: all do."""

    @property
    def size(self) -> int:
        return self.stop - self.start


def deal(sizes: Dict[int, int], replicas: int, whole: bool = False, like: Dict[int, List[Part]] = {},
         loads: Optional[List[int]] = None) -> List[Part]:
    """Cuts parameters at the chunks of a global norm and deals the parts out evenly, the largest first.

    sizes: of parameters, by their number. whole: do not cut them, for an optimizer that needs norms of parameters.
    like: parameters whose parts have the owners of these parts of another one. loads: elements that every replica has
    from before (changed).
    """
    loads = [0] * replicas if loads is None else loads
    parts = []
    for number, size in sizes.items():
        step = max(1, size) if whole else clipping.CHUNK
        parts += [Part(number, start, min(start + step, size), None) for start in range(0, size, step)]
    dealt = {}
    for part in sorted(parts, key=lambda part: (part.parameter not in like, -part.size)):
        if part.parameter in like:
            owner = like[part.parameter][part.start // clipping.CHUNK if not whole else 0].owner
        else:
            owner = loads.index(min(loads))
        loads[owner] += part.size
        dealt[part] = part._replace(owner=owner)
    return [dealt[part] for part in parts]


def flat(array: mx.nd.NDArray, part: Part) -> mx.nd.NDArray:
    """A part of a parameter's array, sharing its memory."""
    return array.reshape((-1,))[part.start:part.stop]


class Owners:
    """Who of the replicas of a stage owns what, and how it comes to them.

    groups: the parts of the parameters of each of the program's groups. contexts: the stage's, of the replicas here.
    peers: the communicator of the processes that have the stage, each with as many contexts.
    stage: its number, for the names of transfers.
    """

    def __init__(self, groups: List[List[Part]], contexts: Sequence[mx.Context], peers, stage: int):
        self.groups, self.contexts, self.peers, self._stage = groups, list(contexts), peers, stage
        self._first = peers.rank * len(contexts)

    def owned(self, here: int) -> List[List[Part]]:
        """What the replica number `here` of this process owns, by groups."""
        return [[part for part in group if part.owner == self._first + here] for group in self.groups]

    def share(self, weights: Sequence[Dict[int, mx.nd.NDArray]]) -> None:
        """Gives all replicas the parts that their owners have. weights: of the replicas here, by the parameters'
        numbers."""
        for number, group in enumerate(self.groups):
            if self.peers.size > 1:
                self._share_among_processes(number, weights)
            for part in group:
                source = part.owner - self._first
                if 0 <= source < len(self.contexts):
                    for other, own in enumerate(weights):
                        if other != source:
                            flat(weights[source][part.parameter], part).copyto(flat(own[part.parameter], part))

    def _share_among_processes(self, number: int, weights) -> None:
        for column, ctx in enumerate(self.contexts):
            blocks = self.columns(number, column)
            own = [flat(weights[column][part.parameter], part) for part in blocks[self.peers.rank]]
            _, found = self._from_all(blocks, own, ctx, f"share.{self._stage}.{column}")
            for part, values in found.items():
                if part not in blocks[self.peers.rank]:
                    for replica in weights:
                        values.copyto(flat(replica[part.parameter], part))

    def _from_all(self, blocks: List[List[Part]], own: Arrays, ctx: mx.Context,
                  tag: str) -> Tuple[Optional[mx.nd.NDArray], Dict[Part, mx.nd.NDArray]]:
        """(the array in which the parts of all processes come together, None where there are none; its views of each).

        blocks: the parts that each process has. own: the values of this one's.
        """
        length = max(sum(part.size for part in block) for block in blocks)
        if not length:
            return None, {}
        everything = self.peers.all_gather(padded(own, length, ctx), tag=tag)
        found = {}
        for rank, block in enumerate(blocks):
            start = rank * length
            for part in block:
                found[part] = everything[start:start + part.size]
                start += part.size
        return everything, found

    def gather(self, number: int, here: int, kept: Sequence[Dict[Part, mx.nd.NDArray]],
               weights: Dict[int, mx.nd.NDArray]) -> Optional[mx.nd.NDArray]:
        """Brings the whole weights of a group to the replica number `here` of this process, from those who own them.

        kept: of the replicas here, what each owns. weights: where they come to, by the parameters' numbers; with none,
        only other processes get what is kept here. Processes make the same calls in the same order; nothing waits.
        Returns the array in which what processes have comes together, if it does.
        """
        if self.peers.size == 1:
            for part in self.groups[number]:
                if part.parameter in weights:
                    kept[part.owner][part].copyto(flat(weights[part.parameter], part))
            return None
        ctx = self.contexts[here]
        blocks = [[part for part in self.groups[number] if part.owner // len(self.contexts) == rank]
                  for rank in range(self.peers.size)]
        own = [kept[part.owner - self._first][part].as_in_context(ctx) for part in blocks[self.peers.rank]]
        everything, found = self._from_all(blocks, own, ctx, f"weights.{self._stage}.{here}")
        for part, values in found.items():
            if part.parameter in weights:
                values.copyto(flat(weights[part.parameter], part))
        return everything

    def columns(self, number: int, column: int) -> List[List[Part]]:
        """The parts of a group that are owned by the replicas with the same place in each of the processes."""
        return [[part for part in self.groups[number] if part.owner == rank * len(self.contexts) + column]
                for rank in range(self.peers.size)]


def padded(arrays: Arrays, length: int, ctx: mx.Context) -> mx.nd.NDArray:
    """Vectors one after the other, and zeros up to a length."""
    missing = length - sum(array.size for array in arrays)
    arrays = [*arrays, *([mx.nd.zeros((missing,), ctx=ctx)] if missing else [])]
    return arrays[0].copy() if len(arrays) == 1 else mx.nd.concat(*arrays, dim=0)


class Scatter:
    """The sums of the gradients at their owners, on the contexts of this process.

    owners: of each stage that is here. exact: whether sums are exact; of so many `numbers` per element.
    """

    def __init__(self, owners: Dict[int, Owners], exact: bool, numbers: int):
        self._owners, self._exact, self._numbers = owners, exact, numbers
        self._among_processes = any(of_stage.peers.size > 1 for of_stage in owners.values())
        self.sums: Dict[tuple, Union[ExactSum, FloatSum]] = {}  # (stage, number of the replica here) -> sum
        self._starts: Dict[tuple, Dict[Part, int]] = {}
        for stage, of_stage in owners.items():
            for here, ctx in enumerate(of_stage.contexts):
                starts, start = {}, 0
                for part in (part for group in of_stage.owned(here) for part in group):
                    starts[part] = start
                    start += part.size
                size = max(1, start)  # MXNet has no empty arrays
                self._starts[stage, here] = starts
                self.sums[stage, here] = ExactSum(size, ctx, numbers) if exact else FloatSum(size, ctx)

    def begin(self, shards: Sequence[int], rounds: int) -> None:
        """shards: how many each replica here runs of a batch. rounds: the most that any replica may run."""
        for total in self.sums.values():
            total.clear()
        self._shards, self._turns = shards, Counter()
        # Processes exchange in one order, though one of them may have fewer shards of a batch than another. In MXNet an
        # operator that waits for another process can hold up those that come after it, by the memory for temporary
        # values that they share; in two orders, two processes could wait for each other.
        stages = sorted(self._owners, reverse=True)
        self._order = deque((turn, stage, group) for turn in range(rounds) for stage in stages
                            for group in reversed(range(len(self._owners[stage].groups)))
                            if self._owners[stage].groups[group])  # a pass of a frozen one may not be handed over
        self._given = {key: [] for key in self._order}

    def hand(self, stage: int, here: int, group: int, gradients: Dict[int, mx.nd.NDArray]) -> None:
        """Takes the gradients that a pass of a group has given, by the parameters' numbers; one may be missing."""
        if not self._among_processes:
            self._add(stage, group, gradients)
            return
        if not self._owners[stage].groups[group]:
            return
        turn = self._turns[stage, here, group]
        self._turns[stage, here, group] += 1
        self._given[turn, stage, group].append(gradients)
        self._exchange_what_is_there()

    def end(self) -> None:
        """To be called when all replicas here have handed over everything."""
        if self._among_processes:
            self._exchange_what_is_there()

    def parts(self, stage: int, here: int) -> Dict[Part, slice]:
        """Where in a sum the parts are that a replica owns."""
        return {part: slice(start, start + part.size) for part, start in self._starts[stage, here].items()}

    def _add(self, stage: int, group: int, gradients: Dict[int, mx.nd.NDArray]) -> None:
        owners = self._owners[stage]
        for part in owners.groups[group]:
            if part.parameter in gradients:
                own = flat(gradients[part.parameter], part).as_in_context(owners.contexts[part.owner])
                self.sums[stage, part.owner].add(self._starts[stage, part.owner][part], own)

    def _exchange_what_is_there(self) -> None:
        while self._order:
            turn, stage, group = self._order[0]
            passes = self._given[self._order[0]]
            if len(passes) < sum(count > turn for count in self._shards):
                return
            self._order.popleft()
            self._exchange(stage, group, passes)
            passes.clear()

    def _exchange(self, stage: int, group: int, passes: List[Dict[int, mx.nd.NDArray]]) -> None:
        owners = self._owners[stage]
        for column, ctx in enumerate(owners.contexts):
            blocks = owners.columns(group, column)
            length = max(sum(part.size for part in block) for block in blocks)
            if not length:
                continue
            size = length * len(blocks)
            total = ExactSum(size, ctx, self._numbers) if self._exact else FloatSum(size, ctx)
            for gradients in filter(None, passes):
                total.add(0, mx.nd.concat(*(padded([
                    flat(gradients[part.parameter], part).as_in_context(ctx) if part.parameter in gradients
                    else mx.nd.zeros((part.size,), ctx=ctx) for part in block], length, ctx) for block in blocks), dim=0))
            if self._exact:
                total.spoil_blocks(length)
            own = [owners.peers.reduce_scatter(part, tag=f"{stage}.{column}.{i}") for i, part in enumerate(total.parts)]
            mine = blocks[owners.peers.rank]
            start = self._starts[stage, column][mine[0]] if mine else 0
            self.sums[stage, column].add_parts(start, sum(part.size for part in mine), *own)


class ScatteredGradients:
    """The gradients of one replica's stage, which are handed over to their owners: see Scatter and parallel.gradients.

    groups: the weights of each of the stage's groups, by the parameters' numbers. here: number of the replica among
    those of this process. may_leave_out: see FloatGradients.
    """

    parts: Arrays = []

    def __init__(self, groups: List[Dict[int, mx.nd.NDArray]], ctx: mx.Context, scatter: Scatter, stage: int,
                 here: int, may_leave_out: bool):
        self._groups = groups
        self._ctx, self._scatter, self._place, self._may_leave_out = ctx, scatter, (stage, here), may_leave_out
        self._open: Dict[int, List[Dict[int, mx.nd.NDArray]]] = {}
        self._latest = None

    def begin(self, busy: bool) -> None:
        self._open.clear()

    def before_shard(self, shard: int) -> None:
        self._open[shard] = [self._mark(group) for group in self._groups]
        self._latest = shard

    def after_group(self, shard: int, group: int) -> None:
        gradients = self._open[shard][group]
        if self._latest == shard:
            self._mark(self._groups[group])  # or the weights would hold the arrays that are given away
        self._open[shard][group] = {}
        self._scatter.hand(*self._place, group, gradients)

    def after_shard(self, shard: int) -> None:
        del self._open[shard]

    def end(self) -> None:
        pass

    def parts_of(self, number: int) -> Arrays:
        """What is summed here of a parameter, by its place among those of this context."""
        name = [number for group in self._groups for number in group][number]
        return [array[place] for part, place in self._scatter.parts(*self._place).items() if part.parameter == name
                for array in self._scatter.sums[self._place].parts]

    def finish(self) -> None:
        self._scatter.sums[self._place].finish()

    def _mark(self, weights: Dict[int, mx.nd.NDArray]) -> Dict[int, mx.nd.NDArray]:
        """Has the next backward write the gradients of some weights to new arrays, which take memory only then."""
        make = _zeros if self._may_leave_out else without_memory
        gradients = {number: make(weight.shape, self._ctx) for number, weight in weights.items()}
        if weights:
            autograd.mark_variables(list(weights.values()), list(gradients.values()), "write")
        return gradients


def _zeros(shape, ctx) -> mx.nd.NDArray:
    return mx.nd.zeros(shape, ctx=ctx)


def without_memory(shape, ctx) -> mx.nd.NDArray:
    """An array that takes its memory when it is first written."""
    return mx.nd.NDArray(mx.nd.ndarray._new_alloc_handle(shape, ctx, True, "float32"))


def absent(ctx: mx.Context) -> mx.nd.NDArray:
    """What a parameter has while its weight is not there: whoever uses it fails by its shape, or finds no number."""
    return mx.nd.full((1,), np.nan, ctx=ctx)
