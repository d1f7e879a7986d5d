"""The order of the samples: a pure function of (seed, epoch, batch), computed and never stored."""

from __future__ import annotations

import math
from typing import Callable, Iterator, List, Optional, Tuple, Union

import numpy as np

from mxtrain.errors import UserError

# A dozen, because a tiny domain mixes slowly: with 8 rounds the orders of 5 or 6 samples are not equally
# likely.
_ROUNDS = 12
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: np.ndarray) -> np.ndarray:
    """Scramble 64-bit words; the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Permutation:
    """A pseudo-random permutation of 0..n-1 that needs no memory and can be evaluated anywhere.

    A Feistel network on pairs (left, right) of 0..a-1 and 0..b-1, with a * b just at or
    above n; a value that lands outside 0..n-1 is sent through again until it lands inside (cycle
    walking). Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.

    n: number of samples, at least 1. seed: a non-negative integer. epoch: another, or several of them.
    """

    def __init__(self, n: int, seed: int, epoch: Union[int, Tuple[int, ...]]):
        if n < 1:
            raise ValueError(f"n is {n}: a permutation needs at least one element")
        self.n = n
        left_size = math.isqrt(n - 1) + 1
        self._left_size = np.uint64(left_size)
        self._right_size = np.uint64(-(-n // left_size))
        key = (epoch,) if isinstance(epoch, int) else epoch
        self._keys = np.random.SeedSequence(seed, spawn_key=key).generate_state(_ROUNDS, np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The elements at `positions`: (k,) integers of 0..n-1 -> (k,) int64. IndexError outside."""
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and (positions.min() < 0 or positions.max() >= self.n):
            raise IndexError(
                f"positions {positions.min()}..{positions.max()} are not all within 0..{self.n - 1}"
            )
        values = self._encipher(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.n)
        while outside.size:
            values[outside] = self._encipher(values[outside])
            outside = outside[values[outside] >= self.n]
        return values.astype(np.int64)

    def _encipher(self, values: np.ndarray) -> np.ndarray:
        left, right = values // self._right_size, values % self._right_size
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _mix(left * _GAMMA + key) % self._right_size) % self._right_size
            else:
                left = (left + _mix(right * _GAMMA + key) % self._left_size) % self._left_size
        return left * self._right_size + right


