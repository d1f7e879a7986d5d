"""Segments compute the network, bit for bit, and are as fine as they can be."""

import mxnet as mx
import pytest
from mxnet.gluon import Block, HybridBlock, nn, rnn

from mxtrain import UserError
from mxtrain.models import plan, small, zoo


def kinds(chain):
    return [type(block).__name__ for block in chain]


class Residual(HybridBlock):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2D(4, 3, padding=1)

    def hybrid_forward(self, F, x):
        return x + self.body(x)


class Straight(HybridBlock):
    """A chain written down in forward: out of order of creation, and with a block that comes twice."""

    def __init__(self):
        super().__init__()
        self.last = nn.Dense(3)
        self.relu = nn.Activation("relu")
        self.first = nn.Conv2D(4, 3)
        self.blocks = nn.HybridSequential()
        self.blocks.add(Residual(), Residual())

    def hybrid_forward(self, F, x):
        return self.last(self.relu(self.blocks(self.relu(self.first(x)))))


class RegisteredTwice(HybridBlock):
    """Its layers are children of it and of its child, as in gluoncv's GoogLeNet."""

    def __init__(self):
        super().__init__()
        self.flat, self.output = nn.Flatten(), nn.Dense(3)
        self.head = nn.HybridSequential()
        self.head.add(self.flat, self.output)

    def hybrid_forward(self, F, x):
        return self.head(x)


class Between(Straight):
    """An operator stands between two children."""

    def hybrid_forward(self, F, x):
        return self.last(F.sigmoid(self.first(x)))


class TwoOutputs(Straight):
    def hybrid_forward(self, F, x):
        hidden = self.first(x)
        return self.last(hidden), self.relu(hidden)


class TrainingOnly(Straight):
    def hybrid_forward(self, F, x):
        hidden = self.first(x)
        return self.last(self.relu(hidden) if mx.autograd.is_training() else hidden)


