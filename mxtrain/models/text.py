"""Networks for bags of words. x: (batch, length) whole numbers, the ids of features from 1 on; 0 fills up."""

from __future__ import annotations

import mxnet as mx
from mxnet.gluon import HybridBlock, nn


class EmbeddingMean(HybridBlock):
    """The mean of the vectors of a text's features; zero for a text without any. (batch, length) -> (batch, width).

    One block, since a plan hands one array from segment to segment, and the mean needs to know which ids fill up.
    """

    def __init__(self, buckets: int, width: int):
        super().__init__(prefix="embedding_")
        self._rows, self._width = buckets + 1, width
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(self._rows, width), init=mx.init.Uniform(0.1))

    def hybrid_forward(self, F, x, weight):
        used = F.clip(F.cast(x, "float32"), 0, 1)
        vectors = F.Embedding(x, weight, input_dim=self._rows, output_dim=self._width)
        total = F.sum(F.broadcast_mul(vectors, F.expand_dims(used, axis=2)), axis=1)
        return F.broadcast_div(total, F.clip(F.sum(used, axis=1, keepdims=True), 1, self._rows * 1.0))


def bag(classes: int, buckets: int) -> nn.HybridSequential:
    """The mean of the words' vectors (as in fastText, Joulin et al. 2016), and one hidden layer."""
    net = nn.HybridSequential(prefix="bag_")
    with net.name_scope():
        net.add(EmbeddingMean(buckets, 32), nn.Dropout(0.3), nn.Dense(32, activation="relu", in_units=32),
                nn.Dense(classes, in_units=32))
    return net
