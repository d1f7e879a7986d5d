"""The pieces that a GPT is split into inside its layers: see models.split and models.gpt.

Every sum over the ranks is linear in what they give, so the residual path and a bias go along on the first rank, and
all ranks drop the same elements of what they add.
"""

from __future__ import annotations

from typing import List, Tuple

from mxnet.gluon import HybridBlock, nn

from mxtrain.models.split import Slices, chained


class SplitEmbeddings(HybridBlock):
    """A rank has the vectors of a run of tokens, and gives zeros for others; the first one adds those of places."""

    def __init__(self, whole: HybridBlock, slices: Slices):
        super().__init__(prefix=whole.prefix)
        vocabulary, self._width = whole.token.shape
        self._tokens = slices.share(vocabulary, f"the vocabulary of {vocabulary} tokens")
        self._start, self._first = slices.rank * self._tokens, slices.first
        self.token = slices.parameter(self.params, "token_weight", whole.token, axis=0)
        if self._first:
            self.position = slices.parameter(self.params, "position_weight", whole.position)
        self.dropout = nn.Dropout(whole.dropout._rate)

    def hybrid_forward(self, F, ids, token, position=None):
        own = F.cast(ids, "float32") - self._start
        vectors = F.Embedding(F.clip(own, 0, self._tokens - 1), token, input_dim=self._tokens, output_dim=self._width)
        vectors = F.broadcast_mul(vectors, F.expand_dims((own >= 0) * (own < self._tokens), axis=2))
        if self._first:
            vectors = F.broadcast_add(vectors, F.slice_like(F.expand_dims(position, axis=0), vectors, axes=(1,)))
        return self.dropout(vectors)


class Half(HybridBlock):
    """A rank's part of x + dropout(layer(norm(x))); the first rank adds x."""

    def __init__(self, norm: HybridBlock, layer: HybridBlock, dropout: float, first: bool):
        super().__init__(prefix="")
        self.norm, self.layer, self.dropout, self._first = norm, layer, nn.Dropout(dropout), first

    def hybrid_forward(self, F, x):
        y = self.dropout(self.layer(self.norm(x)))
        return x + y if self._first else y


class HeadsDropout(HybridBlock):
    """Dropout for the attention weights of a rank's heads, (batch * heads / size, time, time): draws what is drawn for
    all heads, and takes its part."""

    def __init__(self, rate: float, heads: int, slices: Slices):
        super().__init__(prefix="")
        self._heads, self._size = heads, slices.size
        self._begin = slices.rank * heads // slices.size
        self._active, self.dropout = rate > 0, nn.Dropout(rate)

    def hybrid_forward(self, F, x):
        if not self._active:
            return x
        masks = self.dropout(F.repeat(F.ones_like(x), repeats=self._size, axis=0))
        masks = F.reshape(masks, shape=(-4, -1, self._heads, 0, 0))
        own = F.slice_axis(masks, axis=1, begin=self._begin, end=self._begin + self._heads // self._size)
        return x * F.reshape(own, shape=(-3, 0, 0))


def split_mlp(mlp: HybridBlock, slices: Slices) -> HybridBlock:
    first, activation, last = mlp
    return chained(slices.column(first), type(activation)(), slices.row(last))


def split_scores(norm: HybridBlock, scores: nn.Dense, slices: Slices) -> Tuple[HybridBlock, int]:
    own = slices.share(scores._units, f"the vocabulary of {scores._units} tokens")
    return chained(slices.whole(norm), slices.column(scores)), own


def halves(decoder: HybridBlock, attention: HybridBlock, slices: Slices) -> List[HybridBlock]:
    """attention: the rank's part of it."""
    rate = decoder.dropout._rate
    return [Half(slices.whole(decoder.norm1), attention, rate, slices.first),
            Half(slices.whole(decoder.norm2), split_mlp(decoder.mlp, slices), rate, slices.first)]
