"""Processes that add by Horovod's allreduce, all or some of them, and send each other arrays by its broadcast."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from typing import Any, Dict, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from mxtrain.devices import visible_gpus
from mxtrain.errors import LostPeer, UserError
from mxtrain.parallel.communicator import AmongProcesses
from mxtrain.parallel.world import World

_SHUT_DOWN = "Horovod has been shut down"
_IN_FLIGHT = 16  # operations of one kind
_NOTHING = ctypes.CDLL(None).getpid  # for the engine to call, from a thread that has never heard of Python


class _Group(AmongProcesses):
    """Sums in rings of the first contexts of some processes.

    hvd: Horovod's module. ranks: of all of them, ascending. processes: Horovod's set of them.
    """

    def __init__(self, hvd: Any, ranks: Sequence[int], processes: Any):
        self._hvd, self._ranks, self._set = hvd, list(ranks), processes
        self.rank, self.size = self._ranks.index(hvd.rank()), len(self._ranks)
        self._turns: Counter = Counter()
        self._done: Dict[str, mx.nd.NDArray] = {}  # name -> what is written when the last operation of the name is done

    def _add(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        for number, array in enumerate(arrays):
            # The last layers' gradients are there first, but the first layers' weights are needed first.
            self._hvd.allreduce_(array, op=self._hvd.Sum, name=f"sum.{number}", priority=-number, process_set=self._set)

    def _added(self, array: mx.nd.NDArray, tag: str) -> mx.nd.NDArray:
        # For reduce_scatter. Gloo's own takes two to four times as long as this, which sends twice as much.
        total = array.copy()
        name = self._turn(f"scatter.{tag}", total)
        self._hvd.allreduce_(total, op=self._hvd.Sum, name=name, process_set=self._set)
        _order(total, self._done[name])
        return total

    def all_gather(self, array: mx.nd.NDArray, tag: str = "") -> mx.nd.NDArray:
        # hvd.allgather waits, since it finds out the shape later. It also leaves the handle of its result to a thread
        # that knows nothing of its end, so that this one is freed by MXNet's engine, whatever becomes of the array.
        whole = mx.nd.empty((array.size * self.size,), array.context, array.dtype)
        handle, name = ctypes.c_void_p(), self._turn(f"gather.{tag}", whole)
        check_call(_LIB.MXShallowCopyNDArray(whole.handle, ctypes.byref(handle)))
        check_call(self._hvd.mpi_ops.MPI_MXNET_LIB_CTYPES.horovod_mxnet_allgather_async(
            ctypes.byref(array.handle), ctypes.byref(handle), name.encode(), 0, self._set.process_set_id, 1))
        _order(whole, self._done[name], handle)
        return whole

    def _turn(self, what: str, array: mx.nd.NDArray) -> str:
        """The name of an operation that writes an array, and so waits for the last operation of the name.

        Horovod refuses an operation while another of its name is not done; it is faster with a name that it knows, of
        arrays of the same kind, and knows a thousand. So names take turns.
        """
        kind = f"{what}.{np.dtype(array.dtype).name}.{array.size}"
        name = f"{kind}.{self._turns[kind] % _IN_FLIGHT}"
        self._turns[kind] += 1
        if name in self._done:
            _order(self._done[name], array)
        else:
            self._done[name] = mx.nd.zeros((1,))
        return name

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
        several = {ranks for ranks in groups if len(ranks) > 1}
        new = several - set(self._sets)
        if not new and not (several and self._slow):
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


def _order(first: mx.nd.NDArray, then: mx.nd.NDArray, handle: Optional[ctypes.c_void_p] = None) -> None:
    """Has MXNet's engine begin nothing with the second array before it has done what writes the first; then it frees a
    handle, if there is one."""
    cpu = (ctypes.c_int * 2)(1, 0)
    check_call(_LIB.MXEnginePushSyncND(
        _NOTHING, handle, _LIB.MXNDArrayFree if handle else None, ctypes.byref(cpu), ctypes.byref(first.handle), 1,
        ctypes.byref(then.handle), 1, None, 0, None))
