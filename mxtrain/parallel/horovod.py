"""Processes that add by Horovod's allreduce."""

from __future__ import annotations

import os
from typing import Sequence

import mxnet as mx
import numpy as np

from mxtrain.devices import visible_gpus
from mxtrain.errors import LostPeer, UserError
from mxtrain.parallel.communicator import AmongProcesses
from mxtrain.parallel.world import World

_SHUT_DOWN = "Horovod has been shut down"


class Horovod(AmongProcesses):
    """Sums in rings of the processes' first contexts.

    started: number of processes that the launcher has started.
    """

    def __init__(self, started: int):
        try:
            import horovod.mxnet as hvd
        except ImportError as error:
            raise UserError(f"--kvstore horovod: Horovod for MXNet is not installed ({error}); "
                            "make setup HOROVOD=1 builds it") from None
        # To wait for a checkpoint that rank 0 writes, or for data, is no stall, as Horovod says after a minute.
        os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", "600")
        if not visible_gpus()[0]:
            # A cycle takes time of cores that compute: with Horovod's default, 1 ms, a tenth of a step of ResNet-18.
            os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")
        hvd.init()
        self._hvd, self.rank, self.size = hvd, hvd.rank(), hvd.size()
        if self.size != started:
            raise UserError(
                f"--kvstore horovod: {started} processes were started, and Horovod, built without MPI, knows of "
                f"{self.size}; start them by horovodrun -np {started} python scripts/train.py ..., or say --kvstore "
                "device for trainings that do not hear of each other")

    def known(self, world: World) -> World:
        # mpirun and srun do not say it, or each in another way.
        return world._replace(local_rank=self._hvd.local_rank(), local_size=self._hvd.local_size())

    def _add(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        for number, array in enumerate(arrays):
            # The last layers' gradients are there first, but the first layers' weights are needed first.
            self._hvd.allreduce_(array, op=self._hvd.Sum, name=f"sum.{number}", priority=-number)

    def total(self, values: np.ndarray) -> np.ndarray:
        if self.size == 1 or not values.size:
            return values
        array = mx.nd.array(values, dtype="float64")
        try:
            total = self._hvd.allreduce(array, op=self._hvd.Sum, name=f"total.{values.size}").asnumpy()
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
            self._hvd.broadcast_(plain, root_rank=0, name=f"broadcast.{number}")
            plain.copyto(array)

    def close(self) -> None:
        mx.nd.waitall()
        self._hvd.shutdown()
