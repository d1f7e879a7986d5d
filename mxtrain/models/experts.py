"""Mixtures of experts: hidden layers that a router chooses among, token by token.

    x: (rows, time, width)
    route      slots (experts, capacity): the token that stands in each place of each expert
               weights (experts, capacity): what the expert's output for it counts; 0 where the place is empty
               places (ways, tokens): the places that each token stands in, counted over all experts; the number of
               places where there is none
    dispatch   (experts, capacity, width): the tokens in their places
    experts    (experts, capacity, width) -> the same shape
    combine    (tokens, width): for each token the weighted sum over its places

All rows that the block gets are routed together: the shard. Only what is between dispatch and combine depends on where
experts live. Nothing in the graph knows how many tokens there are, so it serves shards of all sizes: an array is made
as long as the capacity by taking every q-th of the tokens, each repeated p times.

Tokens and places are counted in float32: experts * tokens of a shard must stay below 2^24 (16 million).

Top-1: Fedus et al. 2021 (Switch). Top-2: Lepikhin et al. 2020 (GShard), without its random choice of whether the second
expert is asked. Expert choice: Zhou et al. 2022. Router z-loss: Zoph et al. 2022.
"""

from __future__ import annotations

from typing import Callable, Dict, Optional

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, HybridBlock, Parameter, nn

from mxtrain.models.experts_settings import ExpertsConfig, choices, share

_MOMENTUM = 0.99  # of what is told about the routing: a mean over about the last hundred updates


class Mixture(HybridBlock):
    """Experts in place of a hidden layer. x: (rows, time, width) -> the same shape, 0 for tokens without an expert.

    make: given a prefix, the block of one expert, over the last axis.
    deviation: of the router's weights at the start.
    """

    def __init__(self, config: ExpertsConfig, width: int, make: Callable[[str], HybridBlock], deviation: float,
                 prefix: str):
        super().__init__(prefix=prefix)
        self._width, self._ways = width, config.experts if config.routing == "expert-choice" else choices(config)
        with self.name_scope():
            self.router = Router(config, width, deviation)
            self.experts = Experts(config.experts, make)

    def hybrid_forward(self, F, x):
        tokens = F.reshape(x, shape=(-1, self._width))
        rows = F.cast(F.slice_axis(F.shape_array(x), axis=0, begin=0, end=1), "float32")
        slots, weights, places = self.router(tokens, rows)
        outputs = self.experts(F.take(tokens, slots))
        return F.reshape_like(_combine(F, outputs, weights, places, self._width, self._ways), x)


class Router(HybridBlock):
    """Chooses by a linear layer without bias. (tokens, width), (1,) rows -> slots, weights, places.

    Its backward adds the gradient of the losses that even out the experts and keep scores small, times the rows: like
    any sum over samples it becomes a mean when gradients are divided by the rows of the batch, the mean over shards,
    each counted by its rows. The loss that is told is without them.
    """

    def __init__(self, config: ExpertsConfig, width: int, deviation: float):
        super().__init__(prefix="router_")
        self._config = config
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(config.experts, width), init=mx.init.Normal(deviation))
            self.statistics = Statistics(config.experts)

    def hybrid_forward(self, F, tokens, rows, weight):
        config, experts = self._config, self._config.experts
        scores = F.FullyConnected(tokens, weight, no_bias=True, num_hidden=experts)
        log_p = F.log_softmax(scores, axis=1)
        p = F.exp(log_p)
        room = _room(F, F.contrib.arange_like(scores, axis=0), share(config))
        choose = _by_experts if config.routing == "expert-choice" else _by_tokens
        (slots, weights, places), load, first_load, lost = choose(F, p, room, config)
        balance = experts * F.sum(first_load * _mean(F, p), keepdims=True)
        z = _mean(F, F.square(F.slice_axis(scores - log_p, axis=1, begin=0, end=1)))
        entropy = -F.sum(_mean(F, p * log_p), keepdims=True)
        values = F.concat(load, lost, entropy, balance, z, F.ones_like(z), dim=0)
        loss = config.router_z_weight * z
        if config.routing != "expert-choice":
            loss = loss + config.balance_weight * balance
        # Both count nothing in the sum, but are run, forward and backward: the gradient of MakeLoss is 1 whatever comes
        # back to it. Two equal rows are normalized to 0, and their mean goes into the running mean.
        kept = F.sum(self.statistics(F.stack(values, values, axis=0)), axis=(0, 1), keepdims=True)
        nothing = 0 * (F.MakeLoss(F.reshape(rows * loss, shape=(1, 1))) + kept)
        return slots, F.broadcast_add(weights, nothing), places


