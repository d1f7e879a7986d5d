"""Processes that add by Horovod's allreduce."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from mxtrain.devices import visible_gpus
from mxtrain.errors import LostPeer, UserError
from mxtrain.parallel.communicator import AmongProcesses
from mxtrain.parallel.world import World

_SHUT_DOWN = "Horovod has been shut down"
_C = ctypes.CDLL(None)


class _Group(AmongProcesses):
    """Sums in rings of the first contexts of some processes.

    hvd: Horovod's module. ranks: of all of them, ascending. processes: Horovod's set of them.
    """

    def __init__(self, hvd: Any, ranks: Sequence[int], processes: Any):
        self._hvd, self._ranks, self._set = hvd, list(ranks), processes
        self.rank, self.size = self._ranks.index(hvd.rank()), len(self._ranks)
        self._names: Counter = Counter()

    def _add(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        for number, array in enumerate(arrays):
            # The last layers' gradients are there first, but the first layers' weights are needed first.
            self._hvd.allreduce_(array, op=self._hvd.Sum, name=f"sum.{number}", priority=-number, process_set=self._set)

    def reduce_scatter(self, array: mx.nd.NDArray, tag: str = "") -> mx.nd.NDArray:
        with _result((array.size // self.size,), array) as (part, c_part):
            check_call(_library().horovod_mxnet_reducescatter_async(
                ctypes.byref(array.handle), ctypes.byref(c_part), self._name(tag), 0, self._set.process_set_id, 1,
                self._hvd.Sum, ctypes.c_double(1), ctypes.c_double(1)))
        return part

    def all_gather(self, array: mx.nd.NDArray, tag: str = "") -> mx.nd.NDArray:
        with _result((array.size * self.size,), array) as (whole, c_whole):
            check_call(_library().horovod_mxnet_allgather_async(
                ctypes.byref(array.handle), ctypes.byref(c_whole), self._name(tag), 0, self._set.process_set_id, 1))
        return whole

    def _name(self, tag: str) -> bytes:
        """A new one: Horovod refuses an operation when one of the same name is not done yet."""
        self._names[tag] += 1
        return f"{tag}.{self._names[tag]}".encode()

    def total(self, values: np.ndarray) -> np.ndarray:
        if self.size == 1 or not values.size:
            return values
        array = mx.nd.array(values, dtype="float64")
        try:
            total = self._hvd.allreduce(array, op=self._hvd.Sum, name=f"total.{values.size}",
                                        process_set=self._set).asnumpy()
        except mx.base.MXNetError as error:
            if not self.lost_peer(error):
                raise
            raise LostPeer(f"another process has gone: {_SHUT_DOWN}") from None
        return total.reshape(values.shape)

    def lost_peer(self, error: Exception) -> bool:
        return self.size > 1 and _SHUT_DOWN in str(error)

    def broadcast(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        for number, array in enumerate(arrays):
            # A copy by way of the host: Horovod cannot read weights that oneDNN has put into a layout of its own.
            plain = mx.nd.array(array.asnumpy(), dtype=array.dtype)
            self._hvd.broadcast_(plain, root_rank=self._ranks[0], name=f"broadcast.{number}", process_set=self._set)
            plain.copyto(array)


class Horovod(_Group):
    """The group of all processes.

    started: number of processes that the launcher has started.
    """

    sends = True

    def __init__(self, started: int):
        try:
            import horovod.mxnet as hvd
        except ImportError as error:
            raise UserError(f"--kvstore horovod: Horovod for MXNet is not installed ({error}); "
                            "make setup HOROVOD=1 builds it") from None
        # To wait for a checkpoint that rank 0 writes, or for data, is no stall, as Horovod says after a minute.
        os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", "600")
        self._slow = not visible_gpus()[0] and "HOROVOD_CYCLE_TIME" not in os.environ
        if self._slow:
            # A cycle takes time of cores that compute: with Horovod's default, 1 ms, a tenth of a step of ResNet-18.
            os.environ["HOROVOD_CYCLE_TIME"] = "5"
        hvd.init()
        super().__init__(hvd, range(hvd.size()), hvd.global_process_set)
        self._sets: Dict[Tuple[int, ...], Any] = {tuple(self._ranks): self._set}
        self._groups: Dict[Tuple[int, ...], _Group] = {}
        self._hops: Counter = Counter()
        if self.size != started:
            raise UserError(
                f"--kvstore horovod: {started} processes were started, and Horovod, built without MPI, knows of "
                f"{self.size}; start them by horovodrun -np {started} python scripts/train.py ..., or say --kvstore "
                "device for trainings that do not hear of each other")

    def known(self, world: World) -> World:
        # mpirun and srun do not say it, or each in another way.
        return world._replace(local_rank=self._hvd.local_rank(), local_size=self._hvd.local_size())

    def use(self, contexts: Sequence[mx.Context]) -> None:
        super().use(contexts)
        self._groups.clear()

    def meet(self, groups: Sequence[Tuple[int, ...]]) -> None:
        new = set(groups) - set(self._sets)
        if not new and not (groups and self._slow):
            return
        if self._hvd.mpi_enabled():
            raise UserError("--kvstore horovod: these processes have met by MPI, where they cannot meet again in "
                            "groups, as pipelines need it; start them by horovodrun --gloo")
        self.rest()
        # Sets can be added later only in a mode that costs all trainings a message in every cycle.
        self._hvd.shutdown()
        if self._slow:
            # What is sent waits for a cycle at every hop.
            os.environ["HOROVOD_CYCLE_TIME"], self._slow = "1", False
        self._sets.update((ranks, self._hvd.ProcessSet(ranks)) for ranks in new)
        # In the same order everywhere. A set of all is refused: it is there without asking.
        self._hvd.init(process_sets=[self._sets[ranks] for ranks in sorted(self._sets) if len(ranks) < self.size])

    def _group(self, ranks: Tuple[int, ...]) -> _Group:
        if ranks not in self._groups:
            self._groups[ranks] = _Group(self._hvd, ranks, self._sets[ranks])
            self._groups[ranks].use(self._contexts)
        return self._groups[ranks]

    def send(self, array: mx.nd.NDArray, to: int, tag: str = "") -> None:
        """Sends an array to another rank, which receives it, without waiting. `meet` must have named the pair.

        tag: what is sent from one to another under one tag is received in the order in which it was sent.
        """
        # A copy has the layout that Horovod reads, whatever oneDNN's operators have made of the array.
        self._hop(mx.nd.identity(array), self.rank, to, tag)

    def receive(self, shape: Tuple[int, ...], dtype: Any, ctx: mx.Context, source: int, tag: str = "") -> mx.nd.NDArray:
        """What another rank sends, to be used at once, without waiting: see `send`."""
        array = mx.nd.empty(shape, ctx, dtype)
        self._hop(array, source, self.rank, tag)
        return array

    def _hop(self, array: mx.nd.NDArray, source: int, to: int, tag: str) -> None:
        """A broadcast in a set of two."""
        way = (source, to, tag)
        self._hops[way] += 1
        self._hvd.broadcast_(array, root_rank=source, name=f"{source}.{tag}.{self._hops[way]}",
                             process_set=self._sets[tuple(sorted((source, to)))])

    def rest(self) -> None:
        # The first process that ends has Horovod end in all, also where two others still have something to say.
        mx.nd.waitall()
        self.barrier()

    def close(self) -> None:
        self.rest()
        self._hvd.shutdown()


@contextmanager
def _result(shape: Tuple[int, ...], like: mx.nd.NDArray) -> Iterator[Tuple[mx.nd.NDArray, ctypes.c_void_p]]:
    """An array for what an operation of Horovod gives, and a handle of it to call the operation with.

    Horovod's own functions wait, since they find out shapes later, and they leave the handle that they were given to a
    thread that knows nothing of its end. This handle is freed by MXNet's engine, when what has been begun meanwhile is
    done, whatever becomes of the array.
    """
    array, handle = mx.nd.empty(shape, like.context, like.dtype), ctypes.c_void_p()
    check_call(_LIB.MXShallowCopyNDArray(array.handle, ctypes.byref(handle)))
    yield array, handle
    check_call(_LIB.MXEnginePushSyncND(
        _C.getpid, handle, _LIB.MXNDArrayFree, ctypes.byref((ctypes.c_int * 2)(1, 0)), ctypes.byref(array.handle), 1,
        None, 0, None, 0, None))


def _library() -> ctypes.CDLL:
    from horovod.mxnet.mpi_ops import MPI_MXNET_LIB_CTYPES

    return MPI_MXNET_LIB_CTYPES
