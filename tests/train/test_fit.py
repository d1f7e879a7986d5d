"""What `mxtrain.fit` is given by people: settings of wrong types, labels that do not exist, losses and networks of all kinds."""

import multiprocessing
import random
import time

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxtrain
from mxtrain import UserError
from mxtrain.errors import BadSample
from mxtrain.train import loop
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
    ({"ctx": []}, "ctx=.*contexts"),
    ({"ctx": ["cpu(0)"]}, "ctx=.*contexts"),
    ({"callbacks": [print]}, "callbacks: .*Callback"),
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


class Mean(gluon.HybridBlock):
    """A loss that is a mean over the batch already: dividing by the batch again would be wrong in silence."""

    def hybrid_forward(self, F, output, label):
        return F.mean(F.square(output))


class SecondOutput(gluon.HybridBlock):
    """A loss on both outputs of a network."""

    def hybrid_forward(self, F, outputs, label):
        return F.mean(F.square(outputs[0]), axis=1) + F.mean(F.square(outputs[1]), axis=1)


class TwoHeads(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Dense(2), nn.Dense(3)

    def hybrid_forward(self, F, x):
        return self.a(x), self.b(x)


def test_a_loss_that_is_no_value_per_sample_is_refused():
    with pytest.raises(UserError, match="Mean gives values of shape .1,. for 2 samples"):
        fit(loss=Mean())


def test_labels_that_the_loss_cannot_take_are_named():
    wide = gluon.data.ArrayDataset(X, np.zeros((30, 7), "float32"))
    with pytest.raises(UserError, match="L2Loss cannot compare.*labels of shape .7,. and type float32"):
        fit(wide, nn.Dense(3), loss=gluon.loss.L2Loss())
    with pytest.raises(UserError, match="cannot take an input of shape .4,. and type uint8"):
        fit(gluon.data.ArrayDataset(X.astype("uint8"), Y))


def test_whole_labels_for_a_loss_of_gluon_that_wants_fractions():
    labels = np.stack([Y, 1 - Y], axis=1)
    assert fit(gluon.data.ArrayDataset(X, labels), loss=gluon.loss.SigmoidBCELoss(), epochs=5).rows[-1]["loss"] < 0.7


def test_a_loss_of_ones_own_gets_all_outputs():
    net = TwoHeads()
    rows = fit(net=net, loss=SecondOutput(), lr=0.1, epochs=20).rows
    assert rows[-1]["loss"] < 0.1 * rows[0]["loss"]
    assert np.abs(net.b.weight.data().asnumpy()).max() < 0.3  # the second head is trained too: its target is 0


def test_an_input_that_is_no_number_is_noticed_behind_a_relu():
    bad = X.copy()
    bad[7, 1] = np.nan
    with pytest.raises(mxtrain.errors.TrainingError, match="not finite|is nan"):
        fit(gluon.data.ArrayDataset(bad, Y), epochs=2)


def test_what_cannot_be_trained_is_refused():
    net = nn.HybridSequential()
    net.add(nn.Dense(8), gluon.contrib.nn.SyncBatchNorm(), nn.Dense(2))
    with pytest.raises(UserError, match="SyncBatchNorm"):
        fit(net=net)


def test_a_warm_up_without_end_is_said(caplog):
    fit(warmup_epochs=2.0, epochs=1)
    assert "--warmup-epochs 2.0: the run of 1 epochs never comes to --lr 0.1" in caplog.text


def test_an_optimizer_keeps_its_own_constants():
    from mxtrain.optim.optimizer import create
    from mxtrain.optim.settings import OptimConfig

    assert create(OptimConfig(optimizer="lamb"), {}).epsilon == mx.optimizer.create("lamb").epsilon
    assert create(OptimConfig(optimizer="ftml"), {}).beta1 == mx.optimizer.create("ftml").beta1
    assert create(OptimConfig(optimizer="adam", beta1=0.8), {}).beta1 == 0.8


def test_a_validation_loss_that_is_no_number_is_said_and_never_the_best(caplog):
    bad = gluon.data.ArrayDataset(np.full((4, 4), np.nan, "float32"), np.zeros((4, 1), "float32"))
    good = gluon.data.ArrayDataset(X, X[:, :1])
    result = mxtrain.fit(nn.Dense(1), good, bad, loss=gluon.loss.L2Loss(), batch_size=8, epochs=2, lr=0.01)
    assert caplog.text.count("the validation loss of epoch 1 is nan") == 1
    assert (result.best, result.best_epoch) == (None, None)


class Rows(gluon.data.Dataset):
    """X and Y, one by one; some cannot be read."""

    def __init__(self, bad=(), seconds=0.0, rows=30):
        self.bad, self.seconds, self.rows = bad, seconds, rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        time.sleep(self.seconds)
        if index in self.bad:
            raise BadSample(f"row {index} is broken")
        return X[index], Y[index]


def weights_after(data, **settings):
    net = network()
    result = fit(data, net, seed=3, epochs=2, lr=0.5, **settings)
    return [p.data(settings.get("ctx", [mx.cpu()])[0]).asnumpy() for p in net.collect_params().values()], result.rows


@pytest.mark.parametrize("settings", [{"workers": 1}, {"workers": 2}, {"workers": 4}, {"workers": 2, "worker_kind": "thread"}])
def test_workers_of_a_dataset_of_ones_own_change_nothing(settings):
    alone, _ = weights_after(Rows())
    helped, _ = weights_after(Rows(), **settings)
    for a, b in zip(alone, helped):
        np.testing.assert_array_equal(a, b)
    assert not multiprocessing.active_children()


def test_what_samples_draw_does_not_depend_on_workers_or_a_resume(tmp_path):
    class Noisy(Rows):
        def __getitem__(self, index):
            return X[index] + np.float32(np.random.normal() + random.random()), Y[index]

    expected, rows = weights_after(Noisy())
    assert rows[0]["loss"] != weights_after(Rows())[1][0]["loss"]
    for workers in (1, 2):
        for a, b in zip(expected, weights_after(Noisy(), workers=workers)[0]):
            np.testing.assert_array_equal(a, b)
    fit(Noisy(), seed=3, epochs=1, lr=0.5, schedule="constant", out=str(tmp_path / "a"))
    resumed = fit(Noisy(), epochs=2, resume=str(tmp_path / "a")).rows
    assert resumed[-1]["loss"] == fit(Noisy(), seed=3, epochs=2, lr=0.5, schedule="constant").rows[-1]["loss"]


def test_workers_for_batches_are_refused():
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(X, Y), batch_size=10)
    with pytest.raises(UserError, match="workers=2.*train_data that are batches already"):
        mxtrain.fit(network(), loader, workers=2)


