"""ZeRO 3: what a device has of the weights, and when."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

from mxtrain.optim import clipping
from mxtrain.optim.optimizer import Optimizer
from mxtrain.optim.settings import OptimConfig
from mxtrain.parallel.communicator import InProcess
from mxtrain.parallel.counting import counting, live, peak
from mxtrain.parallel.layout import Layout
from mxtrain.tasks.heads import heads_for

LAYERS = [(200, 200), (200, 200), (600, 200), (200, 600), (10, 200)]
"""Units and inputs of dense layers, each of which is a group."""
SIZES = [4 * units * (inputs + 1) for units, inputs in LAYERS]
BATCH = [np.random.RandomState(0).rand(4, 200).astype("float32"), np.array([3, 5, 0, 1], "int32")]


def network(ctx):
    net = nn.HybridSequential(prefix="")
    for units, inputs in LAYERS:
        net.add(nn.Dense(units, in_units=inputs))
    net.initialize(mx.init.Xavier(), ctx=ctx)
    return net


def layout_of(net, contexts, zero=3, shards=4):
    return Layout(net, *heads_for(gluon.loss.SoftmaxCrossEntropyLoss(), 10), contexts, shards, zero=zero,
                  sample=[mx.nd.zeros((1, 200))], communicator=InProcess("none", contexts))


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_device_has_its_share_and_one_group_at_a_time(monkeypatch, replicas):
    monkeypatch.setattr(clipping, "CHUNK", 500)  # so that shares are equal
    cpu, contexts = mx.cpu(), [mx.cpu(c) for c in range(replicas)]  # arrays on the first one are counted
    with counting():
        before = live(cpu)
        layout = layout_of(network(cpu), contexts)
        optimizer = Optimizer(OptimConfig(momentum=0.9), {p.name: p for p in layout.parameters}, layout.held)
        layout.forget_others()

        def update(number=0):
            layout.forward_backward(BATCH, number)
            layout.add_up()
            layout.finish(4)
            optimizer.update(number, 0.1, 0.25)
            layout.share()

        update()  # also has operators take their workspaces
        layout.evaluate(BATCH)
        held = live(cpu) - before
        training = peak(cpu, update)[1] - before
        predicting = peak(cpu, lambda: layout.evaluate(BATCH))[1] - before
    # Weights, gradients and momentum.
    assert held == pytest.approx(3 * sum(SIZES) / replicas, rel=0.02)
    assert predicting - held == pytest.approx(max(SIZES), rel=0.1)
    # There is a gradient where there is a weight.
    assert training - held == pytest.approx(2 * max(SIZES), rel=0.1)


def test_who_wants_a_weight_that_is_not_there_sees_it():
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = network(mx.cpu())
    expected = {p.name: p.data().asnumpy() for p in net.collect_params().values()}
    layout = layout_of(net, contexts)
    layout.forget_others()
    layout.evaluate(BATCH)
    for parameter in net.collect_params().values():
        for array in parameter.list_data():
            assert array.shape == (1,) and np.isnan(array.asnumpy()).all()
        np.testing.assert_array_equal(layout.weight(parameter), expected[parameter.name])
    with pytest.raises(mx.base.MXNetError):
        net(mx.nd.array(BATCH[0])).wait_to_read()
    layout.bring_home()
    for parameter in net.collect_params().values():
        for ctx in contexts:
            np.testing.assert_array_equal(parameter.data(ctx).asnumpy(), expected[parameter.name])
