"""train.py --plan: hand counts, what is said, and what a training takes."""

import json
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxtrain import config
from mxtrain.models import zoo
from mxtrain.models.gpt import GPT
from mxtrain.models.gpt_settings import GPTConfig
from mxtrain.optim.optimizer import Optimizer
from mxtrain.parallel.counting import counting, live, peak
from mxtrain.parallel.grid import Grid
from mxtrain.parallel.layout import Layout as Running
from mxtrain.parallel.memory import Cost
from mxtrain.tasks.heads import heads_for
from mxtrain.tasks.language import TokenLoss
from mxtrain.train.planning import Layout, Machine, Segment, lines, make, plan


def layout(**given):
    defaults = dict(stages=[0], groups=[0], recompute=False, static=False, zero=0, whole=False, exact=False,
                    schedule="1f1b", batch_size=8, shards=4, states=2)
    return Layout(**{**defaults, **given})


# Four segments with weights of 100 and 10 elements, and an activation of 1000 bytes between them.
SEGMENTS = [Segment(Cost(1000, 1000, 1000, 0, 0, 0, False), 110, [100, 10], 0)] * 4


def test_one_device_holds_everything():
    one, = plan(SEGMENTS, 7, (40, 4), Grid(1), layout())
    assert (one["segments"], one["parameters"]) == (4, 440)
    assert one["weights"] == one["gradients"] == 4 * 440
    assert one["optimizer"] == 2 * 4 * 440
    assert one["batch"] == 8 * 44
    assert one["activations"] == 7 + 4000 + 1000 + 2000  # kept; gradients of the output, of two in the middle
    assert one["total"] == sum(one[name] for name in ("weights", "gradients", "optimizer", "batch", "activations"))
    assert one["sent"] == {"gradients": 0, "weights": 0, "activations": 0}


def test_stages_hold_parts_and_send_activations():
    devices = plan(SEGMENTS, 0, (40, 4), Grid(2, stages=2), layout(stages=[0, 2], groups=[0, 2]))
    assert [one["parameters"] for one in devices] == [220, 220]
    assert [one["batch"] for one in devices] == [8 * 40, 8 * 4]
    assert [one["in_flight"] for one in devices] == [2, 1]
    assert [one["sent"]["activations"] for one in devices] == [4 * 1000, 4 * 1000]
    first = 2000 + 2000 + 1000 + 1000  # one that waits, and one at work: kept, gradients of its output and in between
    assert [one["activations"] for one in devices] == [first, 1000 + 2000 + 1000 + 1000 + 1000]
    gpipe = plan(SEGMENTS, 0, (40, 4), Grid(2, stages=2), layout(stages=[0, 2], groups=[0, 2], schedule="gpipe"))
    assert [one["in_flight"] for one in gpipe] == [4, 4]


def test_replicas_share_out_states_and_gradients():
    plain, states, gradients = (plan(SEGMENTS, 0, (40, 4), Grid(4), layout(zero=zero))[0] for zero in (0, 1, 2))
    assert plain["optimizer"] == 8 * 440 and states["optimizer"] == gradients["optimizer"] == 8 * 110
    assert plain["gradients"] == states["gradients"] == 4 * 440
    assert gradients["gradients"] == 4 * (110 + 440)  # what it owns, and the pass of the only group
    assert plain["sent"] == {"gradients": 2 * 3 / 4 * 4 * 440, "weights": 0, "activations": 0}
    assert states["sent"] == {"gradients": 2 * 3 / 4 * 4 * 440, "weights": 3 / 4 * 4 * 440, "activations": 0}
    by_groups = plan(SEGMENTS, 0, (40, 4), Grid(4), layout(zero=2, groups=[0, 1, 2, 3]))[0]
    assert by_groups["gradients"] == 4 * (110 + 110)
    # Each of the 1 shards of a replica is sent for itself; between processes the whole sum.
    assert by_groups["sent"]["gradients"] == 3 / 4 * 4 * 440
    assert plan(SEGMENTS, 0, (40, 4), Grid(2, 2), layout(zero=2, shards=8))[0]["sent"]["gradients"] == 2 * 1.5 * 4 * 440


def test_replicas_share_out_weights():
    given = layout(zero=3, groups=[0, 1, 3], recompute=True, shards=8)  # two shards for each of four devices
    one, = plan(SEGMENTS, 0, (40, 4), Grid(4), given)
    assert one["weights"] == 4 * (110 + 220)  # its own, and the group of two segments
    assert one["gradients"] == 4 * (110 + 220) and one["optimizer"] == 8 * 110
    assert one["sent"]["weights"] == 2 * 3 / 4 * 4 * (440 + 440 - 110)  # the last group is run once
    among, = plan(SEGMENTS, 0, (40, 4), Grid(2, 2), given)
    assert among["weights"] == 4 * (110 + 2 * 220)  # and what is on its way
    assert among["sent"]["weights"] == one["sent"]["weights"]


