"""The global norm, and clipping by it: one number for all contexts (FIELD-REPORTS D04)."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

import mxtrain
from mxtrain.callbacks.base import Callback
from mxtrain.optim import clipping
from mxtrain.optim.clipping import global_norm

generator = np.random.RandomState(2)


@pytest.mark.parametrize("shapes", [[(3,)], [(1,)], [(4, 5), (7,), (2, 3, 2)], [(200, 300)]])
def test_is_the_norm_of_all_elements(shapes):
    arrays = [generator.randn(*shape).astype("float32") for shape in shapes]
    expected = np.sqrt(sum((array.astype("float64") ** 2).sum() for array in arrays))
    # A float32 sum of 60,000 squares in some order: far below 1e-5.
    assert global_norm([mx.nd.array(array) for array in arrays]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", [1, 9, 10, 11, 29, 30, 31])
def test_chunks_leave_nothing_out(monkeypatch, size):
    monkeypatch.setattr(clipping, "CHUNK", 10)
    array = generator.randint(-9, 10, (size, 1)).astype("float32")  # whole numbers: no rounding
    assert global_norm([mx.nd.array(array), mx.nd.array(array)]) == np.sqrt(2 * (array**2).sum())


def test_zero_and_what_is_not_finite():
    assert global_norm([mx.nd.zeros((3, 3))]) == 0
    assert np.isnan(global_norm([mx.nd.array([1, np.nan]), mx.nd.array([1])]))
    assert global_norm([mx.nd.array([1, np.inf])]) == np.inf


FEATURES, CLASSES = 5, 3
X = generator.randn(8, FEATURES).astype("float32")
Y = generator.randint(0, CLASSES, 8).astype("int32")
WEIGHT = generator.randn(CLASSES, FEATURES).astype("float32")
BATCHES = [(X, Y), (X[:3], Y[:3]), (X[3:], Y[3:])]


def by_numpy(clip):
    """Weights after the three updates, and the norm of the last gradient."""
    weight = WEIGHT.astype("float64")
    for x, y in BATCHES:
        powers = np.exp(x @ weight.T)
        gradient = (powers / powers.sum(axis=1, keepdims=True) - np.eye(CLASSES)[y]).T @ x / len(y)
        norm = np.sqrt((gradient**2).sum())
        weight = weight - 0.5 * gradient * (min(1, clip / norm) if clip else 1)
    return weight, norm


@pytest.mark.parametrize("clip", [0.1, 1.1, 1e6])
@pytest.mark.parametrize("count, kvstore", [(1, "none"), (2, "none"), (2, "local"), (2, "device"), (3, "device")])
@pytest.mark.parametrize("exact", [False, True])
def test_clipping_is_of_the_mean_over_the_whole_batch(clip, count, kvstore, exact):
    net = nn.Dense(CLASSES, in_units=FEATURES, use_bias=False)
    net.initialize()
    net.weight.set_data(mx.nd.array(WEIGHT))
    ran = mxtrain.fit(net, BATCHES, ctx=[mx.cpu(i) for i in range(count)], kvstore=kvstore, lr=0.5, momentum=0.0,
                      weight_decay=0.0, schedule="constant", clip_norm=clip, exact=exact)
    weight, norm = by_numpy(clip)
    # Probabilities of MXNet's float32 softmax are within 1e-6; three updates.
    np.testing.assert_allclose(net.weight.data(mx.cpu(0)).asnumpy(), weight, rtol=1e-5, atol=5e-6)
    assert ran.rows[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)  # of the gradient before it is clipped


def test_the_limits_of_the_test_above_differ():
    weights = [by_numpy(clip)[0] for clip in (0.1, 1.1, None)]
    assert min(np.abs(weights[i] - weights[j]).max() for i, j in ((0, 1), (1, 2))) > 1e-3


def test_a_gradient_of_zero_stays_zero():
    net = nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.One())
    data = gluon.data.ArrayDataset(np.zeros((4, 2), "float32"), np.zeros(4, "float32"))
    mxtrain.fit(net, data, batch_size=4, loss=gluon.loss.L2Loss(), clip_norm=0.5, weight_decay=0.0)
    np.testing.assert_array_equal(net.weight.data().asnumpy(), [[1, 1]])


class Norms(Callback):
    def __init__(self):
        self.seen = []

    def epoch(self, rows):
        self.seen.append(rows[0].get("grad_norm"))


def test_the_norm_is_reported_only_where_it_is_asked_for():
    for clip, kind in ((None, type(None)), (1.0, float)):
        norms = Norms()
        mxtrain.fit(nn.Dense(CLASSES), BATCHES, clip_norm=clip, callbacks=[norms], epochs=2)
        assert [type(norm) for norm in norms.seen] == [kind, kind]
