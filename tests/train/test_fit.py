"""What `mxtrain.fit` is given by people: settings of wrong types, labels that do not exist, losses and networks of all kinds."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxtrain
from mxtrain import UserError
from mxtrain.train import fit as module

X = np.random.RandomState(0).normal(size=(30, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")


def network(outputs=2):
    net = nn.HybridSequential()
    net.add(nn.Dense(8, activation="relu"), nn.Dense(outputs))
    return net


def fit(data=None, net=None, **settings):
    data = data if data is not None else gluon.data.ArrayDataset(X, Y)
    return mxtrain.fit(net or network(), data, **{"batch_size": 8, **settings})


@pytest.mark.parametrize("settings, words", [
    ({"kvstore": "foo"}, "--kvstore foo.*none, local, device"),
    ({"schedule": "foo"}, "--schedule foo.*cosine"),
    ({"epochs": 2.5}, "--epochs 2.5: must be a whole number"),
    ({"recompute": "²"}, "--recompute"),
    ({"exact": 1}, "--exact 1: must be true or false"),
    ({"optimizer": "nadam"}, "--optimizer nadam.*adamw"),
    ({"bach_size": 3}, "bach_size.*batch_size"),
    ({"image_size": 32}, "fit.image_size"),
    ({"ctx": [mx.cpu(0), mx.cpu(0)]}, "twice"),
])
def test_wrong_settings_are_named(settings, words):
    with pytest.raises(UserError, match=words):
        fit(**settings)


def test_numbers_of_numpy_and_of_text_are_numbers():
    assert fit(lr=np.float64(0.5)).rows[0]["loss"] == fit(lr="0.5").rows[0]["loss"]


@pytest.mark.parametrize("label", [-1, 2, 0.5])
def test_a_label_that_does_not_exist_is_named(label):
    wrong = Y.astype("float32")
    wrong[13] = label
    with pytest.raises(UserError, match=rf"train_data, batch \d: label {label}.*2 outputs"):
        fit(gluon.data.ArrayDataset(X, wrong))


def test_a_regression_learns_and_is_measured_by_its_loss():
    target = X @ np.array([[1.0], [2.0], [0.0], [-1.0]], "float32")
    net = nn.Dense(1)
    result = fit(gluon.data.ArrayDataset(X, target), net, loss=gluon.loss.L2Loss(), lr=0.1, epochs=40)
    assert result.rows[0]["accuracy"] is None
    np.testing.assert_allclose(net.weight.data().asnumpy(), [[1, 2, 0, -1]], atol=1e-2)  # converges; no noise in the data


def test_a_loader_of_ones_own_gives_the_batches():
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(X, Y), batch_size=10, shuffle=True)
    result = fit(loader, batch_size=None, ctx=[mx.cpu(0), mx.cpu(1)])
    assert [row["samples"] for row in result.rows] == [30]
    assert result.rows[0]["update"] == 3


def test_networks_of_two_inputs_and_imperative_ones():
    class Two(nn.Block):
        def __init__(self):
            super().__init__()
            self.layer = nn.Dense(2)

        def forward(self, a, b):
            return self.layer(mx.nd.concat(a, b, dim=1))

    net = Two()
    result = fit(gluon.data.ArrayDataset(X[:, :2], X[:, 2:], Y), net, lr=0.5, epochs=20, ctx=[mx.cpu(0), mx.cpu(1)])
    assert result.rows[-1]["accuracy"] > 0.9


def test_the_network_can_be_trained_on_by_hand():
    net = network()
    fit(net=net, exact=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    before = net[1].bias.data().asnumpy()
    gradients = []
    for _ in range(2):  # the second must not contain the first
        with autograd.record():
            loss = net(mx.nd.array(X[:4])).sum()
        loss.backward()
        gradients.append(net[1].bias.grad().asnumpy())
    np.testing.assert_array_equal(gradients, 4.0)
    trainer.step(4)
    np.testing.assert_allclose(net[1].bias.data().asnumpy(), before - 1, rtol=1e-6)  # one rounding


def test_a_resume_with_other_threads_is_refused():
    with pytest.raises(UserError, match="OMP_NUM_THREADS=2"):
        module._check_threads(2, [mx.cpu(0)])
    module._check_threads(1, [mx.cpu(0)])
