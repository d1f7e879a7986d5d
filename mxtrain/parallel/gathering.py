"""ZeRO 3: a device has the weights of a group of the network while the group runs there, and not longer."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from mxtrain.parallel.zero import Owners, Part, ScatteredGradients, absent, without_memory

_ALIGNED = 64
"""Elements between which weights begin in memory, so that they are aligned as arrays of their own: operators may add in
another order for other addresses."""


class Gathering:
    """The weights of the groups of one replica's stage, one group at a time.

    groups: the trained parameters of each, by their numbers. owners: of the stage. kept: of each replica here, what it
    owns. here: number of this replica among them.

    All groups use the same memory, so that one is brought there when the one before it has been run.
    """

    def __init__(self, groups: List[Dict[int, Parameter]], owners: Owners, kept: Sequence[Dict[Part, mx.nd.NDArray]],
                 here: int):
        self._groups, self._owners, self._kept, self._here = groups, owners, kept, here
        self._ctx = owners.contexts[here]
        self._starts, sizes = [], []
        for group in groups:
            lengths = [-(-int(np.prod(p.shape)) // _ALIGNED) * _ALIGNED for p in group.values()]
            self._starts.append(dict(zip(group, np.cumsum([0, *lengths]).tolist())))
            sizes.append(sum(lengths))
        self._size = max(1, *sizes)
        self._absent = absent(self._ctx)
        self._memory: Optional[mx.nd.NDArray] = None
        self._before: Optional[mx.nd.NDArray] = None  # what was asked for last comes there

    def open(self, group: int, predict: bool = False) -> Dict[int, mx.nd.NDArray]:
        """Puts the weights of a group into its parameters; returns them by number. predict: see `close`."""
        self._wait()
        if predict and self._ctx.device_type == "cpu":
            # oneDNN may bring weights of a prediction into an order of its own, which no part of an array can be in.
            weights = {number: mx.nd.empty(p.shape, self._ctx) for number, p in self._groups[group].items()}
            self._before = None
        else:
            if self._memory is None:
                self._memory = without_memory((self._size,), self._ctx)
            weights = {number: self._memory[start:start + int(np.prod(p.shape))].reshape(p.shape)
                       for (number, p), start in zip(self._groups[group].items(), self._starts[group].values())}
            self._before = self._memory
        self._owners.gather(group, self._here, self._kept, weights)
        self._put(group, weights)
        return weights

    def close(self, group: int, output: Optional[mx.nd.NDArray] = None) -> None:
        """Takes the weights away. output: of a prediction, with which they have arrays of their own."""
        self._put(group, dict.fromkeys(self._groups[group], self._absent))
        if output is not None and self._ctx.device_type == "cpu":
            output.wait_to_read()

    def join(self, group: int) -> None:
        """Only has other processes get what is owned here."""
        self._wait()
        self._before = self._owners.gather(group, self._here, self._kept, {})

    def end(self) -> None:
        """Gives up the memory, until a group is opened."""
        self._memory = self._before = None

    def _wait(self) -> None:
        """Waits, among processes, until the weights that were asked for last are there, and so the groups before them
        have been run: what is on its way takes memory of its own."""
        if self._owners.peers.size > 1 and self._before is not None:
            self._before.wait_to_read()

    def _put(self, group: int, arrays: Dict[int, mx.nd.NDArray]) -> None:
        for number, parameter in self._groups[group].items():
            parameter.list_data()[parameter.list_ctx().index(self._ctx)] = arrays[number]


class GatheredGradients(ScatteredGradients):
    """Gradients that are handed over to their owners, of weights that are there for one group at a time."""

    def before_shard(self, shard: int) -> None:
        self._open[shard] = {}

    def before_group(self, shard: int, group: int, weights: Dict[int, mx.nd.NDArray]) -> None:
        """weights: that the next backward takes the gradients of, by the parameters' numbers."""
        self._open[shard][group] = self._mark(weights)

    def after_group(self, shard: int, group: int) -> None:
        self._scatter.hand(*self._place, group, self._open[shard].pop(group))

    def join(self, group: int) -> None:
        """Hands over nothing, for a shard of other processes."""
        self._scatter.hand(*self._place, group, {})
