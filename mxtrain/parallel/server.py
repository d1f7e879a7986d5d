"""Processes that add on MXNet's parameter servers."""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import sys
import threading
import time
from concurrent.futures import Future, TimeoutError
from typing import Any, Callable, Dict, List, Sequence

import mxnet as mx
import numpy as np

from mxtrain.errors import UserError
from mxtrain.parallel.communicator import AmongProcesses

_ON_ALL_SERVERS = 1_000_000  # elements from which on MXNet spreads an array over all servers
_SECONDS_TO_MEET = 60  # the scheduler imports MXNet first, as this process did
_SECONDS_FOR_ALL = 120  # for servers and workers to come, of which some may be started by hand


class ParameterServer(AmongProcesses):
    """A KVStore adds what all workers push, over their contexts too unless it is compressed, and hands out the sum.

    kvstore: dist_sync or dist_device_sync. Servers hold sums and nothing else: the workers update the weights.
    """

    def __init__(self, kvstore: str):
        _meet_scheduler()
        self._uses = 0
        self._store, self._known = _in_time(lambda: mx.kv.create(kvstore)), set()
        self._buffers: Dict[tuple, mx.nd.NDArray] = {}  # shape, type, context -> what _added sends
        # Else a process that ends by an error would wait at its end for the others, and they for it.
        self._wait_at_the_end(False)
        atexit.register(self._leave)
        # The store numbers workers by address and port, anew at every start; a launcher knows better.
        self.rank = int(os.environ.get("MXTRAIN_RANK", self._store.rank))
        self.size = self._store.num_workers

    def use(self, contexts: Sequence[mx.Context]) -> None:
        super().use(contexts)
        self._wait_at_the_end(False)
        self._uses += 1  # arrays of another training have other shapes, and need keys of their own

    def allreduce(self, arrays: Sequence[List[mx.nd.NDArray]]) -> None:
        if self.compression is not None:
            super().allreduce(arrays)
        else:
            self._add_copies(arrays)

    def _add(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        self._add_copies([[array] for array in arrays])

    def _add_copies(self, arrays: Sequence[List[mx.nd.NDArray]]) -> None:
        if arrays:
            self._sum([f"sum.{self._uses}.{number}" for number in range(len(arrays))], list(arrays))

    def _added(self, array: mx.nd.NDArray, tag: str) -> mx.nd.NDArray:
        # Always by the same array: MXNet does not order two sums of different arrays under one key.
        kind = (tag, array.shape, np.dtype(array.dtype).name, array.context)
        if kind not in self._buffers:
            self._buffers[kind] = mx.nd.empty(array.shape, array.context, array.dtype)
        buffer = self._buffers[kind]
        array.copyto(buffer)
        self._sum([f"sum of {kind}"], [[buffer]])
        return buffer.copy()

    def total(self, values: np.ndarray) -> np.ndarray:
        if not values.size:
            return values
        array = mx.nd.array(values.ravel(), dtype="float64")
        self._sum([f"total.{values.size}"], [[array]])
        return array.asnumpy().reshape(values.shape)

    def broadcast(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        for number, array in enumerate(arrays):
            # Zeros are added to what rank 0 has: in float64, which holds every float32 and whole number to 2**53;
            # negative ones, since 0 and -0 make 0.
            wide = array.astype("float64") if self.rank == 0 else -mx.nd.zeros(array.shape, dtype="float64")
            self._sum([f"broadcast.{array.dtype}.{array.shape}"], [[wide]])
            wide.wait_to_read()  # MXNet does not order two sums of different arrays under one key
            wide.astype(array.dtype).copyto(array)

    def check_exact(self) -> None:
        """Raises UserError for servers that round float64 to float32.

        MXNet 1.9.1 never gives a value to the server's switch for keeping 32-bit copies of other types: it is whatever
        lies in memory. scripts/launch.py starts servers whose memory is zero; others may be good by luck.
        """
        fine = mx.nd.full((_ON_ALL_SERVERS,), 1 + 2.0**-40 if self.rank == 0 else 2.0**-41, dtype="float64")
        self._sum(["fine"], [[fine]])
        expected = 1 + 2.0**-40 + (self.size - 1) * 2.0**-41
        if not (fine.asnumpy() == expected).all():
            raise UserError("--exact: a server rounds sums to 32 bits; start the processes by scripts/launch.py, or "
                            "servers with GLIBC_TUNABLES=glibc.malloc.tcache_count=0 MALLOC_PERTURB_=255")

    def rest(self) -> None:
        mx.nd.waitall()
        self.barrier()  # nobody leaves while others still want sums
        self._wait_at_the_end(True)  # by which MXNet also tells the servers to end

    def _leave(self) -> None:
        if hasattr(sys, "last_type"):  # this process ends by an exception, of which the others know nothing
            self._wait_at_the_end(False)

    close = rest

    def _wait_at_the_end(self, wait: bool) -> None:
        mx.base.check_call(mx.base._LIB.MXKVStoreSetBarrierBeforeExit(self._store.handle, ctypes.c_int(wait)))

    def _sum(self, keys: List[str], arrays: List[List[mx.nd.NDArray]]) -> None:
        new = [(key, copies[0]) for key, copies in zip(keys, arrays) if key not in self._known]
        if new:
            self._store.init([key for key, _ in new],
                             [mx.nd.zeros(array.shape, dtype=array.dtype) for _, array in new])
            self._known.update(key for key, _ in new)
        self._store.pushpull(keys, arrays, out=arrays)


def _in_time(create: Callable[[], Any]) -> Any:
    """What `create` returns. MXNet waits in it until the scheduler has heard of all servers and workers, for ever if
    one does not come; then this raises UserError."""
    made: Future = Future()

    def make() -> None:
        try:
            made.set_result(create())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=make, daemon=True).start()
    try:
        return made.result(_SECONDS_FOR_ALL)
    except TimeoutError:
        servers, workers = os.environ["DMLC_NUM_SERVER"], os.environ["DMLC_NUM_WORKER"]
        where = "{DMLC_PS_ROOT_URI}:{DMLC_PS_ROOT_PORT}".format(**os.environ)
        raise UserError(f"--kvstore: not all of {servers} servers (DMLC_NUM_SERVER) and {workers} workers "
                        f"(DMLC_NUM_WORKER) have come to the scheduler at {where} in {_SECONDS_FOR_ALL} s; "
                        "scripts/launch.py starts all of them") from None


def _meet_scheduler() -> None:
    """Raises UserError when nobody listens where the scheduler should be: MXNet would wait for it for ever."""
    host, port = os.environ["DMLC_PS_ROOT_URI"], os.environ["DMLC_PS_ROOT_PORT"]
    deadline = time.monotonic() + _SECONDS_TO_MEET
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=5) as one:
                os.environ["DMLC_PS_ROOT_URI"] = one.getpeername()[0]  # MXNet asks for an address and not a name
            return
        except (OSError, ValueError, OverflowError) as error:
            if time.monotonic() > deadline or isinstance(error, (socket.gaierror, ValueError, OverflowError)):
                raise UserError(f"--kvstore: no scheduler answers at {host}:{port} ({error}); it is named by "
                                "DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, and started by scripts/launch.py") from None
        time.sleep(0.2)