class Reused(HybridBlock):
    """A layer with weights that is used twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(5, in_units=5)
        self.output = nn.Dense(2)

    def hybrid_forward(self, F, x):
        return self.output(self.layer(self.layer(x)))


class Planned(Straight):
    def plan(self):
        return [self.first, self.relu, self.blocks, self.relu, self.last]


class WrongPlan(Straight):
    def plan(self):
        return [self.first, self.blocks, self.last]


class Imperative(Block):
    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(2)

    def forward(self, x):
        return self.layer(x) * float(x.asnumpy().mean())


def images(channels=3, side=32):
    mx.random.seed(1)
    return mx.nd.random.uniform(shape=(2, channels, side, side))


@pytest.mark.parametrize("name, side, least", [
    ("digits", 8, 13),
    ("lenet", 28, 8),
    ("mlp", 8, 4),
    ("cifar_resnet20_v1", 16, 13),  # features and output
    ("resnet18_v1b", 32, 15),  # written down in forward
    ("resnet50_v1d_0.11", 32, 29),  # deep stem
    ("mobilenetv2_0.25", 32, 70),
    ("mobilenetv3_small", 32, 50),
    ("se_resnet18_v1", 32, 14),
])
@pytest.mark.parametrize("hybrid", [False, True])
def test_segments_of_known_networks_compute_them(name, side, least, hybrid):
    net = zoo.create(name, 5)
    net.initialize(mx.init.Xavier())
    if hybrid:
        net.hybridize()
    segments = plan.segments(net)
    assert len(segments) >= least
    plan.check(net, segments, images(side=side))


def test_a_forward_that_is_a_chain_is_cut_in_the_order_of_its_calls():
    net = Straight()
    net.initialize()
    segments = plan.segments(net)
    assert kinds(segments) == ["Conv2D", "Activation", "Residual", "Residual", "Activation", "Dense"]
    plan.check(net, segments, images())


def test_a_layer_may_be_the_child_of_two_blocks():
    assert kinds(plan.segments(RegisteredTwice())) == ["Flatten", "Dense"]


@pytest.mark.parametrize("kind", [Between, TwoOutputs, TrainingOnly, Reused, Residual, Imperative])
def test_what_is_no_chain_is_one_segment(kind):
    net = kind()
    assert plan.segments(net) == [net] and plan.blocks(net) == [[net]]


def test_sequentials_are_flattened_whether_hybrid_or_not():
    net, inner = nn.Sequential(), nn.HybridSequential()
    inner.add(nn.Dense(4), nn.Dropout(0.5))
    net.add(inner, Imperative())
    assert kinds(plan.segments(net)) == ["Dense", "Dropout", "Imperative"]


def test_a_block_with_a_hook_is_not_cut_for_its_hook_would_not_run():
    net = small.mlp(3)
    net.register_forward_hook(lambda *_: None)
    assert plan.segments(net) == [net]


def test_cutting_leaves_no_hooks_and_no_initialized_parameters():
    net = Straight()
    plan.segments(net)
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in net._children.values())
    net.initialize()
    assert net(images()).shape == (2, 3)


def test_a_networks_own_plan_is_taken_and_checked():
    net = Planned()
    net.initialize()
    assert plan.segments(net) == net.plan()
    plan.check(net, plan.segments(net), images())
    wrong = WrongPlan()
    wrong.initialize(mx.init.Normal(1))
    with pytest.raises(UserError, match="plan of WrongPlan is wrong"):
        plan.check(wrong, plan.segments(wrong), images())


@pytest.mark.parametrize("make, lengths", [
    (lambda: zoo.create("cifar_resnet20_v1", 5), [2] + 9 * [1] + [2]),  # nine residual blocks
    (Straight, [2, 1, 1, 2]),
    (lambda: small.digits(5), [3, 4, 5, 1]),  # no blocks of its own: by layers with weights
    (lambda: zoo.create("mobilenet0.25", 5), 26 * [3] + [5, 1]),
])
def test_blocks_are_the_networks_own(make, lengths):
    net = make()
    blocks = plan.blocks(net)
    assert sum(blocks, []) == plan.segments(net)
    assert [len(block) for block in blocks] == lengths


class Operator(HybridBlock):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def hybrid_forward(self, F, x):
        return self.function(F, x)


@pytest.mark.parametrize("block, expected", [
    (nn.Dense(3), False),
    (nn.Dropout(0.5), True),
    (nn.Dropout(0), False),
    (rnn.LSTM(4, 2, dropout=0.3), True),
    (rnn.LSTM(4, 2), False),
    (rnn.GRUCell(4), False),  # two inputs
    (nn.LeakyReLU(0.1), False),
    (nn.InstanceNorm(), False),
    (Operator(lambda F, x: F.gamma(x)), False),  # the function, not the distribution
    (Operator(lambda F, x: x + F.random.gamma(shape=(1,))), True),
    (Operator(lambda F, x: x + F.random.normal(shape=(1,))), True),
    (Operator(lambda F, x: F.sample_multinomial(x)), True),
    (Operator(lambda F, x: F.shuffle(x)), True),
    (Operator(lambda F, x: F.LeakyReLU(x, act_type="rrelu")), True),
    (Operator(lambda F, x: F.contrib.foreach(lambda d, s: (F.Dropout(d), s), x, [])[0]), True),
    (Operator(lambda F, x: F.contrib.foreach(lambda d, s: (2 * d, s), x, [])[0]), False),
    (Operator(lambda F, x: F.Dropout(x) if mx.autograd.is_training() else x), True),
    (Operator(lambda F, x: x if x.shape else x), True),  # cannot be traced: in doubt, yes
    (Imperative(), True),  # its Python may do anything
    (nn.Sequential(), False),
])
def test_draws(block, expected):
    assert plan.draws(block) is expected


def test_a_sequential_draws_when_a_child_does():
    net = nn.Sequential()
    net.add(nn.Dense(2))
    assert not plan.draws(net)
    net.add(nn.Dropout(0.1))
    assert plan.draws(net)