def test_bad_samples_are_left_out_of_gradient_and_metrics():
    """Against plain numpy: a softmax regression in which the bad rows never existed, in the same batches."""
    def regression():
        net = nn.Dense(2, use_bias=False, in_units=4, weight_initializer="zeros")
        return net

    bad, order = {4, 5, 17}, []

    class Seen(Rows):
        def __getitem__(self, index):
            order.append(index)
            return super().__getitem__(index)

    net = regression()
    result = fit(Seen(bad), net, lr=0.5, momentum=0.0, weight_decay=0.0, schedule="constant", on_bad_sample="skip")
    order = order[-30:]  # what comes before was read for the shapes
    weight, losses, hits = np.zeros((2, 4)), [], 0
    for start in range(0, 30, 8):
        rows = [i for i in order[start:start + 8] if i not in bad]
        scores = X[rows] @ weight.T
        p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        losses += (-np.log(p[np.arange(len(rows)), Y[rows]])).tolist()
        hits += (scores.argmax(axis=1) == Y[rows]).sum()
        p[np.arange(len(rows)), Y[rows]] -= 1
        weight -= 0.5 * p.T @ X[rows] / len(rows)
    np.testing.assert_allclose(net.weight.data().asnumpy(), weight, rtol=1e-5, atol=1e-6)  # float32 against float64
    row, = result.rows
    assert (row["samples"], row["skipped"]) == (27, 3) and row["accuracy"] == hits / 27
    assert row["loss"] == pytest.approx(np.mean(losses), abs=4e-6)  # what MXNet's float32 log_softmax is off by


@pytest.mark.parametrize("count, shards", [(1, 4), (2, 4), (3, 4), (4, 4), (2, 8), (1, 8)])
def test_bad_samples_do_not_depend_on_the_layout(count, shards):
    settings = {"shards": shards, "exact": True, "on_bad_sample": "skip"}
    bad = {4, 5, 17, 0, 1, 2, 3}  # among them whole shards
    expected, rows = weights_after(Rows(bad), **{**settings, "ctx": [mx.cpu(0)]})
    weights, same_rows = weights_after(Rows(bad), **settings, ctx=[mx.cpu(i) for i in range(count)], workers=count - 1)
    for a, b in zip(expected, weights):
        np.testing.assert_array_equal(a, b)
    for one, other in zip(rows, same_rows):
        assert [one[name] for name in ("loss", "accuracy", "skipped")] == [other[name] for name in ("loss", "accuracy", "skipped")]