class Statistics(nn.BatchNorm):
    """Running means of numbers about the routing: the load of each expert (its share of the choices), the share of
    choices that are lost, entropy (nats), balance loss, z-loss, and 1, by which they are to be divided since all means
    begin at 0. Given two equal rows it returns zeros in training."""

    def __init__(self, experts: int):
        super().__init__(momentum=_MOMENTUM, center=False, scale=False, in_channels=experts + 5, prefix="statistics_")


def told(net: Block, read: Callable[[Parameter], Optional[np.ndarray]]) -> Dict[str, float]:
    """What to log of the mixtures in a network: means over them of the latest updates; empty where there are none, or
    none was trained.

    read: gives the value of a parameter.
    load_spread: largest load of an expert in even shares, 1 where all have the same. dropped: share of the choices (of
    the tokens, where experts choose) that found no expert.
    """
    layers = []
    net.apply(lambda block: layers.append(block) if isinstance(block, Statistics) else None)
    means = [read(layer.running_mean) for layer in layers]
    found = [_values(array) for array in means if array is not None and array[-1]]
    return {name: sum(values[name] for values in found) / len(found) for name in (found[0] if found else ())}


def _values(means: np.ndarray) -> Dict[str, float]:
    *loads, lost, entropy, balance, z, _ = (means.astype("float64") / means[-1]).tolist()
    return {"load_spread": max(loads) * len(loads), "dropped": lost, "router_entropy": entropy,
            "balance_loss": balance, "router_z_loss": z}


class Experts(HybridBlock):
    """Hidden layers, each over its own tokens. (experts, capacity, width) -> the same shape.

    Each is a block by itself: on a CPU, oneDNN's product of each takes a third of the time of one batch_dot, and one
    array of all weights would have to be cut up in every pass.
    """

    def __init__(self, experts: int, make: Callable[[str], HybridBlock]):
        super().__init__(prefix="")
        self._experts = [make(f"expert{i}_") for i in range(experts)]
        for expert in self._experts:
            self.register_child(expert)

    def hybrid_forward(self, F, x):
        inputs = _parts(F, x, len(self._experts))
        return F.stack(*(expert(one) for expert, one in zip(self._experts, inputs)), axis=0)


def _by_tokens(F, p, room, config: ExpertsConfig):
    """Each token chooses its best experts; who comes first finds room, in the order of the tokens, and all first
    choices come before the second ones. p: (tokens, experts).

    Returns (routes, share of the choices that each expert gets, the same of the first ones, share that is lost (1,)).
    """
    experts, capacity = config.experts, _count(F, room)
    tokens, chosen = F.contrib.arange_like(p, axis=0), F.argmax(p, axis=1)
    gates, hits = F.pick(p, chosen, axis=1), F.one_hot(chosen, experts)
    first_load = load = _mean(F, hits)
    if choices(config) == 2:
        second = F.argmax(p - 2 * hits, axis=1)
        second_gates = F.pick(p, second, axis=1)
        both = gates + second_gates
        gates = F.concat(gates / both, second_gates / both, dim=0)
        tokens, chosen = F.concat(tokens, tokens, dim=0), F.concat(chosen, second, dim=0)
        hits = F.concat(hits, F.one_hot(second, experts), dim=0)
        load = _mean(F, hits)
    turn = F.pick(F.cumsum(hits, axis=0), chosen, axis=1) - 1
    found = F.broadcast_lesser(turn, capacity)
    place = F.where(found, F.broadcast_mul(chosen, capacity) + turn, F.broadcast_like(experts * capacity, turn))
    # Which choice stands in a place, counted from 1; those that are lost go behind the last place, and are cut off.
    empty = F.tile(F.zeros_like(room), reps=(experts,))
    numbers = _copied(F, F.concat(empty, F.zeros_like(place), dim=0), place, 1 + F.contrib.arange_like(place))
    numbers = F.reshape(F.slice_like(numbers, empty), shape=(experts, -1))
    slots, weights = (F.take(F.concat(F.zeros_like(capacity), array, dim=0), numbers) for array in (tokens, gates))
    lost = 1 - _mean(F, F.expand_dims(found, axis=1))
    return (slots, weights, F.reshape(place, shape=(choices(config), -1))), load, first_load, lost


