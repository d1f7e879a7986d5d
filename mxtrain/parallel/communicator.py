"""What processes and contexts have in common: sums of arrays, and everything that can be made of sums.

A communicator has `rank` and `size`, and

    allreduce(arrays)   sums over all contexts of all processes, on the devices, without waiting
    total(values)       sums over processes on the host, at once
    share(value)        what rank 0 has, as JSON
    gather(value)       what each has, as JSON
    broadcast(arrays)   what rank 0 has, on the devices
    together(function)  runs it everywhere; fails everywhere when it fails somewhere
    barrier(), rest(), close()

`InProcess` is that of a single process and the base of the others, which only say how processes add.
"""

from __future__ import annotations

import functools
import json
from typing import Any, Callable, List, Sequence

import mxnet as mx
import numpy as np

from mxtrain.errors import Elsewhere, TrainingError, UserError
from mxtrain.parallel.world import World


class Communicator:
    """What a single process says to itself, and what is made of `total`."""

    rank = 0
    size = 1

    def use(self, contexts: Sequence[mx.Context]) -> None:
        """The contexts of this process, in front of the first `allreduce`."""

    def compress(self, kind: str, count: int) -> None:
        """Has the first `count` arrays of each `allreduce` sent in another form: see ParallelConfig.compression."""

    def total(self, values: np.ndarray) -> np.ndarray:
        """Sums over the processes of a float64 array that has the same shape in all. Waits for all."""
        return values

    def share(self, value: Any) -> Any:
        """The value of rank 0, which must be fit for JSON; that of others is not looked at."""
        return self.gather(value if self.rank == 0 else None)[0]

    def gather(self, value: Any) -> List[Any]:
        """The values of all processes, which must be fit for JSON, in the order of the ranks."""
        if self.size == 1:
            return [value]
        encoded = b"" if value is None else json.dumps(value).encode()
        lengths = np.zeros(self.size)
        lengths[self.rank] = len(encoded)
        ends = np.cumsum(self.total(lengths)).astype(int)
        letters = np.zeros(ends[-1])
        letters[ends[self.rank] - len(encoded):ends[self.rank]] = np.frombuffer(encoded, np.uint8)
        texts = np.split(self.total(letters).astype(np.uint8), ends[:-1])
        return [json.loads(text.tobytes().decode()) if len(text) else None for text in texts]

    def broadcast(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Replaces arrays by those of rank 0, bit for bit."""

    def together(self, function: Callable[[], Any]) -> Any:
        """What the function returns here, if it can be done in every process.

        Where it raises a UserError or TrainingError this is raised; the other processes raise Elsewhere.
        """
        result, error = None, None
        try:
            result = function()
        except (UserError, TrainingError) as caught:
            error = caught
        failed = self.total(np.array([float(error is not None)]))[0]
        if error is not None:
            raise error
        if failed:
            raise Elsewhere(f"{failed:.0f} of {self.size} processes cannot go on")
        return result

    def check_same(self, value: Any, mistake: Callable[[Any], str]) -> None:
        """Raises UserError, with what `mistake` makes of rank 0's value, where the value is another than that; Elsewhere
        in the other processes."""
        expected = self.share(value)

        def compare() -> None:
            if value != expected:
                raise UserError(mistake(expected))

        self.together(compare)

    def lost_peer(self, error: Exception) -> bool:
        """Whether an error of MXNet only says that another process has gone."""
        return False

    def barrier(self) -> None:
        """Returns when all processes have come here."""
        self.total(np.zeros(1))

    def check_exact(self) -> None:
        """Raises UserError when sums of float64 numbers would be rounded on their way."""

    def rest(self) -> None:
        """Nothing is asked of the other processes until `use` is called again; until then this one may end."""

    def close(self) -> None:
        """Takes leave of the other processes, for ever."""


ALONE = Communicator()


class InProcess(Communicator):
    """Sums over a list of contexts by one of MXNet's KVStores, or by plain copies when its name is "none"."""

    def __init__(self, kvstore: str, contexts: Sequence[mx.Context]):
        self._kvstore = kvstore
        self.use(contexts)

    def use(self, contexts: Sequence[mx.Context]) -> None:
        kvstore = self._kvstore
        on_gpus = contexts[0].device_type == "gpu"
        if kvstore == "nccl" and not (on_gpus and mx.runtime.Features().is_enabled("NCCL")):
            raise UserError("--kvstore nccl: needs GPUs and an MXNet built with NCCL; use device or local")
        # Made even for a single context, so that a wrong name never passes for a right one.
        self._store = None if kvstore == "none" else mx.kv.create(kvstore)
        self._contexts = list(contexts)
        self._known = False

    def allreduce(self, arrays: Sequence[List[mx.nd.NDArray]]) -> None:
        """Replaces every array by the sum over its replicas.

        arrays: for each array, its copies on the contexts, in the contexts' order. Every call passes arrays
        of the same shapes in the same order.
        """
        if len(self._contexts) == 1 or not arrays:
            return
        if self._store is None:
            for copies in arrays:
                _sum_by_copies(copies)
            return
        keys = list(range(len(arrays)))
        if not self._known:
            self._store.init(keys, [mx.nd.zeros(copies[0].shape, dtype=copies[0].dtype) for copies in arrays])
            self._known = True
        self._store.pushpull(keys, list(arrays), out=list(arrays))


def connect(world: World, contexts: Sequence[mx.Context] = ()) -> Communicator:
    """The communicator for a world. When there may be several processes, they meet here, once in the life of each; the
    contexts may also be told later, by `use`."""
    if not world.several:
        return InProcess(world.kvstore, contexts)
    communicator = _meet(world)
    if contexts:
        communicator.use(contexts)
    return communicator


@functools.lru_cache(None)
def _meet(world: World) -> Communicator:
    if world.kvstore == "horovod":
        from mxtrain.parallel.horovod import Horovod

        return Horovod()
    from mxtrain.parallel.server import ParameterServer

    return ParameterServer(world.kvstore)


def _sum_by_copies(copies: List[mx.nd.NDArray]) -> None:
    total = copies[0]
    for other in copies[1:]:
        total += other.as_in_context(total.context)
    for other in copies[1:]:
        total.copyto(other)
