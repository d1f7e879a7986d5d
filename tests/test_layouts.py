"""Law 1 and 2 for pipelines and ZeRO: neither how a network is spread over contexts nor a change of it shows in a result."""

from typing import get_args

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

import mxtrain
from laws import (BATCH, EPOCHS, EXACT, SHARDS, TRAIN, assert_close, assert_equal_bits, go_on, network,  # noqa: F401
                  once, stopped, train)
from mxtrain.errors import UserError
from mxtrain.optim import clipping
from mxtrain.optim.settings import OptimizerName

SLOW = pytest.mark.slow
# Contexts and what is made of them. Clipping and accumulation are always on: 8 shards, whatever the layout.
LAYOUTS = [
    (2, dict(pp=2)),
    (4, dict(pp=4)),
    (2, dict(zero=1)),
    (3, dict(zero=2)),
    (4, dict(pp=2)),
    (4, dict(pp=2, zero=1)),
    (4, dict(pp=2, zero=2)),
    (2, dict(pp=2, pp_schedule="gpipe")),
    (2, dict(pp=2, recompute="4")),
    (4, dict(pp=4, recompute="blocks", pp_schedule="gpipe")),
    (3, dict(zero=2, recompute="blocks")),
    (4, dict(pp=2, zero=2, recompute="4", pp_schedule="gpipe")),
    (8, dict(pp=4, zero=2, cut=[1, 4, 8])),
    (2, dict(zero=1, recompute="6kB")),
    (3, dict(zero=3)),
    (4, dict(pp=2, zero=3)),
    (2, dict(zero=3, recompute="4")),
    pytest.param(8, dict(pp=4, zero=3, recompute="blocks", pp_schedule="gpipe"), marks=SLOW),
]


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """Parameters of a few dozen elements are cut, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipping, "CHUNK", 16)
        yield


def name_of(value):
    return value if isinstance(value, int) else "-".join(f"{key}{item}" for key, item in value.items()).replace(" ", "")


@pytest.mark.parametrize("count, layout", LAYOUTS, ids=name_of)
def test_the_same_weights_with_float_sums(once, tmp_path, count, layout):
    settings = dict(epochs=4, momentum=0.9, clip_norm=0.5)  # 12 updates
    assert_close(train(tmp_path / "run", count, **settings, **layout), once(**settings))


@pytest.mark.parametrize("count, layout", LAYOUTS, ids=name_of)
def test_the_same_bits_with_exact_sums(once, tmp_path, count, layout):
    settings = dict(EXACT["sgd"], exact=True, epochs=4)
    assert_equal_bits(train(tmp_path / "run", count, **settings, **layout), once(**settings))


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
@pytest.mark.parametrize("count, layout", [(3, dict(zero=2)), pytest.param(4, dict(pp=2, zero=1), marks=SLOW),
                                           pytest.param(2, dict(zero=3), marks=SLOW)], ids=name_of)
def test_every_optimizer_can_be_shared_out(once, tmp_path, count, layout, optimizer):
    settings = dict(optimizer=optimizer, exact=True, epochs=2)
    assert_equal_bits(train(tmp_path / "run", count, **settings, **layout), once(**settings))


@pytest.mark.parametrize("kvstore", ["none", "local"])
def test_sums_by_any_store(once, tmp_path, kvstore):
    settings = dict(EXACT["sgd"], exact=True, epochs=2)
    assert_equal_bits(train(tmp_path / "run", 4, kvstore, pp=2, zero=1, **settings), once(**settings))


@pytest.mark.parametrize("point", [2, 7, 8, 11])
def test_a_run_goes_on_in_any_other_layout(once, tmp_path, monkeypatch, point):
    """From one to the next, each stopped once in mid-epoch."""
    settings = dict(EXACT["adamw"], exact=True, epochs=EPOCHS)
    walk = [(4, dict(pp=2, zero=2)), (1, dict(pp=1, zero=0)), (3, dict(zero=2, recompute="2")),
            (4, dict(pp=4, recompute="none", zero=0)), (2, dict(pp=1, zero=1)), (4, dict(pp=2, zero=3)), (3, dict(pp=1))]
    start = point % len(walk)
    (count, layout), *others = walk[start:] + walk[:start]
    stopped(tmp_path / "run", monkeypatch, 2, count=count, **layout, **settings)
    for number, (count, layout) in enumerate(others[:-1]):
        stopped(tmp_path / "run", monkeypatch, 2 + number % 2, run=go_on, count=count, optimizer="adamw", exact=True,
                **layout)
    count, layout = others[-1]
    assert_equal_bits(go_on(tmp_path / "run", count, optimizer="adamw", exact=True, **layout), once(**settings))


class Tied(nn.HybridSequential):
    """Two layers that are one weight: tanh(x w) w."""

    def tied(self):
        return [(self[0].weight, self[2].weight)]


def tied_network():
    net = Tied(prefix="")
    net.add(nn.Dense(3, in_units=3, use_bias=False), nn.Activation("tanh"), nn.Dense(3, in_units=3, use_bias=False))
    net.initialize(mx.init.Normal(1.0))
    return net


X = np.random.RandomState(5).randn(12, 3).astype("float32")
Y = np.random.RandomState(6).randint(0, 3, 12).astype("int32")


def tied_by_numpy(w, updates, lr, clip):
    """Plain gradient descent on the mean cross-entropy, with one weight in two places, in float64."""
    for _ in range(updates):
        hidden = np.tanh(X @ w.T)
        scores = hidden @ w.T
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        error = (p / p.sum(axis=1, keepdims=True) - np.eye(3)[Y]) / len(Y)
        gradient = error.T @ hidden + (error @ w * (1 - hidden**2)).T @ X
        w = w - lr * gradient * min(1, clip / np.linalg.norm(gradient))
    return w


@pytest.mark.parametrize("count, layout", [(1, {}), (2, dict(pp=2)), (2, dict(zero=1)), (2, dict(zero=2)),
                                           (4, dict(pp=2, zero=2)), (2, dict(zero=3))], ids=name_of)
@pytest.mark.parametrize("exact", [False, True])
def test_a_weight_in_two_places_is_one(count, layout, exact):
    net = tied_network()
    start = net[0].weight.data().asnumpy().astype("float64")
    mxtrain.fit(net, [(X, Y)] * 4, ctx=[mx.cpu(i) for i in range(count)], shards=6, exact=exact, lr=0.5, momentum=0.0,
                weight_decay=0.0, schedule="constant", clip_norm=0.2, **layout)
    for ctx in map(mx.cpu, range(count)):
        first, second = (net[i].weight.data(ctx).asnumpy() for i in (0, 2))
        np.testing.assert_array_equal(first, second)
    # Four updates in float32, with probabilities that MXNet computes to 1e-6.
    np.testing.assert_allclose(first, tied_by_numpy(start, 4, 0.5, 0.2), rtol=1e-5, atol=5e-6)


def test_tied_weights_have_the_same_bits_in_every_layout():
    found = set()
    for count, layout in [(1, {}), (3, {}), (2, dict(pp=2)), (2, dict(zero=2)), (4, dict(pp=2, zero=1)),
                          (4, dict(pp=2, zero=3))]:
        mx.random.seed(1)
        net = tied_network()
        mxtrain.fit(net, [(X, Y)] * 4, ctx=[mx.cpu(i) for i in range(count)], shards=6, exact=True, optimizer="adam",
                    clip_norm=0.2, **layout)
        found.add(net[0].weight.data(mx.cpu(0)).asnumpy().tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("count, layout", [(1, {}), (2, dict(pp=2)), (2, dict(zero=2))], ids=name_of)
def test_the_places_may_be_named_in_any_order(monkeypatch, count, layout):
    net = tied_network()
    start = net[2].weight.data().asnumpy().astype("float64")
    monkeypatch.setattr(Tied, "tied", lambda own: [(own[2].weight, own[0].weight)])
    mxtrain.fit(net, [(X, Y)] * 4, ctx=[mx.cpu(i) for i in range(count)], shards=6, lr=0.5, momentum=0.0,
                weight_decay=0.0, schedule="constant", clip_norm=0.2, **layout)
    for layer in (0, 2):
        np.testing.assert_allclose(net[layer].weight.data(mx.cpu(0)).asnumpy(), tied_by_numpy(start, 4, 0.5, 0.2),
                                   rtol=1e-5, atol=5e-6)


def test_a_weight_in_three_places_is_refused(monkeypatch):
    monkeypatch.setattr(Tied, "tied", lambda own: [(own[0].weight, own[2].weight), (own[0].weight, own[2].weight)])
    with pytest.raises(UserError, match="is in 2 pairs; a weight can be in two places, not more"):
        mxtrain.fit(tied_network(), [(X, Y)])


def test_half_of_a_tied_weight_cannot_be_frozen():
    net = tied_network()
    net[0].weight.grad_req = "null"
    with pytest.raises(UserError, match="are one weight; freeze both or none"):
        mxtrain.fit(net, [(X, Y)])


@pytest.mark.parametrize("frozen", [slice(0, 1), slice(0, 6), slice(8, 11)])
@pytest.mark.parametrize("count, layout", [(2, dict(pp=2)), (4, dict(pp=4)), (2, dict(zero=2)),
                                           (4, dict(pp=2, zero=1, recompute="3")), (4, dict(pp=2, zero=3))], ids=name_of)
def test_frozen_layers(count, layout, frozen):
    """From the input on, so that stages have no backward; and in the end, through which gradients pass."""
    found = []
    for own_count, own_layout in ((1, {}), (count, layout)):
        mx.random.seed(3)
        net = network()
        net.initialize(mx.init.Xavier())
        net(mx.nd.array(TRAIN[0][0][None]))
        for layer in net[frozen]:
            layer.collect_params().setattr("grad_req", "null")
        mxtrain.fit(net, TRAIN, ctx=[mx.cpu(i) for i in range(own_count)], batch_size=BATCH, shards=SHARDS, epochs=2,
                    exact=True, lr=0.05, **own_layout)
        found.append([parameter.data(mx.cpu(0)).asnumpy() for parameter in net.collect_params().values()])
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("layout", [dict(pp=2, zero=2), dict(zero=3)], ids=name_of)
def test_all_weights_are_on_all_contexts_in_the_end(layout):
    net = network()
    mxtrain.fit(net, TRAIN, ctx=[mx.cpu(i) for i in range(4)], batch_size=BATCH, shards=SHARDS, **layout)
    for parameter in net.collect_params().values():
        assert parameter.list_ctx() == [mx.cpu(i) for i in range(4)]
        first, *others = [data.asnumpy() for data in parameter.list_data()]
        for other in others:
            np.testing.assert_array_equal(other, first, err_msg=parameter.name)


class Whole(nn.HybridBlock):
    """A network without a plan."""

    def __init__(self):
        super().__init__(prefix="")
        self.dense = nn.Dense(5)

    def hybrid_forward(self, F, x):
        return self.dense(x) * 2


@pytest.mark.parametrize("net, count, settings, words", [
    (Whole, 2, dict(pp=2), "--pp 2: Whole offers no segments; a HybridSequential"),
    (network, 3, dict(pp=2), "--pp 2: 2 stages need a multiple of 2 contexts"),
    (network, 4, dict(pp=2, dp=4), "--dp 4: 4 replicas of 2 stages need 8 contexts; there are 4 contexts"),
    (network, 2, dict(pp=2, shards=1), "--pp 2: a pipeline is idle with fewer shards than stages"),
    (network, 4, dict(pp=2, shards=3), "a batch has 3 in all, 3 for 2 replicas; give --shards 4 or more"),
    (network, 12, dict(pp=12), "--pp 12: HybridSequential has 11 segments, and each stage needs one"),
    (network, 2, dict(pp=2, cut=[0]), "--cut 0: must be the first segment of each stage after the first"),
    (network, 2, dict(cut=[3]), "--cut 3: has no effect without a pipeline"),
    (network, 1, dict(pp=0), "--pp 0: must be 1 or more"),
    (network, 2, dict(pp=2, cut=3), "--cut 3: must be a list, such as [3, 7], each of it a whole number"),
    (network, 2, dict(zero=True), "--zero True: must be one of 0, 1, 2, 3"),
    (network, 1, dict(zero=4), "zero"),
    (network, 2, dict(zero=3, audit=1.0), "--audit 1: compares the weights of replicas"),
    (network, 2, dict(pp=2, audit=1.0), "--audit 1: compares replicas of one context each"),
    (network, 2, dict(zero=2, exact=True, audit=0.5), "--audit 0.5: compares gradients of whole shards"),
])
def test_layouts_that_cannot_be(net, count, settings, words):
    settings = {"shards": None if count == 12 else 8, **settings}
    with pytest.raises(UserError) as error:
        mxtrain.fit(net(), TRAIN, ctx=[mx.cpu(i) for i in range(count)], batch_size=BATCH, **settings)
    assert words in str(error.value)


def test_a_run_with_few_shards_is_not_cut_into_more_stages(tmp_path):
    mxtrain.fit(network(), TRAIN, batch_size=BATCH, shards=2, out=str(tmp_path / "run"), plots=False, tensorboard=False)
    with pytest.raises(UserError, match="--pp 4: a pipeline is idle with fewer shards than stages, and a batch has 2"):
        mxtrain.fit(network(), TRAIN, ctx=[mx.cpu(i) for i in range(4)], resume=str(tmp_path / "run"), pp=4, epochs=2)


def test_what_has_no_effect_is_said(caplog):
    mxtrain.fit(network(), TRAIN, batch_size=BATCH, zero=1, pp_schedule="gpipe")
    assert "--zero 1: has no effect with one replica" in caplog.text
    assert "--pp-schedule gpipe: has no effect without a pipeline" in caplog.text
