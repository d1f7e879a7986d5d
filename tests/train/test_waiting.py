"""The clock is a number here, and devices are events: no test depends on how fast the machine is."""

import threading
from types import SimpleNamespace

import mxnet as mx
import pytest
from mxtrain.train import waiting


class Mark(waiting._Mark):
    """Tells the devices that their time was taken."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "time" and value is not None:
            for device in self.arrays:
                device.noted.set()


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(waiting.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(waiting, "_Mark", Mark)
    return clock


class Device:
    """Results that are there when `done` is set."""

    def __init__(self, error=None):
        self.done, self.noted, self._error = threading.Event(), threading.Event(), error

    def wait_to_read(self):
        assert self.done.wait(10)
        if self._error:
            raise self._error

    def finish(self):
        """Ends the work, and lets who waits for it take note."""
        self.done.set()
        assert self.noted.wait(10)


def run(clock, deliver, latest, ready=lambda: False, work=lambda: None):
    """Times of one batch, delivered by deliver(), and one second of host work, with what work() does, for it."""
    times = SimpleNamespace(seconds=0.0, waited=0.0)

    def batches():
        deliver()
        yield "batch"

    for _ in waiting.timed(batches(), ready, lambda: latest, times):
        work()
        clock.now += 1
    return times


def test_devices_wait_from_the_end_of_their_work_until_the_batch(clock):
    device = Device()

    def deliver():
        clock.now += 3
        device.finish()
        clock.now += 2

    times = run(clock, deliver, [device])
    assert (times.waited, times.seconds) == (2, 6)


def test_devices_that_work_while_the_host_waits_do_not_wait(clock):
    device = Device()

    def deliver():
        clock.now += 5

    times = run(clock, deliver, [device], work=device.finish)
    assert (times.waited, times.seconds) == (0, 6)


def test_devices_that_had_finished_wait_from_the_question_on(clock):
    device = Device()
    clock.now = 7
    device.done.set()

    def deliver():
        device.finish()
        clock.now += 5

    assert run(clock, deliver, [device]).waited == 5


def test_before_the_first_update_all_waiting_counts(clock):
    def deliver():
        clock.now += 4

    assert run(clock, deliver, []).waited == 4


def test_nothing_is_measured_when_batches_are_ready(clock):
    def deliver():
        clock.now += 1

    times = run(clock, deliver, None, ready=lambda: True)  # None cannot be waited for
    assert (times.waited, times.seconds) == (0, 2)


def test_an_error_of_the_device_is_not_lost(clock):
    device = Device(ValueError("an operator failed"))

    def deliver():
        device.finish()

    with pytest.raises(ValueError, match="an operator failed"):
        run(clock, deliver, [device])


def test_an_error_that_comes_later_than_the_batch_is_not_lost(clock):
    device = Device(ValueError("an operator failed"))
    with pytest.raises(ValueError, match="an operator failed"):
        run(clock, lambda: None, [device], work=device.finish)


def test_an_error_after_the_last_batch_is_not_lost():
    # No deviation is negative, which MXNet finds out while it computes.
    results = [[], [mx.nd.random.normal(0, -1, (2, 2))]]
    times = SimpleNamespace(seconds=0.0, waited=0.0)
    with pytest.raises(mx.base.MXNetError, match="Check failed"):
        for _ in waiting.timed(iter([1]), lambda: False, lambda: results.pop(0), times):
            pass


def test_the_watcher_ends_with_the_batches():
    device = Device()
    device.done.set()
    list(waiting.timed(iter([1, 2]), lambda: False, lambda: [device], SimpleNamespace(seconds=0.0, waited=0.0)))
    for thread in threading.enumerate():
        if thread.name == "mxtrain-watcher":
            thread.join(10)
            assert not thread.is_alive()


def test_the_share_is_right_at_any_time(clock):
    times, seen = SimpleNamespace(seconds=0.0, waited=0.0), []

    def batches():
        for _ in range(3):
            clock.now += 4
            yield "batch"

    for _ in waiting.timed(batches(), lambda: False, lambda: [], times):
        seen.append((times.waited, times.seconds))  # as the loop does, before the step's own time is known
        clock.now += 1
    assert seen == [(4, 4), (8, 9), (12, 14)] and (times.waited, times.seconds) == (12, 15)


def test_the_work_that_is_under_way_at_the_end_counts(clock, monkeypatch):
    """Waiting for it belongs to the epoch, whoever does it."""
    join = waiting._Watcher.join

    def slow(watcher):
        clock.now += 7
        join(watcher)

    monkeypatch.setattr(waiting._Watcher, "join", slow)
    times = SimpleNamespace(seconds=0.0, waited=0.0)
    for _ in waiting.timed(["batch"], lambda: False, lambda: [], times):
        clock.now += 1
    assert (times.waited, times.seconds) == (0, 8)