class BlockPermutation:
    """A permutation of 0..n-1 for storage that is slow at random access, computed like `Permutation`.

    The samples are cut into blocks of `block` neighbors; the blocks are permuted; of every `window` blocks in
    the new order, all samples are permuted among each other. So a reader touches `window` places at a time,
    each of them read from one end to the other within `window * block` samples.

    The last block may be short. It is put to a place of its own (`_short_at`), so that the others are of equal
    size and every position can be computed.
    """

    def __init__(self, n: int, seed: int, epoch: int, block: int, window: int):
        self.n, self._block, self._window = n, block, window
        self._seed, self._epoch = seed, epoch
        self._full, self._short = divmod(n, block)
        self._blocks = Permutation(self._full, seed, epoch) if self._full else None
        draw = np.random.SeedSequence(seed, spawn_key=(epoch, 0)).generate_state(1, np.uint64)[0]
        self._short_at = int(draw % np.uint64(self._full + 1)) * block if self._short else n

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The elements at `positions`: (k,) integers of 0..n-1 -> (k,) int64."""
        positions = np.asarray(positions, dtype=np.int64)
        size = self._block * self._window
        elements = np.empty_like(positions)
        for number in np.unique(positions // size).tolist():
            here = positions // size == number
            start, stop = number * size, min((number + 1) * size, self.n)
            within = Permutation(stop - start, self._seed, _pair(self._epoch, number))
            elements[here] = self._of_blocks(start + within(positions[here] - start))
        return elements

    def _of_blocks(self, positions: np.ndarray) -> np.ndarray:
        """The elements when only the blocks are permuted."""
        short = (positions >= self._short_at) & (positions < self._short_at + self._short)
        after = positions >= self._short_at + self._short
        place = positions - np.where(after, self._short, 0)
        elements = self._full * self._block + positions - self._short_at
        regular = ~short
        place = place[regular]
        if place.size:
            elements[regular] = self._blocks(place // self._block) * self._block + place % self._block
        return elements


def _pair(epoch: int, window: int) -> Tuple[int, int, int]:
    """The key of a window; three numbers, so that it is never one of an epoch (one) or a short block (two)."""
    return epoch, window, 1


class BatchSampler:
    """The global batches of every epoch, as gluon's DataLoader takes them (`batch_sampler`).

    Iterating yields lists of keys (epoch, index), two ints each, from the position set by `start_at` (at
    first: epoch 0, batch 0) to the end of that epoch. An iteration that was not broken off leaves the
    position at the start of the next epoch, so that a plain `for` loop over epochs sees a new order each
    time.

    length: number of samples. batch_size: samples of a global batch. shuffle: "full", "block" (see
    BlockPermutation; `block` samples, `window` blocks) or "none", the order of the data. last_batch: a short last
    batch is kept ("keep") or left out ("drop"); `dropped` is the number of samples that this costs an epoch.

    UserError when there is no sample, the batch size is below 1, or dropping leaves no batch at all.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        seed: int,
        shuffle: str = "full",
        last_batch: str = "keep",
        block: int = 256,
        window: int = 16,
    ):
        if length < 1:
            raise UserError("there is no sample to make batches of")
        if batch_size < 1:
            raise UserError(f"--batch-size {batch_size}: must be at least 1")
        if shuffle not in ("full", "block", "none"):
            raise UserError(f"--shuffle {shuffle}: must be one of full, block, none")
        if last_batch not in ("keep", "drop"):
            raise UserError(f"--last-batch {last_batch}: must be one of keep, drop")
        if last_batch == "drop" and length < batch_size:
            raise UserError(
                f"--last-batch drop leaves no batch of {length} samples at --batch-size {batch_size}"
            )
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self._shuffle, self._block, self._window = shuffle, block, window
        self.dropped = length % batch_size if last_batch == "drop" else 0
        self._batches = -(-(length - self.dropped) // batch_size)
        self._epoch, self._batch = 0, 0

    def __len__(self) -> int:
        """Batches of one epoch."""
        return self._batches

    def rows(self, batch: int) -> int:
        """Number of samples of a batch; below batch_size only in a short last one. IndexError for no batch."""
        if not 0 <= batch < len(self):
            raise IndexError(f"batch {batch} is not within 0..{len(self) - 1}")
        return min(self.batch_size, self.length - batch * self.batch_size)

    def indices(self, epoch: int, batch: int, start: int = 0, stop: Optional[int] = None) -> np.ndarray:
        """The samples of rows start..stop-1 of a global batch, by default of all: (k,) int64."""
        rows = self.rows(batch)
        first = batch * self.batch_size
        positions = np.arange(first + start, first + (rows if stop is None else min(stop, rows)))
        if self._shuffle == "none":
            return positions
        return self._order(epoch)(positions)

    def _order(self, epoch: int) -> Callable[[np.ndarray], np.ndarray]:
        if self._shuffle == "full":
            return Permutation(self.length, self.seed, epoch)
        return BlockPermutation(self.length, self.seed, epoch, self._block, self._window)

    def start_at(self, epoch: int, batch: int = 0) -> None:
        """Set where the next iteration starts; batch == len(self) is the end of the epoch: nothing is
        left."""
        if epoch < 0 or not 0 <= batch <= len(self):
            raise IndexError(f"epoch {epoch}, batch {batch}: not a position in epochs of {len(self)} batches")
        self._epoch, self._batch = epoch, batch

    @property
    def position(self) -> Tuple[int, int]:
        """(epoch, batch) that the next iteration starts with."""
        return self._epoch, self._batch

    def __iter__(self) -> Iterator[List[Tuple[int, int]]]:
        return self._walk(*self.position)  # the start is read now, not at the first next()

    def _walk(self, epoch: int, start: int) -> Iterator[List[Tuple[int, int]]]:
        for batch in range(start, len(self)):
            yield [(epoch, index) for index in self.indices(epoch, batch).tolist()]
        self.start_at(epoch + 1)
