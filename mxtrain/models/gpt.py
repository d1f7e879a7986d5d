"""A GPT: a pre-norm decoder of GPT-2's shape (Radford et al. 2019), with experts in some of its blocks where asked for.

ids: (batch, time) whole numbers from 0 to vocabulary - 1 -> scores: (batch, time, vocabulary), for the token that
follows each. time: 1 to context. The embedding of tokens and the output are two parameters, which `tied` keeps equal.
"""

from __future__ import annotations

import functools
import math
from typing import List, Optional, Tuple

import mxnet as mx
from mxnet.gluon import Block, HybridBlock, Parameter, nn

from mxtrain.errors import UserError
from mxtrain.models.experts import Mixture
from mxtrain.models.experts_settings import ExpertsConfig, in_block
from mxtrain.models.gpt_settings import GPTConfig
from mxtrain.models.gpt_split import HeadsDropout, SplitEmbeddings, halves, split_scores
from mxtrain.models.split import Slices

_DEVIATION = 0.02  # of the weights at the start


class Embeddings(HybridBlock):
    """The sum of what stands for a token and for its place. (batch, time) -> (batch, time, width)."""

    def __init__(self, vocabulary: int, config: GPTConfig):
        super().__init__(prefix="embeddings_")
        self._vocabulary, self._width = vocabulary, config.width
        init = mx.init.Normal(_DEVIATION)
        with self.name_scope():
            self.token = self.params.get("token_weight", shape=(vocabulary, config.width), init=init)
            self.position = self.params.get("position_weight", shape=(config.context, config.width), init=init)
            self.dropout = nn.Dropout(config.dropout)

    def hybrid_forward(self, F, ids, token, position):
        vectors = F.Embedding(ids, token, input_dim=self._vocabulary, output_dim=self._width)
        places = F.slice_like(F.expand_dims(position, axis=0), vectors, axes=(1,))
        return self.dropout(F.broadcast_add(vectors, places))

    def split_layers(self, slices: Slices) -> List[HybridBlock]:
        return [SplitEmbeddings(self, slices)]


class Attention(HybridBlock):
    """Causal self-attention with several heads: a token sees itself and those before it. x: (batch, time, width)."""

    def __init__(self, config: GPTConfig):
        super().__init__(prefix="attention_")
        self._heads, self._scale = config.heads, 1 / math.sqrt(config.width // config.heads)
        with self.name_scope():
            self.qkv = _dense(3 * config.width, config.width, prefix="qkv_")
            self.weights_dropout = nn.Dropout(config.dropout)
            self.out = _dense(config.width, config.width, _residual_deviation(config), prefix="out_")

    def hybrid_forward(self, F, x):
        query, key, value = (self._split(F, part) for part in F.split(self.qkv(x), num_outputs=3, axis=2))
        scores = F.batch_dot(query * self._scale, key, transpose_b=True)  # (batch * heads, time, time)
        # Row i is the softmax of its first i + 1 values, less their largest, and 0 behind them. That takes an eighth of
        # the time on a CPU that adding a mask of -infinity does, and cannot give 0/0.
        seen = F.expand_dims(F.contrib.arange_like(scores, axis=1, start=1), axis=0)
        seen = F.cast(F.broadcast_like(seen, scores, lhs_axes=(0,), rhs_axes=(0,)), "int32")
        weights = self.weights_dropout(F.softmax(scores, seen, use_length=True, axis=-1))
        heads = F.reshape(F.batch_dot(weights, value), shape=(-4, -1, self._heads, 0, 0))
        return self.out(F.reshape(F.transpose(heads, axes=(0, 2, 1, 3)), shape=(0, 0, -3)))

    def _split(self, F, x):
        """(batch, time, width) -> (batch * heads, time, width / heads)."""
        heads = F.transpose(F.reshape(x, shape=(0, 0, -4, self._heads, -1)), axes=(0, 2, 1, 3))
        return F.reshape(heads, shape=(-3, 0, 0))


class _SplitAttention(Attention):
    """A rank's heads of an attention, and what they add to its output."""

    def __init__(self, whole: Attention, slices: Slices):
        HybridBlock.__init__(self, prefix=whole.prefix)
        self._heads, self._scale = slices.share(whole._heads, f"{whole._heads} heads"), whole._scale
        self.qkv, self.out = slices.column(whole.qkv, runs=3), slices.row(whole.out)
        self.weights_dropout = HeadsDropout(whole.weights_dropout._rate, whole._heads, slices)


class Decoder(HybridBlock):
    """One block: x + attention(norm(x)), then x + mlp(norm(x)). x: (batch, time, width).

    experts: None where the hidden layer is dense.
    """

    def __init__(self, config: GPTConfig, experts: Optional[ExpertsConfig], prefix: str):
        super().__init__(prefix=prefix)
        width = config.width
        with self.name_scope():
            self.norm1, self.norm2 = nn.LayerNorm(in_channels=width), nn.LayerNorm(in_channels=width)
            self.attention = Attention(config)
            make = functools.partial(hidden_layer, config)
            self.mlp = Mixture(experts, width, make, _DEVIATION, prefix="mlp_") if experts else make("mlp_")
            self.dropout = nn.Dropout(config.dropout)

    def hybrid_forward(self, F, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))

    def split_layers(self, slices: Slices) -> List[HybridBlock]:
        if isinstance(self.mlp, Mixture):
            raise UserError(f"--tp {slices.size}: mixtures of experts are not split inside their layers; leave out --experts")
        return halves(self, _SplitAttention(self.attention, slices), slices)


