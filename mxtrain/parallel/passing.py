"""What the stages of a pipeline hand to each other: outputs on the way forward, their gradients on the way back."""

from __future__ import annotations

from typing import Dict, Hashable, List, NamedTuple, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block

from mxtrain.errors import UserError
from mxtrain.parallel.communicator import Communicator
from mxtrain.parallel.grid import Grid


class Boundary(NamedTuple):
    """An array that one stage gives to the next."""

    per_row: int
    """Its rows for each of a shard's."""
    rest: Tuple[int, ...]
    """Its shape without the first axis."""
    dtype: type

    def shape(self, rows: int) -> Tuple[int, ...]:
        return (rows * self.per_row, *self.rest)


def boundaries(segments: Sequence[Block], stages: Sequence[int], sample: Sequence[mx.nd.NDArray]) -> List[Boundary]:
    """What comes into each stage but the first. Raises UserError for what is no array with rows.

    stages: index of the first segment of each. sample: the network's inputs, of a row or two, on a context that has all
    of its parameters.
    """
    found, x = [], list(sample)
    for number, segment in enumerate(segments[:stages[-1]], 1):
        with autograd.predict_mode():
            x = [segment(*x)]
        if number in stages:
            if not isinstance(x[0], mx.nd.NDArray) or len(x[0]) % len(sample[0]):
                raise UserError(f"--pp {len(stages)}: segment {number - 1} ({type(segment).__name__}) does not give one "
                                "array with as many rows for each sample; --cut elsewhere")
            found.append(Boundary(len(x[0]) // len(sample[0]), x[0].shape[1:], x[0].dtype))
    return found


class Passing:
    """Brings arrays from stage to stage of the replicas that this process has a part of.

    between: what comes into each stage but the first.
    """

    def __init__(self, grid: Grid, contexts: Sequence[mx.Context], communicator: Communicator,
                 between: Sequence[Boundary]):
        self._grid, self._contexts, self._communicator, self._between = grid, contexts, communicator, between
        self._arrived: Dict[Tuple[int, Hashable], mx.nd.NDArray] = {}

    def clear(self) -> None:
        """Forgets what a batch that failed has left."""
        self._arrived.clear()

    def give(self, context: int, stage: int, name: Hashable, array: mx.nd.NDArray) -> None:
        """Sends an array from a context here to a stage of the same replica, which takes it by its name."""
        replica = self._grid.place(context)[0]
        there = self._grid.context_of(replica, stage)
        if there is None:
            self._communicator.send(array, self._grid.rank_of(replica, stage))
        else:
            self._arrived[there, name] = array.as_in_context(self._contexts[there])

    def skip(self, context: int, stage: int, name: Hashable) -> None:
        """Has nothing be there where `give` would bring an array, for a shard without rows."""
        there = self._grid.context_of(self._grid.place(context)[0], stage)
        if there is not None:
            self._arrived[there, name] = None

    def is_there(self, context: int, stage: int, name: Hashable) -> bool:
        """Whether a context here can take what a stage of the same replica gives it: from other processes always, since
        taking does not wait."""
        elsewhere = self._grid.context_of(self._grid.place(context)[0], stage) is None
        return elsewhere or (context, name) in self._arrived

    def take(self, context: int, stage: int, name: Hashable, rows: int) -> mx.nd.NDArray:
        """What a stage of the same replica gives a context here, for a shard of so many rows. From another process
        arrays are taken in the order in which they are given."""
        replica, own = self._grid.place(context)
        if self._grid.context_of(replica, stage) is not None:
            return self._arrived.pop((context, name))
        boundary = self._between[max(stage, own) - 1]
        return self._communicator.receive(boundary.shape(rows), boundary.dtype, self._contexts[context],
                                          self._grid.rank_of(replica, stage))

    def add_from_each_other(self, replica: int, stages: Tuple[int, int], arrays: Tuple[list, list]) -> None:
        """Makes arrays of two stages of a replica their sums, pair by pair. Those of a stage in another process are not
        given here."""
        here, there = [], []
        for stage, of_stage in zip(stages, arrays):
            if self._grid.context_of(replica, stage) is None:
                there.append(self._grid.rank_of(replica, stage))
            else:
                here.append(of_stage)
        if not here:
            return  # this process has a stage between the two
        if there:
            for array in here[0]:
                self._communicator.send(array, there[0])
            for array in here[0]:
                array += self._communicator.receive(array.shape, array.dtype, array.context, there[0])
        else:
            for first, second in zip(*here):
                first += second.as_in_context(first.context)
                first.copyto(second)
