"""Which epoch was best, and when patience is at its end (FIELD-REPORTS D12, D13)."""

import json
import math

import pytest

from mxtrain.callbacks.monitor import Monitor


def follow(monitor, values, name="accuracy", start=1):
    """Whether training stops after each of some epochs."""
    return [monitor.epoch({"epoch": epoch, "loss": 1.0, "accuracy": 0.5, name: value}) is not None
            for epoch, value in enumerate(values, start)]


def test_larger_accuracy_and_smaller_loss_are_better():
    for name, values in (("accuracy", [0.1, 0.3, 0.2]), ("loss", [3, 1, 2]), ("aux_loss", [3, 1, 2]), ("top5", [1, 3, 2])):
        monitor = Monitor(name)
        follow(monitor, values, name)
        assert (monitor.best, monitor.best_epoch, monitor.improved) == (values[1], 2, False)


def test_auto_is_accuracy_where_there_is_one():
    monitor = Monitor()
    monitor.epoch({"epoch": 1, "loss": 1.0, "accuracy": 0.5})
    assert monitor.name == "accuracy"
    for row in ({"epoch": 1, "loss": 1.0}, {"epoch": 1, "loss": 1.0, "accuracy": None}):
        monitor = Monitor()
        monitor.epoch(row)
        assert monitor.name == "loss" and monitor.best == 1.0


def test_without_patience_it_never_stops():
    assert not any(follow(Monitor(), [0.5] * 50))


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_stops_after_as_many_epochs_without_improvement(patience):
    assert follow(Monitor(patience=patience), [0.1, 0.2] + [0.2] * patience) == [False] * (patience + 1) + [True]
    # One that is better in between starts the count anew.
    assert follow(Monitor(patience=2), [0.3, 0.2, 0.4, 0.4, 0.4]) == [False] * 4 + [True]


def test_the_reason_says_what_and_for_how_long():
    monitor = Monitor(patience=2)
    follow(monitor, [0.7, 0.6])
    assert monitor.epoch({"epoch": 3, "accuracy": 0.6}) == "accuracy has not improved for 2 epochs (best 0.7 in epoch 1)"


def test_small_steps_are_the_best_but_do_not_count_for_patience():
    monitor = Monitor(patience=3, min_delta=0.1)
    assert follow(monitor, [0.5, 0.55, 0.6, 0.62]) == [False, False, False, False]  # 0.62 is 0.12 above 0.5
    assert (monitor.best, monitor.best_epoch, monitor.improved) == (0.62, 4, True)
    assert follow(monitor, [0.63, 0.64, 0.65], start=5) == [False, False, True]
    assert monitor.best == 0.65
    monitor = Monitor("loss", patience=2, min_delta=0.5)
    assert follow(monitor, [3.0, 2.5, 2.4], "loss") == [False, False, False]  # 2.5 is no more than 0.5 below 3
    assert follow(monitor, [2.4, 2.4], "loss", 4) == [False, True]


@pytest.mark.parametrize("name", ["accuracy", "loss"])
def test_nan_is_never_the_best_and_blocks_nothing(name):
    monitor = Monitor(name, patience=3)
    assert follow(monitor, [math.nan, math.nan], name) == [False, False]
    assert monitor.best is None and not monitor.improved
    follow(monitor, [0.5], name, 3)
    assert (monitor.best, monitor.best_epoch, monitor.improved) == (0.5, 3, True)
    assert follow(monitor, [math.nan] * 3, name, 4) == [False, False, True]
    assert monitor.best == 0.5


def test_a_stop_comes_as_many_epochs_after_a_resume_as_without():
    values = [0.5, 0.4, 0.4, 0.4]
    for cut in range(len(values)):
        first = Monitor(patience=3)
        follow(first, values[:cut])
        second = Monitor(patience=3)
        second.load(json.loads(json.dumps(first.state())))
        assert follow(second, values[cut:], start=cut + 1) == [False, False, False, True][cut:]
        assert (second.best, second.best_epoch) == (0.5, 1)
        assert second.exhausted


def test_another_value_to_watch_starts_from_nothing():
    first = Monitor("accuracy", patience=1)
    follow(first, [0.9, 0.8])
    second = Monitor("loss", patience=1)
    second.load(first.state())
    assert second.best is None and not second.exhausted
    assert follow(second, [4.0], "loss") == [False]
