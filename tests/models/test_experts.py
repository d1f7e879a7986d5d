"""Mixtures of experts against a loop over tokens in numpy: who goes where, outputs, gradients, what is told."""

import re
from math import ceil, erf, sqrt

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

from mxtrain import config
from mxtrain.errors import UserError
from mxtrain.models import plan, weights
from mxtrain.models.experts import Mixture, Router, told
from mxtrain.models.experts_settings import ExpertsConfig, choices
from mxtrain.models.gpt import GPT
from mxtrain.models.gpt_settings import GPTConfig
from mxtrain.train.setup import initialize

WIDTH, HIDDEN, EXPERTS = 5, 7, 4
X = np.random.RandomState(0).randn(3, 7, WIDTH)
TOP1, TOP2, CHOICE = ({"experts": EXPERTS, "routing": routing} for routing in ("top1", "top2", "expert-choice"))


def mixture(settings):
    """With weights far from those of a start, so that all experts matter and scores are apart."""
    def expert(prefix):
        layers = nn.HybridSequential(prefix=prefix)
        layers.add(nn.Dense(HIDDEN, in_units=WIDTH, flatten=False), nn.GELU(),
                   nn.Dense(WIDTH, in_units=HIDDEN, flatten=False))
        return layers

    net, random = Mixture(settings, WIDTH, expert, 0.02, prefix=""), np.random.RandomState(1)
    initialize(net, [mx.cpu()], 0)
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            parameter.set_data(mx.nd.array(0.7 * random.randn(*parameter.shape)))
    return net


# The layer in numpy, in float64. w: arrays by name.


def softmax(scores):
    p = np.exp(scores - scores.max())
    return p / p.sum()


def route(p, settings):
    """p: (tokens, experts). Returns for each expert its list of (token, weight), and the number of choices lost."""
    tokens, experts = p.shape
    taken, lost = [[] for _ in range(experts)], 0
    if settings.routing == "expert-choice":
        room = ceil(settings.capacity_factor * tokens / experts)
        for e in range(experts):
            taken[e] = [(t, p[t, e]) for t in sorted(range(tokens), key=lambda t: -p[t, e])[:room]]
        return taken, tokens - len({t for pairs in taken for t, _ in pairs})
    k = 2 if settings.routing == "top2" else 1
    room = ceil(settings.capacity_factor * k * tokens / experts)
    best = [sorted(range(experts), key=lambda e: -p[t, e])[:k] for t in range(tokens)]
    for choice in range(k):
        for t in range(tokens):
            e = best[t][choice]
            if len(taken[e]) < room:
                taken[e].append((t, p[t, e] / sum(p[t, best[t]]) if k == 2 else p[t, e]))
            else:
                lost += 1
    return taken, lost


def expert(x, w, e):
    hidden = x @ w[f"experts.{e}.0.weight"].T + w[f"experts.{e}.0.bias"]
    hidden = hidden * 0.5 * (1 + np.vectorize(erf)(hidden / sqrt(2)))
    return hidden @ w[f"experts.{e}.2.weight"].T + w[f"experts.{e}.2.bias"]


def forward(x, w, settings):
    """(output, what is told without load_spread)."""
    flat = x.reshape(-1, WIDTH)
    scores = flat @ w["router.weight"].T
    p = np.array([softmax(row) for row in scores])
    taken, lost = route(p, settings)
    output = np.zeros_like(flat)
    for e, pairs in enumerate(taken):
        for t, weight in pairs:
            output[t] += weight * expert(flat[t], w, e)
    first = np.bincount(p.argmax(axis=1), minlength=settings.experts) / len(p)
    if settings.routing == "expert-choice":
        first[:] = 1 / settings.experts
    values = {"dropped": lost / len(p) / choices(settings), "router_entropy": -(p * np.log(p)).sum(axis=1).mean(),
              "balance_loss": settings.experts * (first * p.mean(axis=0)).sum(),
              "router_z_loss": (np.log(np.exp(scores).sum(axis=1)) ** 2).mean()}
    return output.reshape(x.shape), values


def arrays_of(net):
    return {name: p.data().asnumpy().astype("float64") for name, p in weights.parameters(net).items()}


