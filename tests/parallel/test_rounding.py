"""Cuts that change bits on CPUs: what is said of each is what a training with it shows."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

import mxtrain
from mxtrain.errors import UserError
from mxtrain.parallel.rounding import rounding_cuts
from mxtrain.tasks.heads import heads_for
from mxtrain.train import setup

X = np.random.RandomState(1).rand(24, 1, 12, 12).astype("float32")
Y = np.arange(24).astype("int32") % 5
HEAD, _ = heads_for(gluon.loss.SoftmaxCrossEntropyLoss(), 5)


def network():
    """16 channels and more: oneDNN keeps them in blocks of 8 or 16, and batch normalization adds up in that order."""
    mx.random.seed(1)
    net = nn.HybridSequential(prefix="")
    net.add(nn.Conv2D(16, 3, use_bias=False), nn.BatchNorm(), nn.Activation("relu"), nn.Conv2D(32, 3), nn.AvgPool2D(2),
            nn.BatchNorm(), nn.Dropout(0.2), nn.Conv2D(16, 1), nn.BatchNorm(), nn.Activation("relu"), nn.Flatten(),
            nn.Dense(5))
    net.initialize(mx.init.Xavier())
    net(mx.nd.array(X[:2]))
    return net


def trained(contexts, **layout):
    net = network()
    mxtrain.fit(net, gluon.data.ArrayDataset(X, Y), ctx=[mx.cpu(c) for c in range(contexts)], batch_size=12, shards=4,
                exact=True, lr=0.1, **layout)
    return [parameter.data(mx.cpu(0)).asnumpy() for parameter in net.collect_params().values()]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other))


@pytest.fixture(scope="module")
def said():
    net = network()
    sample, label = mx.nd.array(X[:2]), mx.nd.array(Y[:2])
    return [cut for cut in range(1, len(net)) if rounding_cuts(list(net), [0, cut], [sample], label, HEAD)]


def test_it_is_said_of_the_cuts_that_do(said, monkeypatch):
    monkeypatch.setattr(setup, "rounding_cuts", lambda *_, **__: [])
    expected = trained(1)
    assert said == [cut for cut in range(1, 12) if not same(trained(2, pp=2, cut=[cut]), expected)]


def test_they_are_refused_or_avoided(said, monkeypatch):
    expected = trained(1)
    for cut in said:
        with pytest.raises(UserError, match=f"--cut {cut}: with --exact, a cut in front of segment {cut} has"):
            trained(2, pp=2, cut=[cut])
        # Without the two next to it these cost as much on either side.
        monkeypatch.setattr(setup.cut, "measure", lambda *_: [float(i in (cut - 1, cut)) for i in range(12)])
        assert same(trained(2, pp=2), expected)
    if said:
        with pytest.raises(UserError, match=f"--pp 12: .* has 12 segments, of which {12 - len(said)} can begin a stage"):
            mxtrain.fit(network(), gluon.data.ArrayDataset(X, Y), ctx=[mx.cpu(c) for c in range(12)], batch_size=24,
                        shards=12, exact=True, pp=12)


def test_trying_leaves_no_trace():
    net, label = network(), mx.nd.array(Y[:2])
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            parameter.grad()[:] = 3
    net[0].weight.grad_req = "null"
    values = [parameter.data().asnumpy() for parameter in net.collect_params().values()]
    rounding_cuts(list(net), [0, 2, 5], [mx.nd.array(X[:2])], label, HEAD)
    assert same([parameter.data().asnumpy() for parameter in net.collect_params().values()], values)
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            assert (parameter.grad().asnumpy() == 3).all()


def test_a_block_may_stand_in_the_chain_twice():
    net, relu = nn.HybridSequential(prefix=""), nn.Activation("relu")
    net.add(nn.Dense(4, in_units=3), relu, nn.Dense(5, in_units=4), relu)
    net.initialize()
    assert rounding_cuts(list(net), [0, 2], [mx.nd.ones((2, 3))], mx.nd.array([0, 1]), HEAD) == []