def test_a_batch_without_a_good_sample_changes_nothing():
    alone, _ = weights_after(Rows(range(1, 30)), batch_size=1, on_bad_sample="skip")
    both, rows = weights_after(Rows(range(1, 30)), batch_size=30, on_bad_sample="skip", schedule="constant")
    assert [row["samples"] for row in rows] == [1, 1] and [row["skipped"] for row in rows] == [29, 29]
    assert all(np.isfinite(a).all() for a in alone)


def test_when_most_samples_are_bad_it_ends(monkeypatch):
    with pytest.raises(UserError, match="none of 30 samples can be read"):
        fit(Rows(range(30)), on_bad_sample="skip")
    monkeypatch.setattr(loop, "_TOO_MANY", 10)
    with pytest.raises(UserError, match="of the first .* samples of epoch 1 cannot be read"):
        fit(Rows(range(5, 30)), on_bad_sample="skip")
    with pytest.raises(UserError, match="none of the 30 samples to evaluate on|none of 30 samples"):
        fit(Rows(), val_data=Rows(range(30)), on_bad_sample="skip")


def test_a_bad_sample_stops_with_everything_saved(tmp_path):
    with pytest.raises(BadSample, match="row 17 is broken.*skip.*saved after update"):
        fit(Rows({17}), epochs=3, out=str(tmp_path / "a"))
    resumed = fit(Rows({17}), epochs=3, resume=str(tmp_path / "a"), on_bad_sample="skip")
    straight = fit(Rows({17}), epochs=3, on_bad_sample="skip")
    assert [row["loss"] for row in resumed.rows] == [row["loss"] for row in straight.rows]
    assert "on_bad_sample skip (was stop)" in (tmp_path / "a" / "config.yaml").read_text()


def test_waiting_for_data_is_measured_and_said_once(monkeypatch, caplog):
    monkeypatch.setattr(loop, "_SECONDS_TO_JUDGE", 0.05)
    monkeypatch.setattr(loop, "_BATCHES_TO_JUDGE", 3)
    result = fit(Rows(seconds=0.01), epochs=3)
    # 80 ms to read a batch, about one to learn from it: only a machine that stands still would wait for less.
    assert all(0.5 < row["wait_share"] <= 1 for row in result.rows)
    assert caplog.text.count("the devices wait for data in") == 1 and "workers=0 of" in caplog.text
    caplog.clear()
    assert all(row["wait_share"] == 0 for row in fit(epochs=3).rows)  # in memory
    assert "the devices wait" not in caplog.text


@pytest.mark.parametrize("label", [bool, np.bool_, np.int16, np.uint16, np.uint32, np.float16, np.float64])
def test_labels_of_all_types_of_numbers(label):
    class Labelled(Rows):
        def __getitem__(self, index):
            return X[index], label(Y[index])

    expected = fit(seed=1).rows[0]["loss"]
    assert fit(Labelled(), seed=1).rows[0]["loss"] == expected
    if issubclass(label, np.generic):
        assert fit(gluon.data.ArrayDataset(X, Y.astype(label)), seed=1).rows[0]["loss"] == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sample, words", [
    ((X[0], "cat"), "type <U3: inputs and labels must be numbers"),
    ((X[0], None), "type object: inputs and labels must be numbers"),
    (X[0], "sample 0 is ndarray: must be .input, ..., label."),
])
def test_samples_that_are_no_input_and_label_are_named(sample, words, workers):
    class Odd(Rows):
        def __getitem__(self, index):
            return sample

    with pytest.raises(UserError, match=words):
        fit(Odd(), workers=workers)


def test_workers_end_also_when_the_first_batch_fails():
    class Wrong(Rows):
        def __getitem__(self, index):
            return X[index], Y[index] if index == 0 else 1 // 0

    with pytest.raises(ZeroDivisionError) as caught:
        fit(Wrong(), workers=2)
    assert not multiprocessing.active_children()  # though the error still holds all that was there
    assert caught


def test_an_interpreter_error_in_a_worker_is_no_user_error():
    class Wrong(Rows):
        def __getitem__(self, index):
            return X[index] / (index - 3) if index != 3 else 1 // 0, Y[index]

    with pytest.raises(ZeroDivisionError):
        fit(Wrong(), workers=2)
    assert not multiprocessing.active_children()
