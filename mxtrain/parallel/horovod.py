"""Processes that add by Horovod's allreduce."""

from __future__ import annotations

import os
from typing import List, Sequence

import mxnet as mx
import numpy as np

from mxtrain.errors import Elsewhere, UserError
from mxtrain.parallel.communicator import InProcess


_SHUT_DOWN = "Horovod has been shut down"


class Horovod(InProcess):
    """First the contexts of a process add, in a KVStore; then the processes, on their first contexts."""

    _kvstore = "device"

    def __init__(self):
        try:
            import horovod.mxnet as hvd
        except ImportError as error:
            raise UserError(f"--kvstore horovod: Horovod for MXNet is not installed ({error}); "
                            "make setup HOROVOD=1 builds it") from None
        # To wait for a checkpoint that rank 0 writes, or for data, is no stall, as Horovod says after a minute.
        os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", "600")
        hvd.init()
        self._hvd, self.rank, self.size = hvd, hvd.rank(), hvd.size()
        self._halved = 0

    def compress(self, kind: str, count: int) -> None:
        self._halved = count if kind == "fp16" else 0

    def allreduce(self, arrays: Sequence[List[mx.nd.NDArray]]) -> None:
        super().allreduce(arrays)
        if self.size == 1:
            return
        for number, (first, *others) in enumerate(arrays):
            sent = first.astype("float16") if number < self._halved else first
            # The last layers' gradients are there first, but the first layers' weights are needed first.
            self._hvd.allreduce_(sent, average=False, name=f"sum.{number}", priority=-number)
            if sent is not first:
                mx.nd.cast(sent, "float32", out=first)
            for other in others:
                first.copyto(other)

    def total(self, values: np.ndarray) -> np.ndarray:
        if self.size == 1 or not values.size:
            return values
        array = mx.nd.array(values, dtype="float64")
        try:
            total = self._hvd.allreduce(array, average=False, name=f"total.{values.size}").asnumpy()
        except mx.base.MXNetError as error:
            if not self.lost_peer(error):
                raise
            raise Elsewhere(f"another process has gone: {_SHUT_DOWN}") from None
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
