"""How many bytes MXNet's arrays take on a context, counted by MXNet's profiler.

MXNet's storage tells the profiler of every array that it makes or gives up, on CPUs and GPUs, its operators' workspaces
included. So the count is exact, whatever else the process does, and costs microseconds. Arrays from before counting
began are not in it, so what counts are differences. What a pool or malloc keeps for later is not in it either.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import re
import shutil
import tempfile
from contextlib import contextmanager
from typing import Callable, Iterator, Tuple, TypeVar

import mxnet as mx

T = TypeVar("T")

_CPUS = ("cpu/0", "cpu/1", "cpu pinned/", "cpu shared/")
"""What MXNet 1.9.1 calls the counters of the first CPU contexts, counting on in the list of its kinds of devices."""


@contextmanager
def counting() -> Iterator[None]:
    """Within it `live` and `peak` can be used. Not for a process whose profiler is in use already."""
    gc.collect()  # what is given up later must have been counted
    mx.nd.waitall()
    mx.profiler.set_config(profile_memory=True, profile_imperative=False, profile_symbolic=False, profile_api=False,
                           aggregate_stats=True, filename=_nowhere())
    mx.profiler.set_state("run")
    collects = gc.isenabled()
    gc.disable()  # it would give up arrays at any moment
    try:
        yield
    finally:
        if collects:
            gc.enable()
        mx.nd.waitall()
        mx.profiler.set_state("stop")


@functools.lru_cache(None)
def _nowhere() -> str:
    """A file that nobody reads, for what the profiler writes when it stops. It replaces the file, so that /dev/null, in
    a process that may do so, would be a device no longer."""
    folder = tempfile.mkdtemp(prefix="mxtrain-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return os.path.join(folder, "profile.json")


def live(ctx: mx.Context) -> int:
    """Bytes of the arrays that there are now on a context. Waits for all work."""
    while True:
        # The engine gives up what an operator has used a moment after it says that the operator is done.
        mx.nd.waitall()
        mx.profiler.dumps(reset=True)
        one = mx.nd.zeros((1,), ctx=ctx)  # the counter is only heard of when it changes
        one.wait_to_read()
        changes, highest = _changes(ctx)
        del one
        if changes == 1:
            return highest - 4


def peak(ctx: mx.Context, work: Callable[[], T]) -> Tuple[T, int]:
    """What `work` returns, and the most bytes of arrays that there were at any time since it began. Waits for it."""
    before = live(ctx)
    done = work()
    mx.nd.waitall()
    return done, max(before, _changes(ctx)[1])


def _changes(ctx: mx.Context) -> Tuple[int, int]:
    """How often the counter has changed since the last time, and its largest value since then."""
    name = f"Memory: {_CPUS[ctx.device_id] if ctx.device_type == 'cpu' else f'gpu/{ctx.device_id}'}"
    table = mx.profiler.dumps(reset=True)
    found = re.search(rf"^{re.escape(name)} +(\d+) +-?[\d.]+ +(-?[\d.]+)", table, re.MULTILINE)
    return (int(found[1]), round(float(found[2]) * 1000)) if found else (0, 0)
