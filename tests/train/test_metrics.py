"""Means over samples: exact counts, one rounding a batch, and a loss that must be finite."""

import json
import math

import mxnet as mx
import numpy as np
import pytest

from mxtrain.errors import TrainingError
from mxtrain.train.metrics import IN_FLIGHT, Meter, Totals


def report(*rows, ctx=mx.cpu(0)):
    return mx.nd.array(rows, ctx=ctx)


def test_six_of_seven():
    totals = Totals(["loss", "accuracy"])
    totals.add(np.array([[0.5, 1]] * 4, "float32"))
    totals.add(np.array([[1.5, 1], [1.5, 0], [1.5, 1]], "float32"))
    assert totals.means() == {"loss": 6.5 / 7, "accuracy": 6 / 7}
    assert totals.samples == 7


def test_a_batch_is_added_exactly():
    values = np.array([1e8, 1, -1e8, 1e-8] * 10, "float32")  # a float32 sum loses the ones
    totals = Totals(["loss"])
    totals.add(values[:, None])
    assert totals.sums["loss"] == math.fsum(values.tolist())
    shuffled = Totals(["loss"])
    shuffled.add(np.random.RandomState(0).permutation(values)[:, None])
    assert shuffled.sums == totals.sums


def test_no_samples_have_no_means():
    assert Totals(["loss"]).means() == {}


def test_the_state_goes_through_json():
    totals = Totals(["loss", "accuracy"])
    totals.add(np.array([[0.1, 1], [0.2, 0]], "float32"))
    other = Totals(["loss", "accuracy"], **json.loads(json.dumps(totals.state())))
    for each in (totals, other):
        each.add(np.array([[0.3, 1]], "float32"))
    assert other.means() == totals.means()


def test_a_totals_state_is_not_shared():
    totals = Totals(["loss"])
    other = Totals(["loss"], **totals.state())
    other.add(np.ones((2, 1), "float32"))
    assert totals.sums == {"loss": 0.0}


@pytest.mark.parametrize("contexts", [1, 3])
def test_a_meter_joins_the_shards_of_an_update(contexts):
    meter = Meter(["loss", "accuracy"])
    meter.start()
    meter.add(0, [report([s, s % 2], ctx=mx.cpu(s % contexts)) for s in range(5)])
    meter.add(1, [report([10, 1], [20, 0])])
    assert meter.read() == {"loss": 40 / 7, "accuracy": 3 / 7}


def test_reading_in_passing_leaves_out_what_may_not_be_finished():
    meter = Meter(["loss"])
    for update in range(IN_FLIGHT + 2):
        meter.add(update, [report([float(update)])])
    assert meter.read(everything=False) == {"loss": 0.5}  # of updates 0 and 1
    assert meter.waiting == IN_FLIGHT
    assert meter.read() == {"loss": sum(range(IN_FLIGHT + 2)) / (IN_FLIGHT + 2)}
    assert meter.waiting == 0


def test_an_epoch_starts_from_nothing_or_from_a_saved_state():
    meter = Meter(["loss"])
    meter.add(0, [report([4.0])])
    meter.read()
    saved = meter.totals.state()
    meter.start()
    meter.add(1, [report([2.0])])
    assert meter.read() == {"loss": 2.0}
    meter.start(saved)
    meter.add(1, [report([2.0])])
    assert meter.read() == {"loss": 3.0}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_not_finite_names_its_update(value):
    meter = Meter(["loss", "accuracy"])
    meter.add(6, [report([1.0, 1])])
    meter.add(7, [report([1.0, 1]), report([value, 0])])
    with pytest.raises(TrainingError, match="in update 8"):
        meter.read()
    assert meter.totals.samples == 1  # what came before is kept, what is broken is not counted
