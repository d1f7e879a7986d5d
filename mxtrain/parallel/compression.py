"""What processes send each other in the place of float32 gradients: see ParallelConfig.compression.

fp16 halves the numbers. 2bit sends of each weight's gradient only whether it has reached a threshold t, and keeps the
rest in a residual for later updates, as 1-bit SGD does (Seide et al. 2014; with a threshold: Strom 2015):

    residual += gradient;  code = 1 where residual >= t, -1 where residual <= -t, else 0;  residual -= t * code

The sum over W processes gets t * (sum of their codes), which lies between -W and W. Such a sum is a digit to the base
b = 2W + 1, and k digits make one whole number, the largest k with b**k <= 2**24: float32 holds these numbers and all
their sums without rounding. So a transport adds codes by its plain float32 sum, in any order, with equal bits.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Union

import mxnet as mx
import numpy as np

from mxtrain.errors import UserError
from mxtrain.parallel.gradients import Arrays, views
from mxtrain.parallel.settings import ParallelConfig

_GROUP = 2**18  # elements; three such arrays of float32 stay in a processor's cache


class Half:
    """Gradients as float16. Sums are rounded to 11 bits, at every addition."""

    def __init__(self, count: int):
        """count: of the arrays of an `allreduce`, the first so many are compressed."""
        self.count = count

    def pack(self, arrays: Sequence[mx.nd.NDArray]) -> Arrays:
        """What to sum over the processes for the gradients of this one."""
        return [array.astype("float16") for array in arrays]

    def unpack(self, sums: Arrays, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Writes into the arrays what the sums say of them."""
        for total, array in zip(sums, arrays):
            mx.nd.cast(total, "float32", out=array)


class _Group(NamedTuple):
    """Consecutive gradients that are packed as one vector, which is cut into k rows: digit i of number j is its element
    i * m + j. The end is padded with zeros."""

    place: slice
    """Among all gradients."""
    residual: mx.nd.NDArray
    """(k, m)"""
    parts: Dict[str, mx.nd.NDArray]
    """The residual's, by the parameters' names, in their shapes."""


class TwoBits:
    """Gradients as digits, with a residual, on the context of the gradients.

    Gradients are packed in groups. One vector of all would have to wait for the end of backward, and would be read from
    memory by every operator; one of each array would take a dozen operators for every bias.

    gradients: by the parameters' names, in the order in which they will come.
    processes: W.
    """

    def __init__(self, gradients: Dict[str, mx.nd.NDArray], processes: int, threshold: float):
        self.count, self.threshold = len(gradients), threshold
        self._base, rows, names = 2 * processes + 1, digits(processes), list(gradients)
        self.groups: List[_Group] = []
        for place in grouped([gradient.size for gradient in gradients.values()]):
            inside = [gradients[name] for name in names[place]]
            columns = -(-sum(gradient.size for gradient in inside) // rows)
            residual = mx.nd.zeros((rows, columns), ctx=inside[0].context)
            own = dict(zip(names[place], views(residual.reshape((-1,)), inside)))
            self.groups.append(_Group(place, residual, own))
        context = self.groups[0].residual.context
        self._powers = mx.nd.array(float(self._base) ** np.arange(rows), ctx=context).reshape((rows, 1))
        self._packed, self._sent = False, mx.nd.zeros((1,), ctx=context)

    def pack(self, arrays: Sequence[mx.nd.NDArray]) -> Arrays:
        """One array of whole numbers for each group."""
        self._packed = True
        return [self._pack(group, arrays[group.place]) for group in self.groups]

    def _pack(self, group: _Group, arrays: Sequence[mx.nd.NDArray]) -> mx.nd.NDArray:
        residual, threshold = group.residual, self.threshold
        for own, array in zip(group.parts.values(), arrays):
            own += array
        codes = (residual >= threshold) - (residual <= -threshold)
        residual -= threshold * codes
        numbers = mx.nd.sum(mx.nd.broadcast_mul(codes, self._powers), axis=0, keepdims=True)
        self._sent += (numbers != 0).sum()
        # Comparing hides infinities and NaNs in the residual. They must reach all processes, as without compression.
        return mx.nd.broadcast_add(numbers, 0 * residual.sum().reshape((1, 1)))

    def unpack(self, sums: Arrays, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Writes into the arrays what the sums say of them."""
        for group, numbers in zip(self.groups, sums):
            # The last i digits together make less than b**i / 2, by 1/2 at least. Numbers are below 2**23, so that the
            # division's own rounding is less than that: rounding the quotient takes off just these digits.
            shifted = mx.nd.rint(mx.nd.broadcast_div(numbers, self._powers))
            higher, lower = shifted[1:] * self._base, shifted[:-1]
            lower -= higher
            inside = arrays[group.place]
            for codes, array in zip(views(shifted.reshape((-1,)), inside), inside):
                mx.nd._internal._mul_scalar(codes, scalar=self.threshold, out=array)

    def sends_nothing(self) -> bool:
        """Whether there were updates, and in none of them a gradient has reached the threshold. Waits for them."""
        return self._packed and self._sent.asscalar() == 0


def compression_for(config: ParallelConfig, gradients: Dict[str, mx.nd.NDArray],
                    processes: int) -> Optional[Union[Half, TwoBits]]:
    """What these gradients, by their parameters' names, are sent as; None for what they are."""
    if config.compression == "none" or processes == 1 or not gradients:
        return None
    if config.compression == "fp16":
        return Half(len(gradients))
    if digits(processes) == 1:
        raise UserError(f"--compression 2bit: saves nothing among {processes} processes; fp16 does")
    return TwoBits(gradients, processes, config.compression_threshold)


def digits(processes: int) -> int:
    """How many gradients make one float32 of 2bit."""
    base, count = 2 * processes + 1, 1
    while base ** (count + 1) <= 2**24:
        count += 1
    return count


def grouped(sizes: Sequence[int]) -> List[slice]:
    """Cuts a list of arrays, given by their numbers of elements, into groups of _GROUP elements or more (the last may
    have less)."""
    groups, first, elements = [], 0, 0
    for number, size in enumerate(sizes, 1):
        elements += size
        if elements >= _GROUP or number == len(sizes):
            groups.append(slice(first, number))
            first, elements = number, 0
    return groups
