"""Running statistics of batch normalization over shards, against numpy."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

from mxtrain.parallel.communicator import InProcess
from mxtrain.parallel.layout import Layout
from mxtrain.parallel.shards import shard_bounds
from mxtrain.parallel.statistics import moving_layers, unreached_by_backward
from mxtrain.tasks.heads import heads_for

MOMENTUM, FEATURES, CLASSES = 0.7, 5, 3
# Means and variances of at most 16 float32 numbers of size 1 to 3, against float64.
TOLERANCE = dict(rtol=1e-5, atol=1e-6)

generator = np.random.RandomState(1)
X = (generator.randn(16, FEATURES) * [1, 2, 0.5, 1, 3] + [0, 1, -1, 2, 0]).astype("float32")
Y = generator.randint(0, CLASSES, 16).astype("int32")


def contexts(count):
    return [mx.cpu(i) for i in range(count)]


def first_layer(**options):
    net = nn.HybridSequential(prefix="")
    net.add(nn.BatchNorm(momentum=MOMENTUM, in_channels=FEATURES, prefix="norm_", **options),
            nn.Dense(CLASSES, in_units=FEATURES, prefix="dense_"))
    return net


def after_a_layer():
    net = nn.HybridSequential(prefix="")
    net.add(nn.Dense(FEATURES, in_units=FEATURES, use_bias=False, prefix="first_"),
            nn.BatchNorm(momentum=MOMENTUM, in_channels=FEATURES, prefix="norm_"),
            nn.Dense(CLASSES, in_units=FEATURES, prefix="dense_"))
    return net


NETS = {
    "first layer": first_layer,
    "first layer, nothing to train in it": lambda: first_layer(scale=False, center=False),
    "after a layer": after_a_layer,
}


def prepared(net, ctx):
    mx.random.seed(5)
    net.initialize(mx.init.Xavier(), ctx=ctx)
    for layer in moving_layers(net):
        layer.running_mean.set_data(mx.nd.array([0.5, -1, 2, 0, 3]))
        layer.running_var.set_data(mx.nd.array([1, 2, 3, 4, 0.5]))
    return net


def run(layout, batch, update, kvstore="device"):
    layout.forward_backward(batch, update)
    InProcess(kvstore, layout.contexts).allreduce(layout.sums)
    layout.finish(sum(map(bool, layout.rows_of(batch))))
    layout.wait()


def expected_statistics(seen, mean, variance, shards):
    """The running mean and variance after a batch whose normalized layer has seen `seen` (rows, features)."""
    pieces = [seen[a:b].astype("float64") for a, b in shard_bounds(len(seen), shards) if b > a]
    means = np.mean([piece.mean(axis=0) for piece in pieces], axis=0)
    variances = np.mean([piece.var(axis=0) for piece in pieces], axis=0)  # MXNet's running variance is the biased one
    return MOMENTUM * mean + (1 - MOMENTUM) * means, MOMENTUM * variance + (1 - MOMENTUM) * variances


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("count, shards, recompute", [
    (1, 1, "none"), (1, 3, "none"), (2, 2, "none"), (3, 8, "none"), (3, 2, "none"), (1, 1, "2"), (2, 3, "2"),
    (2, 8, "blocks"),
])
def test_move_by_the_mean_over_the_shards_that_have_samples(name, exact, count, shards, recompute):
    if exact and shards < count:
        pytest.skip("refused by the settings")
    ctx = contexts(count)
    net = prepared(NETS[name](), ctx)
    layout = Layout(net, *heads_for(gluon.loss.SoftmaxCrossEntropyLoss(), CLASSES), ctx, shards, exact, recompute,
                    sample=[mx.nd.array(X[:2])])
    (layer,) = moving_layers(net)
    first = None if name.startswith("first") else net[0].weight.data(ctx[0]).asnumpy()
    mean, variance = np.array([0.5, -1, 2, 0, 3]), np.array([1, 2, 3, 4, 0.5])
    for update, rows in enumerate((16, 7, 3, 16)):  # 3 rows leave shards of 8, and contexts, without any
        x = X[16 - rows:]
        run(layout, (x, Y[16 - rows:]), update)
        mean, variance = expected_statistics(x if first is None else x @ first.T, mean, variance, shards)
        for r in ctx:
            np.testing.assert_allclose(layer.running_mean.data(r).asnumpy(), mean, **TOLERANCE)
            np.testing.assert_allclose(layer.running_var.data(r).asnumpy(), variance, **TOLERANCE)


@pytest.mark.parametrize("exact", [False, True])
def test_all_contexts_keep_the_same_bits(exact):
    ctx = contexts(3)
    net = prepared(after_a_layer(), ctx)
    layout = Layout(net, *heads_for(gluon.loss.SoftmaxCrossEntropyLoss(), CLASSES), ctx, 8, exact)
    run(layout, (X, Y), 0)
    run(layout, (X[:1], Y[:1]), 1)  # two contexts are idle
    for parameter in (net[1].running_mean, net[1].running_var):
        copies = [data.asnumpy() for data in parameter.list_data()]
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])


def test_evaluation_uses_them_and_leaves_them_alone():
    ctx = contexts(2)
    net = prepared(first_layer(), ctx)
    layout = Layout(net, *heads_for(gluon.loss.SoftmaxCrossEntropyLoss(), CLASSES), ctx, 2)
    before = [net[0].running_mean.data(r).asnumpy() for r in ctx]
    values = np.concatenate([v.asnumpy() for v in layout.evaluate((X, Y))])
    normalized = (X - before[0]) / np.sqrt(net[0].running_var.data().asnumpy() + 1e-5)
    scores = normalized @ net[1].weight.data().asnumpy().T
    np.testing.assert_array_equal(values[:, -1], scores.argmax(axis=1))
    for r, values in zip(ctx, before):
        np.testing.assert_array_equal(net[0].running_mean.data(r).asnumpy(), values)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("count, shards", [(1, 1), (2, 4)])
def test_global_statistics_are_left_alone(exact, count, shards):
    ctx = contexts(count)
    net = nn.HybridSequential(prefix="")
    net.add(nn.BatchNorm(momentum=MOMENTUM, in_channels=FEATURES, use_global_stats=True, prefix="frozen_"),
            nn.BatchNorm(momentum=MOMENTUM, in_channels=FEATURES, prefix="moving_"), nn.Dense(CLASSES, in_units=FEATURES))
    net.initialize(ctx=ctx)
    net[0].running_mean.set_data(mx.nd.array([1, 2, 3, 4, 5]))
    assert moving_layers(net) == [net[1]]
    layout = Layout(net, *heads_for(gluon.loss.SoftmaxCrossEntropyLoss(), CLASSES), ctx, shards, exact)
    for update in range(3):
        run(layout, (X, Y), update)
    for r in ctx:
        np.testing.assert_array_equal(net[0].running_mean.data(r).asnumpy(), [1, 2, 3, 4, 5])
        np.testing.assert_array_equal(net[0].running_var.data(r).asnumpy(), np.ones(FEATURES))
        assert not np.array_equal(net[1].running_mean.data(r).asnumpy(), np.zeros(FEATURES))


def test_moving_layers_are_found_once():
    norm = nn.BatchNorm()
    net = nn.HybridSequential()
    inner = nn.HybridSequential()
    inner.add(norm, nn.Dense(2))
    net.add(norm, inner, nn.BatchNorm(use_global_stats=True), nn.LayerNorm())
    assert moving_layers(net) == [norm]


@pytest.mark.parametrize("make, expected", [
    (lambda: first_layer(), False),
    (lambda: first_layer(scale=False, center=False), True),
    (after_a_layer, False),
])
def test_layers_that_backward_would_not_reach(make, expected):
    assert unreached_by_backward(make()) is expected
