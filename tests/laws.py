"""A small training by `mxtrain.fit` that has all that could depend on a layout, for tests of the laws of the design."""

import json
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

import mxtrain
from mxtrain.train import loop
from mxtrain.train.signals import Stopped
from trainings import rows

SHARDS = 8
# Batches of 20, 20 and 5 samples, in shards of 2 and 3, and of 0 and 1.
SAMPLES, BATCH = 45, 20
EPOCHS = 3  # where nothing else is said: nine updates

generator = np.random.RandomState(11)
IMAGES = generator.rand(SAMPLES + 17, 1, 6, 6).astype("float32")
LABELS = (IMAGES[:, 0, :3, :3].mean(axis=(1, 2)) * 10).astype("int32") % 5
TRAIN = gluon.data.ArrayDataset(IMAGES[:SAMPLES], LABELS[:SAMPLES])
VAL = gluon.data.ArrayDataset(IMAGES[SAMPLES:], LABELS[SAMPLES:])

FLOAT = dict(epochs=7, momentum=0.9)  # 21 updates
EXACT = {
    "sgd": dict(optimizer="sgd", momentum=0.9, clip_norm=0.5),
    "nag": dict(optimizer="nag", momentum=0.9, decay_all=False),
    "adam": dict(optimizer="adam"),
    "adamw": dict(optimizer="adamw", weight_decay=0.05, clip_norm=2.0),
}
RATES = {"sgd": 0.05, "nag": 0.05, "adam": 0.01, "adamw": 0.01, "rmsprop": 0.005, "adagrad": 0.02, "adadelta": 0.1}


def network(bias=True):
    """Convolutions, batch normalization and dropout.

    A bias before a batch normalization has no effect: its gradient is nothing but rounding, which only exact sums keep.
    """
    net = nn.HybridSequential(prefix="")
    net.add(nn.Conv2D(4, 3, use_bias=bias), nn.BatchNorm(), nn.Activation("relu"), nn.Dropout(0.2),
            nn.Conv2D(6, 3, use_bias=bias), nn.BatchNorm(), nn.Activation("relu"), nn.Flatten(),
            nn.Dense(8, activation="relu"), nn.Dropout(0.3), nn.Dense(5))
    return net


def train(folder, count=1, kvstore="device", **settings):
    """Trains on `count` contexts. Returns (arrays of the last checkpoint, rows of metrics.csv)."""
    optimizer = settings.get("optimizer", "sgd")
    settings = {"lr": RATES.get(optimizer, 0.01), "warmup_epochs": 0.5, **settings}
    return fit(count, kvstore, settings, network(settings.get("exact", False)), out=str(folder), batch_size=BATCH,
               shards=SHARDS, seed=4, tensorboard=False, plots=False)


def go_on(folder, count=1, kvstore="device", epochs=EPOCHS, optimizer="sgd", exact=False, **layout):
    """Resumes; all that is not given here must come from the run."""
    return fit(count, kvstore, dict(epochs=epochs, optimizer=optimizer, **layout), network(exact), resume=str(folder))


def fit(count, kvstore, settings, net, **more):
    ran = mxtrain.fit(net, TRAIN, VAL, ctx=[mx.cpu(i) for i in range(count)], kvstore=kvstore, **settings, **more)
    return result(ran.folder)


def result(folder):
    checkpoints = Path(folder, "checkpoints")
    with np.load(checkpoints / (checkpoints / "latest").read_text().strip() / "arrays.npz") as arrays:
        arrays = dict(arrays)
    return arrays, rows(folder)


def assert_equal_bits(got, expected):
    """Weights, running statistics, optimizer states, losses, metrics: everything."""
    (arrays, rows), (expected_arrays, expected_rows) = got, expected
    assert set(arrays) == set(expected_arrays)
    for name, value in expected_arrays.items():
        np.testing.assert_array_equal(arrays[name], value, err_msg=name)
    assert rows == expected_rows


def assert_close(got, expected):
    """To 1e-5 of each tensor's largest element, as law 1 says; losses to as much, and hits to the count."""
    (arrays, rows), (expected_arrays, expected_rows) = got, expected
    assert set(arrays) == set(expected_arrays)
    for name, value in expected_arrays.items():
        # The optimizer's momentum is of a gradient's size and not of a weight's, but has the same relative error.
        np.testing.assert_allclose(arrays[name], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name)
    assert len(rows) == len(expected_rows)
    for row, expected_row in zip(rows, expected_rows):
        np.testing.assert_allclose(float(row["loss"]), float(expected_row["loss"]), rtol=1e-5)
        assert (row["samples"], row["accuracy"]) == (expected_row["samples"], expected_row["accuracy"])


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """Trains on one context, each configuration once."""
    results = {}

    def get(**settings):
        key = json.dumps(settings, sort_keys=True)
        if key not in results:
            results[key] = train(tmp_path_factory.mktemp("once") / "run", **settings)
        return results[key]

    return get


def stopped(folder, monkeypatch, point, number=15, run=train, **settings):
    """Trains until the point; number: of the signal, or None for a process that dies there and saves nothing."""
    calls, agree = [], loop.agree

    def agree_to_stop(*arguments):
        calls.append(arguments)
        if len(calls) != point:
            return agree(*arguments)
        if number is None:
            raise KeyboardInterrupt
        return agree(*arguments)._replace(signal=number)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "agree", agree_to_stop)
        with pytest.raises(Stopped if number else KeyboardInterrupt):
            run(folder, **settings)
