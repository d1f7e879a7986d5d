"""Replicas watch each other: all have the same weights, and a shard has the same gradient on whichever it is run.

A device that fails, or an operator that does not give the same bits twice, would otherwise spoil a training without a
word. Replicas are the contexts of all processes. What they tell each other are 64 bits of a sha256, in numbers so small
that sums of float32 carry them, too. The result of the training does not change.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from typing import Dict, Iterable, List, Optional, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from mxtrain.errors import TrainingError
from mxtrain.parallel.layout import Layout
from mxtrain.seeds import mix

_NUMBERS, _BITS = 3, 22  # of a hash: 3 * 22 bits are more than 64, and 22 are less than the 24 of a float32


class Audit:
    """Compares replicas every `every` updates; with a fraction, in that share of the updates, drawn by the seed.

    every: see ParallelConfig.audit; None does nothing. With a fraction, sums are exact, and one of the update's shards
    is run again on another replica (on the same one where there is no other).
    parameters: those of the network by name.

    All processes call the methods at the same time. They raise TrainingError, in all processes, for what differs.
    """

    def __init__(self, every: Optional[float], seed: int, layout: Layout, communicator,
                 parameters: Dict[str, Parameter]):
        self._every, self._seed, self._layout, self._communicator = every, seed, layout, communicator
        self._parameters, self._compared = parameters, None
        self._first = layout.grid.here.start
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._trained = [names[id(parameter)] for parameter in layout.parameters]
        self._ends = np.cumsum([int(np.prod(parameter.shape)) for parameter in layout.parameters])

    def forward_backward(self, batch: Sequence, update: int) -> List[mx.nd.NDArray]:
        """What the layout's method of this name does, and for some updates a shard of the batch once more."""
        layout = self._layout
        if self._every is None or self._every >= 1 or not self._due(update + 1):
            return layout.forward_backward(batch, update)
        shard, one, other = self._draw(batch, update)
        reports = layout.forward_backward(batch, update, watched=shard)
        rows = self._hand_on(layout.shard_of(batch, shard) if self._here(one) else [], one, other)
        hashes = np.zeros((2, len(self._trained), _NUMBERS))
        if self._here(one):
            hashes[0] = self._hashes(layout.watched_gradient)
        if self._here(other):
            hashes[1] = self._hashes(layout.gradient_again(rows, update, shard, other - self._first))
        hashes = self._communicator.total(hashes)
        if (hashes[0] != hashes[1]).any():
            names = self._names()
            where = f"run on {names[one]} and again on {names[other]}" if one != other else f"run twice on {names[one]}"
            raise self._communicator.once(TrainingError(
                f"--audit: in update {update + 1}, shard {shard}, {where}, has two gradients, which first differ in "
                f"{self._trained[_first(hashes[0], hashes[1])]}: a device fails, or an operator is not repeatable"))
        return reports

    def weights(self, update: int, always: bool = False) -> None:
        """Compares the weights, and running statistics, after `update` updates when it is time, or `always`."""
        if self._every is None or self._compared == update or not (always or self._due(update)):
            return
        table = self._of_all(lambda arrays: _hash(digest(array) for array in arrays))
        usual = Counter(map(tuple, table.tolist())).most_common(1)[0][0]  # of equally many: that of the first replica
        differing = [replica for replica, numbers in enumerate(table.tolist()) if tuple(numbers) != usual]
        if differing:
            good = next(replica for replica in range(len(table)) if replica not in differing)
            each = self._of_all(lambda arrays: [_hash([digest(array)]) for array in arrays])
            names, bad = self._names(), differing[0]
            raise self._communicator.once(TrainingError(
                f"--audit: after update {update} the weights of {names[bad]} are not those of {names[good]}, first in "
                f"{list(self._parameters)[_first(each[bad], each[good])]}: a device fails, or something writes to the "
                "weights of one replica"))
        self._compared = update

    def _due(self, update: int) -> bool:
        """Whether replicas are compared in this update, the first being 1."""
        if self._every >= 1:
            return update % self._every == 0
        return mix(self._seed, 4, update) < self._every * (2**31 - 1)

    def _draw(self, batch, update):
        """(shard, the replica that runs it, the one to run it again); the shard has rows."""
        rows = self._communicator.total(np.array(self._layout.rows_of(batch), "float64"))
        shards = np.flatnonzero(rows).tolist()
        shard = shards[mix(self._seed, 5, update) % len(shards)]
        one = self._layout.owner(shard)
        others = [replica for replica in range(self._layout.replicas) if replica != one] or [one]
        return shard, one, others[mix(self._seed, 6, update) % len(others)]

    def _hand_on(self, arrays: Sequence[np.ndarray], one: int, other: int) -> List[np.ndarray]:
        """Arrays on the host, known where replica `one` is, where `other` is."""
        count = len(self._layout.contexts)
        if one // count == other // count:
            return list(arrays)
        file = io.BytesIO()
        for array in arrays:
            np.save(file, array, allow_pickle=False)
        content = file.getvalue()
        here = self._here(one)
        length, number = self._communicator.total(np.array([len(content), len(arrays)], "float64") * here).astype(int)
        # As whole numbers, which exact sums carry bit for bit, as they do not the sign of a zero.
        words = np.zeros(-(-length // 4), "uint32")
        if here:
            words.view("uint8")[:length] = np.frombuffer(content, "uint8")
        words = self._communicator.total(words.astype("float64")).astype("uint32")
        file = io.BytesIO(words.tobytes()[:length])
        return [np.load(file, allow_pickle=False) for _ in range(number)]

    def _here(self, replica: int) -> bool:
        return 0 <= replica - self._first < len(self._layout.contexts)

    def _hashes(self, gradient: mx.nd.NDArray) -> List[List[int]]:
        """One hash per trained parameter of a gradient that is a single vector."""
        return [_hash([digest(part)]) for part in np.split(gradient.asnumpy(), self._ends[:-1])]

    def _of_all(self, numbers) -> np.ndarray:
        """numbers(weights of a context), for all replicas one after the other."""
        layout = self._layout
        own = np.array([numbers([parameter.data(ctx).asnumpy() for parameter in self._parameters.values()])
                        for ctx in layout.contexts], "float64")
        table = np.zeros((layout.replicas, *own.shape[1:]))
        table[self._first:self._first + len(own)] = own
        return self._communicator.total(table)

    def _names(self) -> List[str]:
        """What to call the replicas."""
        layout, size = self._layout, self._communicator.size
        table = np.zeros((layout.replicas, 2))
        table[self._first:self._first + len(layout.contexts)] = [
            (ctx.device_typeid, ctx.device_id) for ctx in layout.contexts]
        contexts = [f"{mx.Context.devtype2str[kind]}({number})"
                    for kind, number in self._communicator.total(table).astype(int).tolist()]
        if size == 1:
            return contexts
        return [f"rank {replica // len(layout.contexts)}, {ctx}" for replica, ctx in enumerate(contexts)]


def digest(array: np.ndarray) -> bytes:
    """The sha256 of an array's elements, bit by bit."""
    return hashlib.sha256(np.ascontiguousarray(array)).digest()


def _hash(digests: Iterable[bytes]) -> List[int]:
    """64 bits for some digests in their order."""
    bits = int.from_bytes(hashlib.sha256(b"".join(digests)).digest()[:8], "big")
    return [bits >> (_BITS * i) & ((1 << _BITS) - 1) for i in range(_NUMBERS)]


def _first(one: np.ndarray, other: np.ndarray) -> int:
    """Index of the first of two lists of hashes that differs."""
    return int(np.flatnonzero((one != other).any(axis=-1))[0])