def _by_experts(F, p, room, config: ExpertsConfig):
    """Each expert takes as many tokens as it has room for, those that have the highest scores for it. What is lost are
    the tokens that none takes. As _by_tokens."""
    experts, capacity = config.experts, _count(F, room)
    p = F.transpose(p)
    order = F.argsort(p, axis=1, is_ascend=False)
    slots = F.slice_like(order, F.expand_dims(room, axis=0), axes=(1,))
    starts = F.contrib.arange_like(F.slice_axis(p, axis=1, begin=0, end=1))  # of each expert's row in p, as one list
    starts = F.broadcast_mul(starts, F.expand_dims(_count(F, F.slice_axis(p, axis=0, begin=0, end=1)), axis=0))
    taken = F.reshape(F.broadcast_add(slots, starts), shape=(-1,))
    weights = F.reshape_like(F.take(F.reshape(p, shape=(-1,)), taken), slots)
    nowhere = F.broadcast_mul(F.reshape(F.ones_like(p), shape=(-1,)), experts * capacity)
    places = F.reshape(_copied(F, nowhere, taken, F.contrib.arange_like(taken)), shape=(experts, -1))
    lost = _mean(F, F.expand_dims(F.broadcast_equal(F.min(places, axis=0), experts * capacity), axis=1))
    load = F.reshape(F.ones_like(starts), shape=(-1,)) / experts
    return (slots, weights, places), load, load, lost


def _combine(F, outputs, weights, places, width: int, ways: int):
    """(experts, capacity, width) -> (tokens, width)."""
    outputs = F.reshape(outputs, shape=(-1, width))
    first = F.slice_axis(outputs, axis=0, begin=0, end=1)
    # A product with ones: on a CPU, multiplying with broadcasting takes ten times as long.
    weighted = outputs * F.dot(F.reshape(weights, shape=(-1, 1)), F.ones_like(first))
    weighted = F.concat(weighted, F.zeros_like(first), dim=0)
    found = F.take(weighted, places)
    if ways == 1:
        return F.reshape(found, shape=(-1, width))
    return F.add_n(*F.split(found, num_outputs=ways, axis=0, squeeze_axis=True))


def _parts(F, array, number: int):
    """The parts of an array along its first axis, without it."""
    parts = F.split(array, num_outputs=number, axis=0, squeeze_axis=True)
    return parts if number > 1 else [parts]


def _copied(F, to, where, numbers):
    """Three vectors -> the first, which must not be the shortest, with the numbers in some places."""
    return F.reshape(F.contrib.index_copy(F.expand_dims(to, axis=1), F.cast(where, "int32"),
                                          F.expand_dims(numbers, axis=1)), shape=(-1,))


def _room(F, tokens, part):
    """An array of ceil(part * n) numbers, from one of n."""
    several = F.repeat(tokens, repeats=part.numerator)
    return F.slice(several, begin=(None,), end=(None,), step=(part.denominator,))


def _count(F, array):
    """How many elements an array has: (1,)."""
    return F.cast(F.size_array(array), "float32")


def _mean(F, array):
    """Over the first axis: (n, m) -> (m,). On a CPU this product takes a fifth of the time of MXNet's mean."""
    ones = F.ones_like(F.slice_axis(array, axis=1, begin=0, end=1))
    sums = F.reshape(F.dot(ones, array, transpose_a=True), shape=(-1,))
    return F.broadcast_div(sums, _count(F, ones))
