"""Where a network is cut: against all possible cuts, and measured on networks with one dear segment."""

import itertools
import time

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import Block, nn

from mxtrain.errors import UserError
from mxtrain.parallel.cut import balanced, by_hand, measure
from mxtrain.tasks.heads import heads_for

HEAD, _ = heads_for(gluon.loss.SoftmaxCrossEntropyLoss(), 3)
CTX = mx.cpu(0)


def stage_costs(costs, starts):
    return [sum(costs[a:b]) for a, b in zip(starts, [*starts[1:], len(costs)])]


@pytest.mark.parametrize("costs, stages, starts", [
    ([1, 1, 1, 1], 1, [0]),
    ([1, 1, 1, 1], 2, [0, 2]),
    ([1, 1, 1, 1], 4, [0, 1, 2, 3]),
    ([1, 1, 1, 5], 2, [0, 3]),
    ([5, 1, 1, 1, 1], 3, [0, 1, 3]),  # of [5, 1, 3], [5, 2, 2] and [5, 3, 1] the most even
    ([5, 1, 1, 1], 3, [0, 1, 2]),  # of [5, 1, 2] and [5, 2, 1] the first
    ([0, 0, 0], 3, [0, 1, 2]),
])
def test_cuts_by_cost(costs, stages, starts):
    assert balanced(costs, stages, "Net") == starts


def test_the_dearest_stage_is_as_cheap_as_in_any_cut():
    generator = np.random.RandomState(3)
    for _ in range(40):
        costs = generator.randint(0, 20, generator.randint(1, 9)).tolist()  # whole numbers: the sums are exact
        for stages in range(1, len(costs) + 1):
            starts = balanced(costs, stages, "Net")
            assert len(starts) == stages and starts[0] == 0 and starts == sorted(set(starts))
            best = min((max(of), sum(c * c for c in of)) for of in (
                stage_costs(costs, [0, *cuts]) for cuts in itertools.combinations(range(1, len(costs)), stages - 1)))
            chosen = stage_costs(costs, starts)
            assert (max(chosen), sum(c * c for c in chosen)) == best


def test_many_segments_of_odd_costs():
    costs = np.random.RandomState(1).rand(150).tolist()
    assert max(stage_costs(costs, balanced(costs, 8, "Net"))) < sum(costs) / 8 + max(costs)


def test_cuts_by_hand():
    assert by_hand([3, 7], 8, 3, "Net") == [0, 3, 7]
    assert by_hand([], 1, 1, "Net") == [0]


@pytest.mark.parametrize("firsts", [[3], [3, 4, 5], [0, 3], [5, 3], [3, 3], [3, 8], [-1, 3], []])
def test_a_wrong_cut_by_hand_is_refused(firsts):
    allowed = ": must be .* after the first: 2 increasing numbers from 1 to 7, since --pp is 3 and Net has 8 segments$"
    with pytest.raises(UserError, match=f"^--cut {' '.join(map(str, firsts))}{allowed}"):
        by_hand(firsts, 8, 3, "Net")


def test_a_stage_without_segments_is_refused():
    for cut in (lambda: balanced([1.0] * 3, 4, "Net"), lambda: by_hand([1, 2, 3], 3, 4, "Net")):
        with pytest.raises(UserError, match="^--pp 4: Net has 3 segments, and each stage needs one$"):
            cut()
    with pytest.raises(UserError, match="^--pp 2: Net offers no segments; a HybridSequential, "):
        balanced([1.0], 2, "Net")


class Plain(gluon.Block):
    """Imperative; it leaves out one of its parameters."""

    def __init__(self):
        super().__init__(prefix="plain_")
        self.used = nn.Dense(6, in_units=6, prefix="plain_used_")
        self.unused = nn.Dense(6, in_units=6, prefix="plain_unused_")

    def forward(self, x):
        return self.used(x)


def network():
    net = nn.Sequential(prefix="")
    net.add(nn.Dense(6, in_units=4), nn.BatchNorm(in_channels=6), nn.Dropout(0.5), Plain(), nn.Dense(3, in_units=6))
    mx.random.seed(2)
    net.initialize(mx.init.Xavier(), ctx=CTX)
    return net


def sample(rows=4, features=4):
    generator = np.random.RandomState(5)
    return mx.nd.array(generator.randn(rows, features)), mx.nd.array(generator.randint(0, 3, rows))


def state(net):
    """All values and gradients."""
    parameters = net.collect_params()
    return {**{name: p.data().asnumpy() for name, p in parameters.items()},
            **{f"gradient of {name}": p.grad().asnumpy() for name, p in parameters.items() if p.grad_req != "null"}}


def pass_over(net, x, y):
    """One forward and backward with known masks, onto gradients of 1."""
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            parameter.grad()[:] = 1
    mx.random.seed(1)
    with autograd.record():
        loss, _ = HEAD(net(x), y)
    loss.backward()


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("input_gradient", [False, True])
def test_measuring_leaves_no_trace(request_, input_gradient):
    net, (x, y) = network(), sample()
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            parameter.grad_req = request_
    pass_over(net, x, y)
    before = state(net)
    costs = measure(list(net), [x], y, HEAD, CTX, input_gradient)
    assert len(costs) == 5 and min(costs) > 0
    np.testing.assert_equal(state(net), before)
    assert x.grad is None
    pass_over(net, x, y)  # gradients go to the same arrays as before, in the same way; only running statistics move
    moved = [name for name, values in state(net).items() if not np.array_equal(values, before[name])]
    assert len(moved) == 2 and all("running" in name for name in moved)


class Slow(Block):
    """Takes its time, whatever else the machine has to do."""

    def forward(self, x):
        time.sleep(0.1)
        return x * 1


def test_a_heavy_segment_costs_most():
    for place in (0, 2):
        net = nn.Sequential(prefix="")
        net.add(*(Slow() if i == place else nn.Dense(3, in_units=3) for i in range(4)))
        net.initialize(ctx=CTX)
        x, y = sample(4, 3)
        costs = measure(list(net), [x], y, HEAD, CTX)
        assert costs[place] >= 0.1 and costs[place] == max(costs)


def test_whole_numbers_as_inputs_and_segments_with_nothing_to_train():
    net = nn.HybridSequential(prefix="")
    net.add(nn.HybridLambda(lambda F, x: x % 5), nn.Embedding(5, 4), nn.Flatten(), nn.Dense(3, in_units=8))
    net.initialize(ctx=CTX)
    tokens = mx.nd.array([[1, 7], [3, 2]], dtype="int32")
    costs = measure(list(net), [tokens], mx.nd.array([0, 1]), HEAD, CTX)
    assert len(costs) == 4 and min(costs) > 0
    net.collect_params().setattr("grad_req", "null")  # frozen as a whole: forward only
    assert min(measure(list(net), [tokens], mx.nd.array([0, 1]), HEAD, CTX)) > 0