def value_of(parameter):
    return parameter.data().asnumpy()


ALL = [({**TOP1}, 0), ({**TOP1, "capacity_factor": 0.75}, 2), ({**TOP2, "capacity_factor": 1.5}, 0),
       ({**TOP2, "capacity_factor": 0.5}, 10), ({**CHOICE, "capacity_factor": 1.0}, 1),
       ({**CHOICE, "capacity_factor": 0.3}, 1), ({"experts": 1, "capacity_factor": 1.0}, 0),
       ({"experts": 3, "capacity_factor": 1.1}, 0)]
names = [f"{given.get('routing', 'top1')}-{given['experts']}-{given.get('capacity_factor', 1.25)}" for given, _ in ALL]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("given, least_lost", ALL, ids=names)
def test_it_is_the_loop_of_numpy(given, least_lost, compiled):
    settings = ExpertsConfig(**given)
    net = mixture(settings)
    net.hybridize(compiled)
    expected, _ = forward(X, arrays_of(net), settings)
    for x in (X, X[:1, :5], X[:2]):  # one graph serves shards of all sizes
        expected, values = forward(x, arrays_of(net), settings)
        # float32 against float64: some ten roundings of 6e-8 on numbers of a size of up to 10.
        np.testing.assert_allclose(net(mx.nd.array(x)).asnumpy(), expected, rtol=1e-4, atol=1e-5)
        if x is X:
            assert round(values["dropped"] * 21 * choices(settings)) >= least_lost


@pytest.mark.parametrize("given, _", ALL[:6], ids=names[:6])
def test_gradients_are_those_of_numpy(given, _):
    settings = ExpertsConfig(**given, router_z_weight=0.3, **({} if "choice" in given["routing"] else
                                                             {"balance_weight": 0.7}))
    net, random = mixture(settings), np.random.RandomState(2)
    net.hybridize()
    w, head, x = arrays_of(net), random.randn(*X.shape), mx.nd.array(X)
    x.attach_grad()
    with autograd.record():
        output = net(x)
    output.backward(mx.nd.array(head))
    frozen = arrays_of(net)  # with the running means

    def value(x, w):
        """The sum over samples, and the auxiliary losses times the rows."""
        output, values = forward(x, w, settings)
        balance = 0 if "choice" in settings.routing else 0.7 * values["balance_loss"]
        return (output * head).sum() + len(x) * (balance + 0.3 * values["router_z_loss"])

    found = {name: p.grad().asnumpy() for name, p in weights.parameters(net).items() if p.grad_req != "null"}
    assert set(w) - set(found) == {f"router.statistics.{name}" for name in ("beta", "gamma", "running_mean",
                                                                            "running_var")} and len(frozen) == len(w)
    for name, gradient in [("x", x.grad.asnumpy()), *found.items()]:
        for _ in range(2):
            # By a central difference in float64; so short a step changes nobody's choice.
            step = 1e-5 * random.randn(*gradient.shape)
            ends = [value(X + sign * step, w) if name == "x" else value(X, {**w, name: w[name] + sign * step})
                    for sign in (1, -1)]
            assert (gradient * step).sum() == pytest.approx((ends[0] - ends[1]) / 2, rel=1e-3, abs=1e-9), name


def routed(scores, **given):
    """What a router makes of given scores (tokens, experts): its three arrays."""
    tokens, experts = np.shape(scores)
    net = Router(ExpertsConfig(experts=experts, **given), tokens, 0.02)
    initialize(net, [mx.cpu()], 0)
    net.weight.set_data(mx.nd.array(np.transpose(scores)))
    return [array.asnumpy() for array in net(mx.nd.array(np.eye(tokens)), mx.nd.ones((1,)))]


def test_who_comes_first_finds_room():
    slots, weights, places = routed([[2, 0], [3, 0], [1, 0], [0, 1]], capacity_factor=1)
    gate = [1 / (1 + np.exp(-d)) for d in (2, 3, 1, 1)]
    # Two places each: the third token finds none, and the second place of the second expert stays empty.
    assert slots[0].tolist() == [0, 1] and slots[1][0] == 3
    np.testing.assert_allclose(weights, [[gate[0], gate[1]], [gate[3], 0]], rtol=1e-5)
    assert places.tolist() == [[0, 1, 4, 2]]


