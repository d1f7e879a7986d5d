"""Callbacks watch; one that fails is left out, and the training goes on to the same end."""

import logging

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

import mxtrain
from mxtrain.callbacks.base import Callback, Callbacks

EVENTS = ("start", "log", "epoch", "end", "close")
X = np.random.RandomState(0).randn(12, 4).astype("float32")
DATA = gluon.data.ArrayDataset(X, np.arange(12).astype("int32") % 3)


class Recorder(Callback):
    """Notes the events; raises at one of them."""

    def __init__(self, fails_at=None):
        self.seen, self._fails_at = [], fails_at

    def _note(self, event):
        self.seen.append(event)
        if event == self._fails_at:
            raise OSError("disk full")

    def start(self, state):
        self._note("start")

    def log(self, values):
        self._note("log")

    def epoch(self, rows):
        self._note("epoch")

    def end(self, state):
        self._note("end")

    def close(self):
        self._note("close")


def tell(callbacks):
    callbacks.start(None)
    callbacks.log({})
    callbacks.epoch([])
    callbacks.end(None)
    callbacks.close()


@pytest.mark.parametrize("event", EVENTS)
def test_one_that_fails_is_named_and_left_out_and_the_others_go_on(caplog, event):
    bad, good = Recorder(event), Recorder()
    with caplog.at_level(logging.WARNING, "mxtrain"):
        tell(Callbacks([bad, good]))
    assert tuple(good.seen) == EVENTS
    assert tuple(bad.seen) == EVENTS[: EVENTS.index(event) + 1]
    assert caplog.text.count("Recorder failed and is switched off: OSError: disk full") == 1


def test_a_callback_without_methods_is_fine():
    tell(Callbacks([Callback()]))


def weights(callbacks):
    net = nn.Dense(3, in_units=4)
    ran = mxtrain.fit(net, DATA, DATA, batch_size=5, epochs=2, callbacks=callbacks)
    return net.weight.data(mx.cpu(0)).asnumpy(), ran


@pytest.mark.parametrize("event", ["start", "epoch", "end", "close"])
def test_training_does_not_depend_on_them(event):
    expected, _ = weights([])
    good = Recorder()
    got, ran = weights([Recorder(event), good])
    np.testing.assert_array_equal(got, expected)
    assert [row["split"] for row in ran.rows] == ["train", "val"] * 2
    assert [name for name in good.seen if name != "log"] == ["start", "epoch", "epoch", "end", "close"]


def test_close_is_called_after_a_failure_too():
    recorder = Recorder()
    labels = np.zeros(12, "int32")
    labels[7] = 99
    with pytest.raises(mxtrain.UserError):
        mxtrain.fit(nn.Dense(3), gluon.data.ArrayDataset(np.ones((12, 4), "float32"), labels), batch_size=3, callbacks=[recorder])
    assert recorder.seen[0] == "start" and recorder.seen[-1] == "close" and "end" not in recorder.seen