def test_exact_sums_take_two_buffers_two_parts_and_the_total():
    one, = plan(SEGMENTS, 0, (40, 4), Grid(1), layout(exact=True))
    assert one["gradients"] == (2 * 4 + 2 * 8 + 4) * 440


def settings(**given):
    made = config.build({"batch_size": 16, "optimizer": "adam", **given})
    made.model.model, made.train.task = "mine", "lm"
    return made


def dense():
    net = gluon.nn.HybridSequential()
    net.add(*[gluon.nn.Dense(64, activation="relu", in_units=64) for _ in range(8)])
    return SimpleNamespace(net=net, loss=gluon.loss.L2Loss(), classes=None, preprocess=None,
                           sample=lambda: [np.zeros((2, 64), "float32")] * 2)


@pytest.mark.parametrize("memory, word", [(None, "not known"), ([10**9] * 2, "all devices are large enough"),
                                          ([10**9, 1000], "1 of 2 devices too small")])
def test_a_device_that_is_too_small_is_said(memory, word):
    result = make(settings(), dense(), Machine(2, 1, "gpu", memory))
    json.dumps(result)
    text = lines(result)
    assert word in text[-1]
    assert sum("TOO SMALL" in line for line in text) == ("too small" in word)
    assert result["parameters"] == 8 * 65 * 64 and len(result["devices"]) == 2


def test_a_pipeline_over_processes_that_are_not_started():
    result = make(settings(pp=4, cut=[2, 4, 6], zero=1, shards=8), dense(), Machine(1, 8, "gpu", None))
    assert [(one["rank"], one["stage"], one["replica"]) for one in result["devices"][3:6]] == [
        (3, 3, 0), (4, 0, 1), (5, 1, 1)]
    assert result["replicas"] == 2 and result["stages"] == [0, 2, 4, 6]
    assert result["bubble"] == pytest.approx(3 / (4 + 3))
    assert any("idle between the stages: 43%" in line for line in lines(result))


def resnet():
    net = zoo.create("cifar_resnet20_v1", 10, 3)
    return net, gluon.loss.SoftmaxCrossEntropyLoss(), (16, 3, 32, 32), None


def gpt():
    return GPT(256, GPTConfig(layers=4, heads=2, width=64, context=64)), TokenLoss(), (16, 64), 256


@pytest.mark.parametrize("make_network", (resnet, gpt))
@pytest.mark.parametrize("given", ({}, {"recompute": "blocks"}, {"shards": 2}, {"exact": True, "shards": 2},
                                   {"zero": 3, "shards": 4}),
                         ids=("plain", "blocks", "shards", "exact", "weights"))
def test_the_total_is_what_a_training_takes(make_network, given):
    net, loss, shape, tokens = make_network()
    numbers, cpu = np.random.RandomState(0), mx.cpu()
    if tokens:
        batch = [numbers.randint(0, tokens, shape).astype("int32") for _ in range(2)]
    else:
        batch = [numbers.rand(*shape).astype("float32"), numbers.randint(0, 10, shape[:1]).astype("int32")]
    task = SimpleNamespace(net=make_network()[0], loss=loss, classes=range(10), preprocess=None,
                           sample=lambda: [x[:2] for x in batch])
    its = settings(**given)
    its.train.task = "lm" if tokens else "image"
    zero = its.parallel.zero
    contexts = [cpu, mx.cpu(1)] if zero else [cpu]  # arrays on the first one are counted
    with counting():
        before = live(cpu)
        net.initialize(mx.init.Xavier(), ctx=cpu)
        sample = mx.nd.array(batch[0][:2], dtype=batch[0].dtype)
        net(sample)
        running = Running(net, *heads_for(loss, None if tokens else 10), contexts,
                          its.parallel.shards or 1, its.parallel.exact, its.parallel.recompute, sample=[sample], zero=zero)
        running.forget_others()
        optimizer = Optimizer(its.optim, {p.name: p for p in running.parameters}, running.held)

        def update():
            running.forward_backward(batch, 0)
            running.finish(its.parallel.shards or 1)
            optimizer.update(0, 0.1, 1 / 16)

        update()
        taken = peak(cpu, update)[1] - before
    one = make(its, task, Machine(len(contexts), 1, "cpu", None))["devices"][0]
    # Workspaces may have grown before: in an earlier test, or just now; then they are in none of both.
    assert one["total"] == pytest.approx(taken, rel=0.1)
