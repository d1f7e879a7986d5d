import mxnet as mx
import pytest
from mxtrain.parallel.counting import counting, live, peak

CPU = mx.cpu()


EXACTLY = 500
"""Bytes: the profiler prints a few hundred megabytes to seven or eight digits."""


def test_arrays_are_counted():
    with counting():
        before = live(CPU)
        array = mx.nd.zeros((1000, 333))
        assert live(CPU) - before == pytest.approx(4 * 333_000, abs=EXACTLY)
        del array
        assert live(CPU) == pytest.approx(before, abs=EXACTLY)


def test_the_peak_counts_what_is_gone_and_work_that_counting_waits_for():
    def work():
        a = mx.nd.ones((1000, 100))
        return mx.nd.sum(a + a)  # two arrays at a time

    with counting():
        before = live(CPU)
        result, highest = peak(CPU, work)
        assert result.asscalar() == 200_000
        assert highest - before == pytest.approx(800_000, abs=2000)  # the sum takes a little for itself
        assert live(CPU) == pytest.approx(before, abs=EXACTLY)
        assert peak(CPU, lambda: None)[1] == pytest.approx(before, abs=EXACTLY)


def test_counting_again_goes_on():
    with counting():
        mx.nd.zeros((10_000,)).wait_to_read()
    with counting():
        before = live(CPU)
        array = mx.nd.zeros((10_000,), dtype="float64")
        assert live(CPU) - before == pytest.approx(80_000, abs=EXACTLY)
        del array
