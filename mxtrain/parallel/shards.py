"""Shards: the pieces that a global batch is cut into, and how their rows come to a device."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.gluon import Block


def shard_bounds(rows: int, shards: int) -> List[Tuple[int, int]]:
    """First row and end of every shard of a batch."""
    return [(s * rows // shards, (s + 1) * rows // shards) for s in range(shards)]


def bounds_in(batch: Sequence, shards: int) -> List[Tuple[int, int]]:
    """First row and end of every shard in the arrays of a batch, some of whose rows may have been left out, or are read
    by other processes (mxtrain.data.loader.Batch): the shards are those of the whole batch, without these rows."""
    if not hasattr(batch, "positions") or batch.size == len(batch[-1]):
        return shard_bounds(len(batch[-1]), shards)
    return [tuple(np.searchsorted(batch.positions, pair).tolist()) for pair in shard_bounds(batch.size, shards)]


def assigned(replica: int, replicas: int, shards: int) -> range:
    """The shards that a replica runs."""
    return range(replica * shards // replicas, (replica + 1) * shards // replicas)


def part_of(rows: int, first: int, count: int, replicas: int, shards: int) -> Tuple[int, int]:
    """First row and end of what `count` replicas from number `first` on run of a batch."""
    own = assigned(first, replicas, shards).start, assigned(first + count - 1, replicas, shards).stop
    return own[0] * rows // shards, own[1] * rows // shards


def send(arrays: Sequence, bounds: Sequence[Tuple[int, int]], ctx: mx.Context, apart: bool,
         preprocess: Optional[Block] = None) -> List[List[mx.nd.NDArray]]:
    """For each of some shards that follow one another (first row, end), its rows of some arrays, on a context.

    They come in one copy and the shards are views; with `apart` each is sent by itself, into memory of its own, aligned
    as in any other layout. (Copying the views would do, but MXNet 1.9.1 fails to copy a view of an array that is in
    oneDNN's layout.)
    preprocess: see Layout.
    """
    if apart or len(bounds) < 2:
        return [[input_to(array, start, stop, ctx, preprocess) for array in arrays] for start, stop in bounds]
    first = bounds[0][0]
    whole = [input_to(array, first, bounds[-1][1], ctx, preprocess) for array in arrays]
    return [[array[start - first:stop - first] for array in whole] for start, stop in bounds]


def input_to(array, start: int, stop: int, ctx: mx.Context, preprocess: Optional[Block]) -> mx.nd.NDArray:
    """Rows start to stop of an input on a context, preprocessed there, or on the host where the block can do it."""
    if preprocess is None:
        return rows_to(array, start, stop, ctx)
    if ctx.device_type == "cpu" and isinstance(array, np.ndarray) and hasattr(preprocess, "on_host"):
        return preprocess.on_host(array[start:stop], ctx)
    return preprocess(rows_to(array, start, stop, ctx))


def rows_to(array, start: int, stop: int, ctx: mx.Context) -> mx.nd.NDArray:
    """Rows start to stop of an array on the host, on a context, in one copy (or none)."""
    if not isinstance(array, mx.nd.NDArray):
        return mx.nd.array(array[start:stop], ctx=ctx, dtype=array.dtype)
    rows = array if stop - start == len(array) else array[start:stop]
    return rows.as_in_context(ctx)
