"""Sums of float32 numbers that do not depend on their order or grouping.

A number is split into two float64 parts, whole multiples of 2**-20 and of 2**-64. As long as the sums of the
parts stay within 2**33 and 2**-11 (which 1,024 numbers cannot pass in the low part, nor V numbers below 2**33 / V
in the high one), adding parts never rounds, so any order, on any device, in a KVStore or an allreduce, gives the
same bits. What is below 2**-64 of a number is rounded away once, when it is split. This is the method of
pre-rounding of Demmel and Nguyen, "Fast Reproducible Floating-Point Summation" (2013), with two fixed bins.

Splitting uses that adding 1.5 * 2**(52+e) to a float64 rounds it to a whole multiple of 2**e.
"""

from __future__ import annotations

import ctypes
from typing import Tuple

import mxnet as mx
import numpy as np

ROUND_HIGH = 1.5 * 2.0**32
ROUND_LOW = 1.5 * 2.0**-12
MOST = 1024
"""Numbers that can be added."""

_BLOCK = 32768  # elements; three float64 blocks stay in a level-2 cache


class NotSummable(ArithmeticError):
    """A number was infinite, not a number, or too large in size: see `limit`."""


def limit(numbers: int) -> float:
    """What each of some numbers must be smaller than in size, so that none of their partial sums rounds."""
    return min(2.0**31, 2.0**33 / numbers)


def split(x: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """The two float64 parts of x, as written in the module's description. The plain form of what is below."""
    wide = x.astype(np.float64)
    high = (wide + ROUND_HIGH) - ROUND_HIGH
    low = ((wide - high) + ROUND_LOW) - ROUND_LOW
    return high, low


def join(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """The float32 total of sums of parts."""
    return (high + low).astype(np.float32)


def memory(array: mx.nd.NDArray) -> np.ndarray:
    """The elements of a CPU array, flat, without a copy. Waits until nothing reads or writes the array.

    The view is valid until MXNet gets to see the array again.
    """
    mx.base.check_call(mx.base._LIB.MXNDArrayWaitToWrite(array.handle))
    pointer = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    kind = {np.float32: ctypes.c_float, np.float64: ctypes.c_double}[array.dtype]
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(kind)), (array.size,))


class ExactSum:
    """The exact sum of vectors of n float32 numbers on one context, to which ranges are added piece by piece.

    numbers: how many are added per element, over all contexts; at most MOST.
    """

    def __init__(self, n: int, ctx: mx.Context, numbers: int = MOST):
        self.on_cpu = ctx.device_type == "cpu"
        self._limit = limit(numbers)
        self.high = mx.nd.zeros((n,), ctx=ctx, dtype="float64")
        self.low = mx.nd.zeros((n,), ctx=ctx, dtype="float64")
        self.total = mx.nd.zeros((n,), ctx=ctx)
        self._work = [np.empty(min(n, _BLOCK)) for _ in range(2)] if self.on_cpu else None

    @property
    def parts(self):
        """The arrays whose sums over all contexts and processes are to be taken, elementwise."""
        return [self.high, self.low]

    def clear(self) -> None:
        mx.nd.reset_arrays(self.high, self.low, num_arrays=2)

    def add(self, start: int, vector: mx.nd.NDArray) -> None:
        """Adds a float32 vector to the elements from `start` on.

        One that cannot be added makes the first of all elements a NaN, which stays one in any sum: so `finish` raises
        NotSummable on all contexts and in all processes, which go on alike until then.
        """
        stop = start + vector.size
        if self.on_cpu:
            high, low = memory(self.high)[start:stop], memory(self.low)[start:stop]
            self._add_in_blocks(memory(vector), high, low)
            return
        wide = vector.astype("float64")
        high = (wide + ROUND_HIGH) - ROUND_HIGH
        low = ((wide - high) + ROUND_LOW) - ROUND_LOW
        # Counted by a comparison, which a NaN fails everywhere; a maximum on a GPU may pass over it.
        outside = mx.nd.sum(1 - (mx.nd.abs(high) < self._limit))
        self.high[start:stop] += high
        self.low[start:stop] += low
        self.high[:1] += 0 / (outside == 0)  # 0 or NaN

    def add_parts(self, start: int, size: int, high: mx.nd.NDArray, low: mx.nd.NDArray) -> None:
        """Adds the first so many elements of the parts of sums to those from `start` on. A NaN first in them makes the
        first of all one."""
        if size:
            self.high[start:start + size] += high[:size]
            self.low[start:start + size] += low[:size]
        self.high[:1] += 0 * high[:1]

    def spoil_blocks(self, length: int) -> None:
        """Has a NaN that `add` has left go to the first element of all blocks of a length, since processes that get a
        block each must all see it."""
        firsts = self.high.reshape((-1, length))[:, 0]
        self.high.reshape((-1, length))[:, 0] = firsts + 0 * self.high[:1]

    def _add_in_blocks(self, vector, high, low):
        for a in range(0, vector.size, _BLOCK):
            b = min(a + _BLOCK, vector.size)
            wide, part = (work[: b - a] for work in self._work)
            np.copyto(wide, vector[a:b])
            np.add(wide, ROUND_HIGH, out=part)
            part -= ROUND_HIGH
            # A NaN makes both comparisons false; for a number past the limit the parts would round.
            if not (part.max() < self._limit and part.min() > -self._limit):
                memory(self.high)[0] = np.nan
                return
            high[a:b] += part
            wide -= part
            wide += ROUND_LOW
            wide -= ROUND_LOW
            low[a:b] += wide

    def finish(self) -> mx.nd.NDArray:
        """The float32 sums, in an array that the next call overwrites. Raises NotSummable."""
        if self.on_cpu:
            high, low, total = memory(self.high), memory(self.low), memory(self.total)
            if np.isnan(high[:1]).any():
                raise NotSummable
            for a in range(0, total.size, _BLOCK):
                total[a : a + _BLOCK] = high[a : a + _BLOCK] + low[a : a + _BLOCK]
        else:
            if np.isnan(self.high[:1].asnumpy()).any():
                raise NotSummable
            self.total[:] = (self.high + self.low).astype("float32")
        return self.total


class FloatSum:
    """The plain float32 sum behind the same interface; its last digits depend on the order."""

    def __init__(self, n: int, ctx: mx.Context):
        self.total = mx.nd.zeros((n,), ctx=ctx)

    @property
    def parts(self):
        return [self.total]

    def clear(self) -> None:
        mx.nd.reset_arrays(self.total, num_arrays=1)

    def add(self, start: int, vector: mx.nd.NDArray) -> None:
        self.total[start : start + vector.size] += vector

    def add_parts(self, start: int, size: int, vector: mx.nd.NDArray) -> None:
        if size:
            self.add(start, vector[:size])

    def finish(self) -> mx.nd.NDArray:
        return self.total
