"""Processes that add on MXNet's parameter servers."""

from __future__ import annotations

from typing import List, Sequence

import mxnet as mx
import numpy as np

from mxtrain.parallel.communicator import InProcess


class ParameterServer(InProcess):
    """A KVStore adds what all workers push, over their contexts too, and hands out the sum.

    kvstore: dist_sync or dist_device_sync. Servers hold sums and nothing else: the workers update the weights.
    """

    def __init__(self, kvstore: str):
        self._store, self._known = mx.kv.create(kvstore), set()
        self.rank, self.size = self._store.rank, self._store.num_workers

    def use(self, contexts: Sequence[mx.Context]) -> None:
        pass  # the store takes arrays of any

    def allreduce(self, arrays: Sequence[List[mx.nd.NDArray]]) -> None:
        if arrays:
            self._sum([f"sum.{number}" for number in range(len(arrays))], list(arrays))

    def total(self, values: np.ndarray) -> np.ndarray:
        if not values.size:
            return values
        array = mx.nd.array(values.ravel(), dtype="float64")
        self._sum([f"total.{values.size}"], [[array]])
        return array.asnumpy().reshape(values.shape)

    def broadcast(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        for number, array in enumerate(arrays):
            # Zeros are added to what rank 0 has: in float64, which holds every float32 and whole number to 2**53.
            wide = array.astype("float64") if self.rank == 0 else mx.nd.zeros(array.shape, dtype="float64")
            self._sum([f"broadcast.{number}"], [[wide]])
            wide.astype(array.dtype).copyto(array)

    def _sum(self, keys: List[str], arrays: List[List[mx.nd.NDArray]]) -> None:
        new = [(key, copies[0]) for key, copies in zip(keys, arrays) if key not in self._known]
        if new:
            self._store.init([key for key, _ in new],
                             [mx.nd.zeros(array.shape, dtype=array.dtype) for _, array in new])
            self._known.update(key for key, _ in new)
        self._store.pushpull(keys, arrays, out=arrays)
