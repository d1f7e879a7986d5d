"""Runs batches over replicas of a network that is not trained: no gradients, optimizer or communication."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block

from mxtrain.parallel.shards import input_to, rows_to, shard_bounds


class Inference:
    """Replicas of a block, one per context; offers what `train.evaluate` needs of a layout.

    block: gives arrays whose first axis is the samples; initialized on all contexts. head: whether it takes a label
    after the inputs. preprocess: see Layout.
    """

    def __init__(self, block: Block, contexts: Sequence[mx.Context], head: bool, preprocess: Optional[Block] = None):
        self._block, self._contexts, self._head, self._preprocess = block, list(contexts), head, preprocess

    def place_of(self, batch: Sequence) -> Tuple[int, np.ndarray, slice]:
        """All rows of a batch: see Layout."""
        rows = len(batch[-1])
        return rows, np.arange(rows), slice(0, rows)

    def bad_of(self, batch: Sequence) -> int:
        """How many samples of a batch could not be read."""
        return len(getattr(batch, "bad", ()))

    def evaluate(self, batch: Sequence) -> List[mx.nd.NDArray]:
        """The block's outputs for a batch, arrays on the host with the same number of rows: one output for each
        context that gets rows, in the order of the rows."""
        outputs = []
        bounds = shard_bounds(len(batch[-1]), len(self._contexts))
        with autograd.pause(train_mode=False):
            for (start, stop), ctx in zip(bounds, self._contexts):
                if start < stop:
                    inputs, label = (batch[:-1], batch[-1:]) if self._head else (batch, ())
                    arrays = [input_to(x, start, stop, ctx, self._preprocess) for x in inputs]
                    outputs.append(self._block(*arrays, *(rows_to(y, start, stop, ctx) for y in label)))
        return outputs
