"""Faults planted in one replica are found and named; an audit that finds nothing changes nothing."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

import mxtrain
from mxtrain import UserError
from mxtrain.errors import Elsewhere, TrainingError
from mxtrain.optim import optimizer
from mxtrain.parallel.layout import Layout
from mxtrain.parallel.shards import part_of
from mxtrain.tasks.heads import heads_for
from mxtrain.train.audit import Audit
from ranks import among

X = np.random.RandomState(0).normal(size=(97, 1, 6, 6)).astype("float32")
Y = np.arange(97) % 3


def network():
    net = nn.HybridSequential(prefix="")
    net.add(nn.Conv2D(4, 3, use_bias=False), nn.BatchNorm(), nn.Activation("relu"), nn.Dropout(0.3), nn.Flatten(),
            nn.Dense(8, activation="relu"), nn.Dropout(0.2), nn.Dense(3))
    return net


def fit(contexts, net=None, **settings):
    """Two epochs of ten updates; returns the weights by name, and the rows without times."""
    net = net or network()
    result = mxtrain.fit(net, gluon.data.ArrayDataset(X, Y), batch_size=10, epochs=2, momentum=0.9,
                         ctx=[mx.cpu(i) for i in range(contexts)], kvstore="device", **settings)
    return ({name: parameter.data(mx.cpu(0)).asnumpy() for name, parameter in net._collect_params_with_prefix().items()},
            [(row["loss"], row["accuracy"]) for row in result.rows])


@pytest.mark.parametrize("contexts, audit", [(1, 0.5), (1, 0.999), (3, 0.5), (2, 1), (2, 3)])
def test_it_changes_nothing(contexts, audit):
    (plain, rows), (audited, same) = fit(1, exact=True), fit(contexts, exact=True, audit=audit)
    assert rows == same
    for name in plain:
        np.testing.assert_array_equal(plain[name], audited[name])


@pytest.mark.parametrize("settings", [{}, {"shards": 1}, {"exact": True}, {"recompute": "2"}, {"shards": 5}])
@pytest.mark.parametrize("contexts", [2, 3])
def test_replicas_are_the_same_after_every_update(contexts, settings):
    fit(contexts, audit=1, **settings)


def plant(monkeypatch, update, index, ctx):
    """Adds a little to a weight on one context after an update (the first is 1)."""
    real = optimizer.Optimizer.update

    def with_fault(self, number, lr, scale):
        real(self, number, lr, scale)
        if number + 1 == update:
            parameter = list(net[0].collect_params().values())[index]
            parameter.data(ctx)[:] += 1e-7 * (1 + mx.nd.abs(parameter.data(ctx)))

    net = []
    monkeypatch.setattr(optimizer.Optimizer, "update", with_fault)
    return net


@pytest.mark.parametrize("contexts, audit, found, bad, good", [
    (2, 1, 7, 1, 0), (2, 5, 10, 1, 0), (3, 4, 8, 2, 0), (3, 4, 8, 0, 1)])
def test_a_weight_that_differs_is_named(monkeypatch, contexts, audit, found, bad, good):
    planted = plant(monkeypatch, 7, 5, mx.cpu(bad))
    planted.append(network())
    with pytest.raises(TrainingError, match=rf"after update {found} the weights of cpu\({bad}\) are not those of "
                                            rf"cpu\({good}\), first in 5.weight:"):
        fit(contexts, planted[0], audit=audit)


def test_no_checkpoint_of_weights_that_differ(monkeypatch, tmp_path):
    """The fault comes after the last comparison of the epoch: the checkpoint at its end finds it."""
    planted = plant(monkeypatch, 9, 0, mx.cpu(1))
    planted.append(network())
    with pytest.raises(TrainingError, match=r"after update 10 the weights of cpu\(1\).*first in 0.weight"):
        fit(2, planted[0], audit=100, out=str(tmp_path / "run"))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("update-*")) == ["update-00000000"]
    # And it goes on from there.
    monkeypatch.undo()
    again, _ = fit(2, resume=str(tmp_path / "run"))
    plain, _ = fit(2)
    for name in plain:
        np.testing.assert_array_equal(plain[name], again[name])


class Faulty(mx.operator.CustomOp):
    """The identity, whose gradient is off by one unit in the last place on cpu(1), or differs from call to call."""

    mode, calls = "context", 0

    def __init__(self, ctx):
        super().__init__()
        self.ctx = str(ctx)

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        Faulty.calls += 1
        steps = Faulty.calls if self.mode == "calls" else int(self.ctx == "cpu(1)")
        self.assign(in_grad[0], req[0], out_grad[0] * (1 + steps * 2.0**-23))


@mx.operator.register("audit_faulty")
class FaultyProp(mx.operator.CustomOpProp):
    def __init__(self):
        super().__init__(need_top_grad=True)

    def create_operator(self, ctx, shapes, dtypes):
        return Faulty(ctx)


class FaultyLayer(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.Custom(x, op_type="audit_faulty")


def faulty_network():
    net = nn.HybridSequential(prefix="")
    net.add(nn.Dense(8, activation="relu"), FaultyLayer(), nn.Dense(3))
    return net


@pytest.mark.parametrize("contexts, mode, words", [
    (2, "context", r"run on cpu\(\d\) and again on cpu\(\d\), has two gradients, which first differ in 0.weight"),
    (1, "calls", r"run twice on cpu\(0\), has two gradients, which first differ in 0.weight")])
def test_a_gradient_that_differs_is_named(monkeypatch, contexts, mode, words):
    """The fault is in front of the last layer, whose own gradient is right."""
    monkeypatch.setattr(Faulty, "mode", mode)
    with pytest.raises(TrainingError, match=rf"in update \d+, shard \d+, {words}"):
        fit(contexts, faulty_network(), exact=True, audit=0.9)


def test_without_a_fraction_shards_are_not_run_again(monkeypatch):
    monkeypatch.setattr(Layout, "gradient_again", None)
    fit(2, exact=True, audit=2)


@pytest.mark.parametrize("settings, words", [
    ({"audit": 0}, "--audit 0: must be"), ({"audit": -1}, "--audit -1: must be"), ({"audit": 1.5}, "--audit 1.5: must be"),
    ({"audit": float("nan")}, "--audit nan: must be"), ({"audit": float("inf")}, "--audit inf: must be"),
    ({"audit": "often"}, "--audit often: must be a number"), ({"audit": 0.01}, "--audit 0.01: .*needs --exact"),
    ({"audit": 10, "contexts": 1}, "--audit 10: has no effect with one process and one context")])
def test_refusals(settings, words):
    with pytest.raises(UserError, match=words):
        fit(**{"contexts": 2, **settings})


def gradient_of_a_rank(fault):
    """A function for `among`: one update of a batch of 10 in 8 shards, every one of them run again in turn."""
    nets = []
    for rank in range(3):  # generators belong to contexts, and these must not share one
        net = nn.HybridSequential(prefix="")
        net.add(nn.Dense(8, activation="relu"), nn.Dropout(0.3), nn.Dense(3))
        mx.random.seed(7)
        net.initialize(mx.init.Xavier(), ctx=mx.cpu(rank))
        net(mx.nd.array(X[:1], ctx=mx.cpu(rank)))
        nets.append(net)

    def function(communicator):
        rank, size = communicator.rank, communicator.size
        net = nets[rank]
        layout = Layout(net, *heads_for(gluon.loss.SoftmaxCrossEntropyLoss(), 3), [mx.cpu(rank)], 8, exact=True,
                        sample=[mx.nd.array(X[:1], ctx=mx.cpu(rank))], communicator=communicator)
        audit = Audit(0.9999, 3, layout, communicator, net._collect_params_with_prefix())
        start, stop = part_of(10, rank, 1, size, 8)
        batch = Batch((X[start:stop], Y[start:stop]), 10, np.arange(start, stop))
        if fault and rank == 1:
            net[2].weight.data()[:] *= 1 + 2.0**-20
        seen = [audit._draw(batch, update) for update in range(4)]
        reports = [audit.forward_backward(batch, update) for update in range(4)]
        return seen, [len(r) for r in reports]

    return function


class Batch(tuple):
    """A part of a batch, as the loader gives it."""

    def __new__(cls, arrays, size, positions):
        batch = super().__new__(cls, arrays)
        batch.size, batch.positions = size, positions
        return batch


def test_shards_are_run_again_by_other_processes():
    first, *others = among(3, gradient_of_a_rank(False))
    assert not isinstance(first, Exception), first
    seen, _ = first
    assert all(seen == others_seen for others_seen, _ in others)
    assert all(one != other and one == layout_owner(shard) for shard, one, other in seen)
    assert len({shard for shard, *_ in seen}) > 1


def layout_owner(shard):
    return next(r for r in range(3) if r * 8 // 3 <= shard < (r + 1) * 8 // 3)


def test_a_fault_is_named_in_all_processes():
    first, second = among(2, gradient_of_a_rank(True))
    assert type(first) is TrainingError and isinstance(second, Elsewhere), (first, second)
    assert str(second) == f"rank 0 has the same: {first}"
    assert "rank 0, cpu(0)" in str(first) and "rank 1, cpu(1)" in str(first) and "first differ in 0.weight" in str(first)


def test_weights_of_three_processes():
    def function(communicator):
        net = nn.Dense(2, in_units=3, prefix="")
        net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
        if communicator.rank == 1:
            net.bias.data(mx.cpu(1))[1] = -0.0  # is equal to 0, and has other bits
        layout = Layout(net, *heads_for(gluon.loss.L2Loss(), 2), [mx.cpu(0), mx.cpu(1)], 6,
                        communicator=communicator)
        audit = Audit(2, 3, layout, communicator, net._collect_params_with_prefix())
        audit.weights(1)
        audit.weights(2)

    for error in among(3, function):
        assert "after update 2 the weights of rank 1, cpu(1) are not those of rank 0, cpu(0), first in bias" in str(error)
