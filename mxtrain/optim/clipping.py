"""The global norm of a gradient."""

from __future__ import annotations

import math
from typing import Sequence

import mxnet as mx

CHUNK = 1 << 20
"""Elements whose squares are summed in float32 at a time; part of a result's bits."""


def global_norm(gradients: Sequence[mx.nd.NDArray]) -> float:
    """The Euclidean norm of all elements of some arrays on one context.

    Squares are summed over fixed chunks of each array and these sums are added exactly in the host's float64, so
    that the result depends on nothing but the arrays. Waits for the gradients.
    """
    chunks = [piece for gradient in gradients for piece in _chunks(gradient)]
    return math.sqrt(math.fsum(mx.nd.multi_sum_sq(*chunks, num_arrays=len(chunks)).asnumpy().tolist()))


def _chunks(gradient):
    if gradient.size <= CHUNK:
        return [gradient]
    flat = gradient.reshape((-1,))
    return [flat[a:a + CHUNK] for a in range(0, gradient.size, CHUNK)]