def test_first_choices_come_before_second_ones():
    # Room for ceil(0.75 * 2 * 3 / 3) = 2: the first expert is the second choice of token 0 and the first of 1 and 2.
    scores = np.array([[1, 2, 0], [2, 1, 0], [2, 0, 1.5]])
    slots, weights, places = routed(scores, routing="top2", capacity_factor=0.75)
    assert slots[0].tolist() == [1, 2] and slots[1].tolist() == [0, 1] and slots[2][0] == 2
    assert places.tolist() == [[2, 0, 1], [6, 3, 4]]
    share = [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-0.5))]  # of the better of two whose scores differ by 1 and 0.5
    np.testing.assert_allclose(weights, [[share[0], share[1]], [share[0], 1 - share[0]], [1 - share[1], 0]], rtol=1e-5)


def test_experts_may_choose_the_same_token_or_leave_one():
    slots, weights, places = routed([[0, 0, 3], [0, 0, 0.5], [9, 9.1, 9]], routing="expert-choice", capacity_factor=1)
    assert slots.tolist() == [[1], [2], [0]] or slots.tolist() == [[2], [2], [0]]
    p = np.array([softmax(row) for row in np.array([[0, 0, 3], [0, 0, 0.5], [9, 9.1, 9]])])
    assert slots[:, 0].tolist() == p.argmax(axis=0).tolist()
    np.testing.assert_allclose(weights[:, 0], p.max(axis=0), rtol=1e-5)


