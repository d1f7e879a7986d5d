"""Sums over the contexts of one process.

A communicator has `rank`, `size` (of processes), `allreduce` and `agree`. There is one process here; transports
over several processes offer the same.
"""

from __future__ import annotations

from typing import List, Sequence

import mxnet as mx

from mxtrain.errors import UserError


class InProcess:
    """Sums over a list of contexts by one of MXNet's KVStores, or by plain copies when its name is "none"."""

    rank = 0
    size = 1

    def __init__(self, kvstore: str, contexts: Sequence[mx.Context]):
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

    def agree(self, value: int) -> int:
        """The largest value that any process brought."""
        return value


def _sum_by_copies(copies: List[mx.nd.NDArray]) -> None:
    total = copies[0]
    for other in copies[1:]:
        total += other.as_in_context(total.context)
    for other in copies[1:]:
        total.copyto(other)
