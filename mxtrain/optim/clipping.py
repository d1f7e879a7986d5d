"""The global norm of a gradient."""

from __future__ import annotations

import math
from typing import List, Sequence

import mxnet as mx

CHUNK = 1 << 20
"""Elements whose squares are summed in float32 at a time; part of a result's bits."""


def global_norm(gradients: Sequence[mx.nd.NDArray]) -> float:
    """The Euclidean norm of all elements of some arrays on one context.

    Squares are summed over fixed chunks of each array and these sums are added exactly in the host's float64, so
    that the result depends on nothing but the arrays. Waits for the gradients.
    """
    return math.sqrt(math.fsum(value for values in sums_of_squares(gradients) for value in values))


def sums_of_squares(gradients: Sequence[mx.nd.NDArray]) -> List[List[float]]:
    """For each of some arrays on one context the sums over its chunks. Waits for the gradients."""
    pieces = [piece for gradient in gradients for piece in _chunks(gradient)]
    if not pieces:
        return []
    values = iter(mx.nd.multi_sum_sq(*pieces, num_arrays=len(pieces)).asnumpy().tolist())
    return [[next(values) for _ in range(chunks(gradient.size))] for gradient in gradients]


def chunks(size: int) -> int:
    """How many chunks so many elements have."""
    return max(1, -(-size // CHUNK))


def _chunks(gradient):
    if gradient.size <= CHUNK:
        return [gradient]
    flat = gradient.reshape((-1,))
    return [flat[a:a + CHUNK] for a in range(0, gradient.size, CHUNK)]