def test_a_token_that_all_experts_take_gets_the_sum_of_them():
    settings = ExpertsConfig(experts=3, routing="expert-choice", capacity_factor=3)
    net = mixture(settings)  # room for all tokens: each is taken by all experts
    w = arrays_of(net)
    flat = X.reshape(-1, WIDTH)
    p = np.array([softmax(row) for row in flat @ w["router.weight"].T])
    expected = sum(p[:, e:e + 1] * expert(flat, w, e) for e in range(3))
    np.testing.assert_allclose(net(mx.nd.array(X)).asnumpy().reshape(-1, WIDTH), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given, _", ALL[:6], ids=names[:6])
def test_what_is_told(given, _):
    settings = ExpertsConfig(**given)
    net = mixture(settings)
    w = arrays_of(net)
    assert told(net, value_of) == {}
    net(mx.nd.array(X))
    assert told(net, value_of) == {}  # nothing was trained
    for x in (X, X[:, :4]):
        with autograd.record():
            output = net(mx.nd.array(x))
        output.backward()
    values = told(net, value_of)
    one, two = forward(X, w, settings)[1], forward(X[:, :4], w, settings)[1]
    for name, value in one.items():  # a mean that weighs the later update by 1 and the earlier one by 0.99
        assert values[name] == pytest.approx((0.99 * value + two[name]) / 1.99, rel=1e-4), name
    assert told(nn.Dense(3), value_of) == {}


def test_load_spread_is_the_largest_share_in_even_shares():
    net = mixture(ExpertsConfig(**TOP1))
    with autograd.record():
        output = net(mx.nd.array(X))
    output.backward()
    best = (X.reshape(-1, WIDTH) @ net.router.weight.data().asnumpy().T).argmax(axis=1)
    assert told(net, value_of)["load_spread"] == pytest.approx(np.bincount(best).max() / 21 * EXPERTS, rel=1e-4)


# In a GPT.

VOCABULARY, SHAPE = 11, GPTConfig(layers=2, heads=2, width=8, context=6)
IDS = np.random.RandomState(0).randint(0, VOCABULARY, (3, 6)).astype("int32")


def gpt(**given):
    net, random = GPT(VOCABULARY, SHAPE, ExpertsConfig(**given)), np.random.RandomState(2)
    initialize(net, [mx.cpu()], 0)
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            parameter.set_data(mx.nd.array(0.5 * random.randn(*parameter.shape)))
    net.hybridize()
    return net


def seen(net):
    """Pairs (changed place, changed output before it) in one sequence."""
    before, found = net(mx.nd.array(IDS[:1], dtype="int32")).asnumpy(), []
    for t in range(IDS.shape[1]):
        for token in range(VOCABULARY):
            changed = IDS[:1].copy()
            changed[0, t] = token
            after = net(mx.nd.array(changed, dtype="int32")).asnumpy()
            # Another token in another place may round otherwise.
            found += [(t, s) for s in range(t) if np.abs(after[0, s] - before[0, s]).max() > 1e-4]
    return found


def test_a_later_token_may_take_the_place_of_a_second_choice():
    one = routed([[1, 2], [1, 2.5]], routing="top2", capacity_factor=0.5)[2]  # room for one token each
    other = routed([[1, 2], [2.5, 1]], routing="top2", capacity_factor=0.5)[2]
    assert one.tolist() == [[1, 2], [0, 2]] and other.tolist() == [[1, 0], [2, 2]]


def test_experts_that_choose_see_later_tokens_and_other_routing_does_not():
    assert seen(gpt(**TOP1, expert_every=1, capacity_factor=0.75)) == []
    assert seen(gpt(**TOP2, expert_every=1, capacity_factor=2)) == []  # there is room for all
    assert seen(gpt(**CHOICE, expert_every=1, allow_leak=True))


def test_a_gpt_has_experts_in_every_other_block():
    net = gpt(**TOP1)
    assert [type(block.mlp) for block in net.blocks] == [nn.HybridSequential, Mixture]
    assert all(isinstance(block.mlp, Mixture) for block in gpt(**TOP1, expert_every=1).blocks)
    assert plan.segments(net) == [net.embeddings, *net.blocks, net.output]
    plan.check(net, plan.segments(net), mx.nd.array(IDS, dtype="int32"))
    assert not any(map(plan.draws, plan.segments(net)))


@pytest.mark.parametrize("given, says", [
    ({"experts": -1}, "--experts -1: must be 1 or more, or 0 for none"),
    ({"experts": 1, "routing": "top2"}, "--experts 1: --routing top2 needs 2 or more"),
    ({**TOP1, "capacity_factor": 0}, "--capacity-factor 0: must be above 0"),
    ({**TOP1, "capacity_factor": float("nan")}, "--capacity-factor nan: must be above 0"),
    ({**TOP1, "capacity_factor": 1.125}, "--capacity-factor 1.125: must have no more than two decimals"),
    ({**TOP1, "capacity_factor": 4.01}, "--capacity-factor 4.01: makes room for more tokens than a shard has; 4 "
                                        "experts with top1 take 4 at most"),
    ({**TOP2, "capacity_factor": 2.5}, "4 experts with top2 take 2 at most"),
    ({**TOP1, "expert_every": 0}, "--expert-every 0: must be 1 or more"),
    ({**TOP1, "balance_weight": -1}, "--balance-weight -1: must be 0 or more"),
    ({**TOP1, "router_z_weight": float("nan")}, "--router-z-weight nan: must be 0 or more"),
    ({**CHOICE, "balance_weight": 0.1}, "--balance-weight 0.1: has no effect with --routing expert-choice"),
    ({**TOP2, "allow_leak": True}, "--allow-leak: has no effect with --routing top2"),
    ({"routing": "top2"}, "--routing top2: has no effect without --experts"),
    ({"capacity_factor": 0.0}, "--capacity-factor 0.0: has no effect without --experts"),
])
def test_experts_that_cannot_be(given, says):
    with pytest.raises(UserError, match=re.escape(says)):
        ExpertsConfig(**given)
    if "experts" in given:
        with pytest.raises(UserError, match=re.escape(says)):
            config.build(given)


@pytest.mark.parametrize("given, says", [
    (CHOICE, "--routing expert-choice: an expert takes or leaves a token by comparing it with those that follow"),
    ({**TOP1, "expert_every": 3}, "--expert-every 3: no block of --layers 2 would have experts"),
])
def test_experts_that_a_gpt_refuses(given, says):
    with pytest.raises(UserError, match=re.escape(says)):
        GPT(VOCABULARY, SHAPE, ExpertsConfig(**given))
