"""Which device holds and updates which part of which parameter, and how whole arrays are made of what they hold."""

from __future__ import annotations

import math
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from mxtrain.models.split import Cut
from mxtrain.optim.clipping import chunks, sums_of_squares
from mxtrain.parallel.communicator import Communicator
from mxtrain.parallel.exact import memory
from mxtrain.parallel.grid import Grid
from mxtrain.parallel.zero import Owners, Part, absent, deal, flat

Arrays = List[mx.nd.NDArray]
Stages = List[List[List[Parameter]]]
"""Stage -> group -> its parameters."""


class Held(NamedTuple):
    """What a device updates of a parameter: `part` of it, as views of its weight and, when it is summed, gradient."""

    part: Part
    weight: mx.nd.NDArray
    gradient: mx.nd.NDArray
    cut: Optional[Cut] = None
    """Where the parameter is a slice of one that is split inside its layer: which; `part` is one of it then."""

    def of(self, whole: np.ndarray) -> np.ndarray:
        """What is updated here, of a parameter or an array of its shape."""
        own = self.cut.of(whole) if self.cut else whole
        return own.ravel()[self.part.start:self.part.stop]


class Holdings:
    """The trained parameters of a network over the devices of all processes.

    trained: those of each stage, by groups; they are put on the contexts that hold the stage. everything: all parameters
    of each stage. contexts: of this process.
    communicator: of all processes; peers: of those that have the same stages.
    zero: see ParallelConfig. With 3, trained parameters stay on the host until `forget_others`; from then on `kept` has
    their parts. whole: see zero.deal. ties: see plan.tied; of trained parameters.
    """

    def __init__(self, trained: Stages, everything: List[List[Parameter]], grid: Grid, contexts: Sequence[mx.Context],
                 communicator: Communicator, peers: Communicator, zero: int, whole: bool,
                 ties: Sequence[Tuple[Parameter, Parameter]] = ()):
        self.parameters = [p for stage in trained for group in stage for p in group]
        self._everything, self._grid, self._contexts = everything, grid, list(contexts)
        self._stage_of = {id(p): number for number, stage in enumerate(everything) for p in stage}
        self._communicator, self._zero = communicator, zero
        # Whether this process lacks something that another one has.
        self._spread = communicator.size > 1 and (zero or grid.span > 1)
        numbers = {id(p): number for number, p in enumerate(self.parameters)}
        self.numbered = [[{numbers[id(p)]: p for p in group} for group in stage] for stage in trained]
        # The one that comes first in the network counts; the other one is its copy.
        self.ties = [tuple(sorted((numbers[id(one)], numbers[id(other)]))) for one, other in ties]
        copies = {other: one for one, other in self.ties}
        self._copies = set(copies)
        self._parts = _parts(self.numbered, grid.replicas, zero, whole, copies)
        stages_here = sorted({grid.place(c)[1] for c in range(grid.contexts)})
        self.owners: Dict[int, Owners] = {stage: Owners(self._parts[stage], self._contexts_of(stage), peers, stage)
                                          for stage in stages_here} if zero else {}

        self._later = {id(p) for p in self.parameters} if zero == 3 else set()
        self.kept: Dict[int, List[Dict[Part, mx.nd.NDArray]]] = {
            stage: [{part: mx.nd.zeros((part.size,), ctx=ctx) for group in owners.owned(here) for part in group}
                    for here, ctx in enumerate(owners.contexts)]
            for stage, owners in self.owners.items()} if zero == 3 else {}
        """Of each stage, for the replicas here."""
        self._dealt = False

        for stage, parameters in enumerate(everything if grid.stages > 1 or zero == 3 else []):
            here = self._contexts_of(stage)
            for parameter in parameters if here else []:
                if id(parameter) not in self._later:
                    parameter.reset_ctx(here)

    @property
    def size(self) -> int:
        """Elements of all parameters, those of tied weights once."""
        copies = {id(self.parameters[number]) for number in self._copies}
        return sum(int(np.prod(p.shape)) for stage in self._everything for p in stage if id(p) not in copies)

    def stage_of(self, number: int) -> int:
        """The stage of a trained parameter."""
        return self._stage_of[id(self.parameters[number])]

    def place_in_stage(self, number: int) -> int:
        """The place of a trained parameter among those of its stage."""
        return [n for group in self.numbered[self.stage_of(number)] for n in group].index(number)

    def untrained(self, stage: int) -> List[Parameter]:
        """The parameters of a stage that are not updated by a gradient."""
        trained = {id(p) for group in self.numbered[stage] for p in group.values()}
        return [p for p in self._everything[stage] if id(p) not in trained]

    def parts_on(self, context: int) -> List[Part]:
        """What a context of this process updates, in the order of the parameters."""
        replica, stage = self._grid.place(context)
        return [part for part in self._parts_of(stage) if part.owner in (None, replica)]

    def make_plain(self) -> None:
        """Puts weights whose parts are updated into MXNet's own layout, out of that of oneDNN, in which it keeps those
        of convolutions after a prediction: no part of such an array can be written."""
        if self._zero and not self.kept:
            for parameter in self.parameters:
                for ctx in self._contexts_of(self._stage_of[id(parameter)]):
                    if ctx.device_type == "cpu":
                        memory(parameter.data(ctx))

    def share(self) -> None:
        """Brings what was updated to the replicas that have not done it themselves, if they keep it."""
        if self.kept:
            return
        for stage, owners in self.owners.items():
            owners.share([{number: parameter.data(ctx) for group in self.numbered[stage]
                           for number, parameter in group.items()} for ctx in owners.contexts])

    def norm(self, held: Sequence[Sequence[Held]]) -> float:
        """The Euclidean norm of the gradient, given what the contexts here hold of it: see optim.clipping. Waits."""
        sums: Dict[Tuple[int, Part], List[float]] = {}
        for context, of_context in enumerate(held):
            replica, stage = self._grid.place(context)
            counted = [own for own in of_context if replica == self._one_of(own.part)
                       and own.part.parameter not in self._copies]  # one weight has one gradient
            for own, values in zip(counted, sums_of_squares([own.gradient for own in counted])):
                sums[stage, own.part] = values
        if self._spread:
            table = [sums.get(key, [0.0] * chunks(key[1].size)) for key in self._all_parts()]
            found = self._communicator.total(np.array(sum(table, [])))
        else:
            found = sum(sums.values(), [])
        return math.sqrt(math.fsum(found))

    def assemble(self, arrays: Sequence[Sequence[Arrays]], count: int) -> List[List[np.ndarray]]:
        """For each trained parameter `count` whole arrays of its shape, in rank 0. All processes call it.

        arrays: for each context here, and each of its parts_on, that many arrays.
        """
        here = {(self._grid.place(c), part): [array.asnumpy().ravel() for array in own]
                for c, of_context in enumerate(arrays) for part, own in zip(self.parts_on(c), of_context)
                if self._grid.place(c)[0] == self._one_of(part)}
        found: Dict[int, List[List[np.ndarray]]] = {}
        for stage, part in self._all_parts():
            replica = self._one_of(part)
            own = here.get(((replica, stage), part), [None] * count)
            told = [self._told(replica, stage, array, part.size) for array in own]
            if self._communicator.rank == 0 or not self._spread:  # others need no room for all of it
                found.setdefault(part.parameter, []).append(told)
        if not found:
            return []
        return [[np.concatenate(pieces).reshape(parameter.shape) for pieces in zip(*found[number])]
                for number, parameter in enumerate(self.parameters)]

    def weight(self, parameter: Parameter) -> np.ndarray:
        """A parameter, trained or not, in rank 0. All processes call it."""
        stage = self._stage_of[id(parameter)]
        if id(parameter) in self._later:
            return self._of_parts(parameter, stage) if self._dealt else parameter.list_data()[0].asnumpy()
        own = next((parameter.data(ctx).asnumpy() for ctx in self._contexts_of(stage)), None)
        if self._grid.span == 1:
            return own
        vector = own if own is None else own.ravel()
        return self._told(0, stage, vector, int(np.prod(parameter.shape))).reshape(parameter.shape)

    def forget_others(self) -> None:
        """Gives up the parameters of stages in other processes."""
        for stage, parameters in enumerate(self._everything):
            for parameter in parameters if not self._contexts_of(stage) else []:
                parameter._data = parameter._grad = None
        for stage, kept in self.kept.items():
            for group in self.numbered[stage]:
                for number, parameter in group.items():
                    self._deal_out(number, parameter, stage, kept)
        self._dealt = True

    def bring_home(self) -> None:
        """Puts all parameters on all contexts. All processes call it."""
        if self._grid.stages == 1 and not self._later:
            return
        for parameter in (parameter for stage in self._everything for parameter in stage):
            values = self.weight(parameter)
            parameter.initialize("zeros", self._contexts, force_reinit=True)
            parameter.set_data(mx.nd.array(values))

    def _deal_out(self, number: int, parameter: Parameter, stage: int, kept: List[Dict[Part, mx.nd.NDArray]]) -> None:
        """Gives each replica here its parts of a parameter, and nobody the whole."""
        contexts = self._contexts_of(stage)
        parameter.grad_req = "null"
        parameter.reset_ctx(contexts)
        arrays = parameter.list_data()
        for here, ctx in enumerate(contexts):
            for part in (part for part in kept[here] if part.parameter == number):
                flat(arrays[here], part).copyto(kept[here][part])
            arrays[here] = absent(ctx)
        mx.nd.waitall()  # or many whole ones would be there at a time

    def _of_parts(self, parameter: Parameter, stage: int) -> np.ndarray:
        number = next(n for group in self.numbered[stage] for n, p in group.items() if p is parameter)
        here = {part: own for kept in self.kept.get(stage, []) for part, own in kept.items()}
        pieces = [self._told(part.owner, stage, here[part].asnumpy() if part in here else None, part.size)
                  for part in self._parts_of(stage) if part.parameter == number]
        return np.concatenate(pieces).reshape(parameter.shape)

    def _contexts_of(self, stage: int) -> List[mx.Context]:
        """Those here that hold a stage."""
        return [ctx for context, ctx in enumerate(self._contexts) if self._grid.place(context)[1] == stage]

    def _one_of(self, part: Optional[Part]) -> int:
        """The replica that counts for a part, of those that hold it; for all processes, or here."""
        if part is not None and part.owner is not None:
            return part.owner
        return 0 if self._spread else self._grid.here.start

    def _told(self, replica: int, stage: int, vector: Optional[np.ndarray], size: int) -> np.ndarray:
        """A vector that the device of a stage of a replica has."""
        if not self._spread:
            return vector
        return self._communicator.told(self._grid.rank_of(replica, stage), vector, size)

    def _parts_of(self, stage: int) -> List[Part]:
        return [part for group in self._parts[stage] for part in group]

    def _all_parts(self) -> Iterator[Tuple[int, Part]]:
        """(stage, part), the same in all processes."""
        return ((stage, part) for stage in range(len(self._parts)) for part in self._parts_of(stage))


def _parts(stages: List[List[Dict[int, Parameter]]], replicas: int, zero: bool, whole: bool,
           copies: Dict[int, int]) -> List[List[List[Part]]]:
    """What is updated in one go: for each stage, by groups. copies: parameter -> the one that it is equal to, both by
    their numbers; their parts have the same owners."""
    found: Dict[int, List[Part]] = {}
    result = []
    for groups in stages:
        loads = [0] * replicas
        result.append([])
        for group in groups:
            sizes = {number: int(np.prod(p.shape)) for number, p in group.items()}
            for of_copies in (False, True):  # the copy of a parameter comes after it
                chosen = {number: size for number, size in sizes.items() if (number in copies) == of_copies}
                like = {number: found[copies[number]] for number in chosen if of_copies}
                parts = (deal(chosen, replicas, whole, like, loads) if zero else
                         [Part(number, 0, size, None) for number, size in chosen.items()])
                for part in parts:
                    found.setdefault(part.parameter, []).append(part)
            result[-1].append([part for number in group for part in found[number]])
    return result