class Output(HybridBlock):
    """The last normalization, and a score for each token of the vocabulary."""

    def __init__(self, vocabulary: int, config: GPTConfig):
        super().__init__(prefix="output_")
        with self.name_scope():
            self.norm = nn.LayerNorm(in_channels=config.width)
            self.scores = _dense(vocabulary, config.width, use_bias=False, prefix="scores_")

    def hybrid_forward(self, F, x):
        return self.scores(self.norm(x))

    def split_scores(self, slices: Slices) -> Tuple[HybridBlock, int]:
        return split_scores(self.norm, self.scores, slices)


class GPT(HybridBlock):
    """See the module. Its segments are the embeddings, each block, and the output.

    Raises UserError for experts that no block has, and for experts that choose, unless that is allowed.
    """

    def __init__(self, vocabulary: int, config: GPTConfig, experts: ExpertsConfig = ExpertsConfig()):
        _check(config, experts)
        super().__init__(prefix="gpt_")
        self._tied = config.tied
        with self.name_scope():
            self.embeddings = Embeddings(vocabulary, config)
            self.blocks = nn.HybridSequential(prefix="")
            self.blocks.add(*(Decoder(config, experts if in_block(experts, i) else None, f"block{i}_")
                              for i in range(config.layers)))
            self.output = Output(vocabulary, config)

    def plan(self) -> List[Block]:
        return [self.embeddings, *self.blocks, self.output]

    def tied(self) -> List[Tuple[Parameter, Parameter]]:
        return [(self.embeddings.token, self.output.scores.weight)] if self._tied else []

    def hybrid_forward(self, F, ids):
        return self.output(self.blocks(self.embeddings(ids)))


def _check(config: GPTConfig, experts: ExpertsConfig) -> None:
    if experts.experts and experts.expert_every > config.layers:
        raise UserError(f"--expert-every {experts.expert_every}: no block of --layers {config.layers} would have "
                        "experts")
    if experts.routing == "expert-choice" and not experts.allow_leak:
        raise UserError("--routing expert-choice: an expert takes or leaves a token by comparing it with those that "
                        "follow, which a language model must not know; --allow-leak trains one all the same")


def hidden_layer(config: GPTConfig, prefix: str, hidden: Optional[int] = None) -> HybridBlock:
    """Two layers over the last axis, of four times the width or `hidden` in between."""
    layer, hidden = nn.HybridSequential(prefix=prefix), hidden or 4 * config.width
    with layer.name_scope():
        layer.add(_dense(hidden, config.width), nn.GELU(), _dense(config.width, hidden, _residual_deviation(config)))
    return layer


def _dense(units: int, inputs: int, deviation: float = _DEVIATION, **named) -> nn.Dense:
    """A layer over the last axis."""
    return nn.Dense(units, in_units=inputs, flatten=False, weight_initializer=mx.init.Normal(deviation), **named)


def _residual_deviation(config: GPTConfig) -> float:
    """Of the weights that lead back to x: each block adds to it twice, and it should not grow with their number."""
    return _DEVIATION / math.sqrt(2 * config.layers)
