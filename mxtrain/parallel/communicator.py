"""What processes and contexts have in common: sums of arrays, and everything that can be made of sums.

A communicator has `rank` and `size`, and

    allreduce(arrays)   sums over all contexts of all processes, on the devices, without waiting
    total(values)       sums over processes on the host, at once
    tell(values)        the same, but what it returns gives the sum, and may be called later
    share(value)        what rank 0 has, as JSON
    gather(value)       what each has, as JSON
    broadcast(arrays)   what rank 0 has, on the devices
    together(function)  runs it everywhere; fails everywhere when it fails somewhere
    barrier(), rest(), close()

    reduce_scatter(array), all_gather(array)    a sum of which each process gets its part, and the reverse
    added(array)                                a sum, of one array of each process
    meet(groups), among(ranks)                  the communicator of some of the processes

`InProcess` is that of a single process, `AmongProcesses` the base of the others, which only say how processes add.
Horovod alone can do without all processes: it has groups, and `send` and `receive` between two.
"""

from __future__ import annotations

import functools
import json
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from mxtrain.errors import Elsewhere, TrainingError, UserError
from mxtrain.parallel.world import World


class Communicator:
    """What a single process says to itself, and what is made of `total`."""

    rank = 0
    size = 1
    compression: Optional[Any] = None
    """What processes send the first arrays of an `allreduce` as: see parallel.compression."""
    apart = False
    """Whether every process updates the weights by its own part of a batch, without waiting for the others."""
    ahead = 0
    """How many batches before its turn processes `tell` of a batch."""
    sends = False
    """Whether one process can send to another: see `send` of Horovod."""
    seconds_between_logs = 0.5
    """A log waits for all processes."""

    def known(self, world: World) -> World:
        """The world, with what is known of it only now that the processes have met."""
        return world

    def use(self, contexts: Sequence[mx.Context]) -> None:
        """The contexts of this process, in front of the first `allreduce`."""

    def meet(self, groups: Sequence[Tuple[int, ...]]) -> None:
        """Says which groups of ranks, ascending, will be asked for by `among`, and which pairs will send and receive.

        All processes call it with the same groups in front of a training, when nobody waits for anything. Groups may be
        known already; that of all is named only where it is a pair that sends. UserError where processes can only add,
        and all of them.
        """
        if any(len(ranks) > 1 for ranks in groups):
            raise UserError("a pipeline over several processes needs Horovod, which sends from one to another: start "
                            "them by horovodrun, or by scripts/launch.py --transport horovod")

    def among(self, ranks: Sequence[int]) -> Communicator:
        """The communicator of some ranks, with this one among them; the same one each time. Where these are several
        and not all, `meet` must have named them. Ask again after `use`."""
        return self

    def reduce_scatter(self, array: mx.nd.NDArray, tag: str = "") -> mx.nd.NDArray:
        """A vector of size * n elements, on one context -> the sum over the processes of this one's n elements, which
        are those from rank * n on; without waiting.

        tag: under each, all processes make the same calls in the same order; those of different tags may be mixed.
        """
        return array

    def all_gather(self, array: mx.nd.NDArray, tag: str = "") -> mx.nd.NDArray:
        """A vector of n elements, on one context -> the size * n elements of all processes, in the order of the ranks,
        bit for bit; without waiting. tag: see reduce_scatter."""
        return array

    def added(self, array: mx.nd.NDArray, tag: str = "") -> mx.nd.NDArray:
        """The sum over the processes of an array on one context, as another array, without waiting. tag: see
        reduce_scatter."""
        return array.copy()

    def total(self, values: np.ndarray) -> np.ndarray:
        """Sums over the processes of a float64 array that has the same shape in all. Waits for all."""
        return values

    def tell(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        """Has the processes add up arrays of the same size -> what gives the sum. Between a call and that of its answer
        may be up to `ahead` others. Where processes are not `apart`, it waits for all already."""
        total = self.total(values)
        return lambda: total

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

    def told(self, root: int, vector: Optional[np.ndarray], size: int) -> np.ndarray:
        """The float32 vector of the process `root`, in all; that of others is not looked at."""
        mine = vector if self.rank == root else np.full(size, -0.0)  # 0 and -0 would make 0
        return self.total(mine.astype("float64")).astype("float32")

    def broadcast(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Replaces arrays by those of rank 0, bit for bit."""

    def together(self, function: Callable[[], Any]) -> Any:
        """What the function returns here, if it can be done in every process.

        Where it raises a UserError or TrainingError this is raised; the other processes raise Elsewhere. What is raised
        in all is for rank 0 to say.
        """
        result, error = None, None
        try:
            result = function()
        except (UserError, TrainingError) as caught:
            error = caught
        failed = self.total(np.array([float(error is not None)]))[0]
        if error is not None:
            raise self.once(error) if failed == self.size else error
        if failed:
            raise Elsewhere(f"{failed:.0f} of {self.size} processes cannot go on")
        return result

    def once(self, error: Exception) -> Exception:
        """What to raise for an error that every process has come upon: it is for rank 0 to say."""
        return error if self.rank == 0 else Elsewhere(f"rank 0 has the same: {error}")

    def check_same(self, value: Any, mistake: Callable[[Any], str]) -> None:
        """Raises UserError, with what `mistake` makes of rank 0's value, where the value is another than that;
        Elsewhere in the other processes."""
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
        # Made even for a single context, so that a wrong name never passes for a right one. One for each set of contexts:
        # MXNet adds all arrays of a store where those of its first sum are.
        self._stores = {} if kvstore == "none" else {tuple(contexts): mx.kv.create(kvstore)}
        self._known, self._alone = set(), len(contexts) == 1

    def allreduce(self, arrays: Sequence[List[mx.nd.NDArray]]) -> None:
        """Replaces every array by the sum over its replicas.

        arrays: for each array, its copies on the contexts that have it, in the contexts' order. Every call passes arrays
        of the same shapes on the same contexts in the same order.
        """
        if self._alone:
            return
        of_contexts: Dict[tuple, List[int]] = {}
        for number, copies in enumerate(arrays):
            if len(copies) > 1:
                of_contexts.setdefault(tuple(copy.context for copy in copies), []).append(number)
        for contexts, numbers in of_contexts.items():
            own = [arrays[number] for number in numbers]
            if self._kvstore == "none":
                for copies in own:
                    _sum_by_copies(copies)
                continue
            if contexts not in self._stores:
                self._stores[contexts] = mx.kv.create(self._kvstore)
            store = self._stores[contexts]
            if contexts not in self._known:
                store.init(numbers, [mx.nd.zeros(copies[0].shape, dtype=copies[0].dtype) for copies in own])
                self._known.add(contexts)
            store.pushpull(numbers, own, out=own)


class AmongProcesses(Communicator):
    """First the contexts of a process add, in a KVStore; then the processes, on their first contexts, by `_add`."""

    def use(self, contexts: Sequence[mx.Context]) -> None:
        self._contexts = list(contexts)
        self._within = InProcess("device", contexts)

    def among(self, ranks: Sequence[int]) -> Communicator:
        if len(ranks) == self.size:
            return self
        return InProcess("device", self._contexts) if len(ranks) == 1 else self._group(tuple(ranks))

    def _group(self, ranks: Tuple[int, ...]) -> Communicator:
        """The communicator of a group that `meet` allowed."""
        raise NotImplementedError

    def reduce_scatter(self, array: mx.nd.NDArray, tag: str = "") -> mx.nd.NDArray:
        part = array.size // self.size
        return self._added(array, tag)[self.rank * part:(self.rank + 1) * part].copy()

    def all_gather(self, array: mx.nd.NDArray, tag: str = "") -> mx.nd.NDArray:
        # Negative zeros: added to anything, 0 and -0 too, they leave its bits.
        whole = -mx.nd.zeros((self.size * array.size,), ctx=array.context, dtype=array.dtype)
        whole[self.rank * array.size:(self.rank + 1) * array.size] = array
        return self._added(whole, tag)

    def added(self, array: mx.nd.NDArray, tag: str = "") -> mx.nd.NDArray:
        return self._added(array, tag)

    def _added(self, array: mx.nd.NDArray, tag: str) -> mx.nd.NDArray:
        """See added."""
        raise NotImplementedError

    def allreduce(self, arrays: Sequence[List[mx.nd.NDArray]]) -> None:
        """See InProcess. The first arrays, as many as `compression` counts, are sent compressed."""
        self._within.allreduce(arrays)
        if self.size == 1:
            return
        firsts, compression = [copies[0] for copies in arrays], self.compression
        if compression is None:
            self._add(firsts)
        else:
            compressed, others = firsts[:compression.count], firsts[compression.count:]
            packed = compression.pack(compressed)
            self._add([*packed, *others])
            compression.unpack(packed, compressed)
        for first, *others in arrays:
            for other in others:
                first.copyto(other)

    def _add(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Replaces arrays by their sums over the processes, without waiting."""
        raise NotImplementedError


def connect(world: World, contexts: Sequence[mx.Context] = ()) -> Communicator:
    """The communicator for a world. When there may be several processes, they meet here, once in the life of each; the
    contexts may also be told later, by `use`."""
    if not world.several:
        return InProcess(world.kvstore, contexts)
    communicator = _meet(world.kvstore, world.size)
    if contexts:
        communicator.use(contexts)
    return communicator


@functools.lru_cache(None)
def _meet(kvstore: str, size: int) -> Communicator:
    if kvstore == "horovod":
        from mxtrain.parallel.horovod import Horovod

        return Horovod(size)
    if kvstore == "dist_async":
        from mxtrain.parallel.asynchronous import Asynchronous

        return Asynchronous()
    from mxtrain.parallel.server import ParameterServer

    return ParameterServer(kvstore)


def _sum_by_copies(copies: List[mx.nd.NDArray]) -> None:
    total = copies[0]
    for other in copies[1:]:
        total += other.as_in_context(total.context)
    for other in copies[1:]:
        total.copyto(other)
