"""How a network is cut into chunks and groups, and that the pieces compute what the whole does."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from mxtrain.errors import UserError
from mxtrain.models import plan
from mxtrain.parallel.program import build, compile_chain, group_starts
from mxtrain.tasks.heads import heads_for

HEADS = heads_for(gluon.loss.SoftmaxCrossEntropyLoss(), 3)


def network(rate=0.5):
    net = nn.HybridSequential(prefix="")
    net.add(nn.Dense(8, in_units=4), nn.Activation("relu"), nn.Dropout(rate), nn.Dense(8, in_units=8), nn.Dropout(rate),
            nn.Dense(3, in_units=8))
    net.initialize()
    return net


def built(net, recompute="none", static=False, stages=(0,)):
    segments = plan.segments(net)
    return build(net, *HEADS, segments, stages, group_starts(net, segments, recompute), recompute != "none", static)


def shape_of(stages):
    """For each stage [[(first segment, whether it is seeded), ...], ...], by groups."""
    return [[[(chunk.segment, chunk.draws) for chunk in group.recorded] for group in stage.groups] for stage in stages]


def ahead_of(stages):
    return [[group.ahead and [(chunk.segment, chunk.draws) for chunk in group.ahead] for group in stage.groups]
            for stage in stages]


def test_a_chunk_starts_where_random_numbers_are_drawn():
    program = built(network())
    assert shape_of(program.stages) == [[[(0, False), (2, True), (4, True)]]]
    assert ahead_of(program.stages) == [[None]]
    assert len(program.segments) == 6


def test_groups_start_at_even_cuts_and_chunks_within_them():
    program = built(network(), "3")
    assert shape_of(program.stages) == [[[(0, False)], [(2, True)], [(4, True)]]]
    assert ahead_of(program.stages) == [[[(0, False)], [(2, True)], []]]
    program = built(network(), "2")
    assert shape_of(program.stages) == [[[(0, False), (2, True)], [(3, False), (4, True)]]]


def test_a_stage_starts_a_group():
    program = built(network(), stages=(0, 4))
    assert shape_of(program.stages) == [[[(0, False), (2, True)]], [[(4, True)]]]
    assert ahead_of(program.stages) == [[None], [None]]
    program = built(network(), "3", stages=(0, 1))
    assert shape_of(program.stages) == [[[(0, False)]], [[(1, False)], [(2, True)], [(4, True)]]]
    assert ahead_of(program.stages) == [[[(0, False)]], [[(1, False)], [(2, True)], []]]


def test_without_random_numbers_the_network_stays_whole():
    net = network(rate=0)
    program = built(net)
    assert shape_of(program.stages) == [[[(0, False)]]]
    assert program.segments == [net]


def test_group_starts():
    net = network()
    segments = list(net)
    assert group_starts(net, segments, "none") == [0]
    assert group_starts(net, segments, "1") == [0]
    assert group_starts(net, segments, "4") == [0, 1, 3, 4]
    assert group_starts(net, segments, "6") == [0, 1, 2, 3, 4, 5]
    starts = group_starts(net, segments, "blocks")
    assert starts[0] == 0 and starts == sorted(set(starts)) and 1 < len(starts) < 6


def test_what_cannot_be_recomputed_is_refused():
    with pytest.raises(UserError, match="--recompute 7: the network has 6 segments"):
        built(network(), "7")
    dense = nn.Dense(3, in_units=4)
    for recompute in ("2", "blocks"):
        with pytest.raises(UserError, match=f"--recompute {recompute}: Dense offers no segments"):
            built(dense, recompute)


@pytest.mark.parametrize("static", [False, True])
def test_the_chunks_compute_the_network_and_its_loss(static):
    net = network(rate=0)
    x, y = mx.nd.random.uniform(shape=(5, 4)), mx.nd.array([0, 1, 2, 0, 1])
    w = [net[i].weight.data().asnumpy().astype("float64") for i in (0, 3, 5)]
    scores = (np.maximum(x.asnumpy() @ w[0].T, 0) @ w[1].T) @ w[2].T  # biases start as 0
    expected = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(5), y.asnumpy().astype(int)]
    for recompute, stages in (("none", (0,)), ("2", (0,)), ("none", (0, 2, 3))):
        program = built(net, recompute, static, stages)
        value = seen = x
        with autograd.train_mode():
            *before, last = [group for stage in program.stages for group in stage.groups]
            for group in before:
                for chunk in group.ahead or group.recorded:
                    value = chunk.block(value)
            loss, report = last.recorded[0].block(value, y)
        # float32 against float64, three layers of sums of 4 to 8 terms below 1
        np.testing.assert_allclose(loss.asnumpy(), expected, rtol=1e-5)
        np.testing.assert_array_equal(report.asnumpy()[:, 0], loss.asnumpy())
        for stage in program.stages[:-1]:
            seen = stage.inference[0](seen)
        np.testing.assert_allclose(program.stages[-1].inference[0](seen, y).asnumpy()[:, 0], expected, rtol=1e-5)


class Plain(gluon.Block):
    """A block that cannot be compiled."""

    def forward(self, x):
        return x * 2 if x.shape[0] > 1 else x


def test_blocks_that_cannot_be_compiled_are_chained_as_they_are():
    chain = compile_chain([Plain(), nn.Lambda(lambda x: x + 1)])
    np.testing.assert_array_equal(chain(mx.nd.ones((2, 1))).asnumpy(), [[3], [3]])
    np.testing.assert_array_equal(chain(mx.nd.ones((1, 1))).asnumpy(), [[2]])
    loss, report = compile_chain([Plain()], HEADS[0])(mx.nd.zeros((2, 3)), mx.nd.array([0, 1]))
    np.testing.assert_allclose(loss.asnumpy(), [np.log(3)] * 2, rtol=1e-5)  # of MXNet's log_softmax, 2e-6 off
    assert report.shape == (2, 2)
