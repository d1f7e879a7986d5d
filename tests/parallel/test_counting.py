import mxnet as mx
from mxtrain.parallel.counting import counting, live, peak

CPU = mx.cpu()


def test_arrays_are_counted_to_the_byte():
    with counting():
        before = live(CPU)
        array = mx.nd.zeros((1000, 333))
        assert live(CPU) - before == 4 * 333_000
        del array
        assert live(CPU) == before


def test_the_peak_counts_what_is_gone_and_work_that_counting_waits_for():
    def work():
        a = mx.nd.ones((1000, 100))
        return mx.nd.sum(a + a)  # two arrays at a time, and 1 number

    with counting():
        before = live(CPU)
        result, highest = peak(CPU, work)
        assert result.asscalar() == 200_000
        # The sum may take a few bytes of its own for its shape.
        assert 800_000 <= highest - before < 802_000
        assert live(CPU) - before == 4
        assert peak(CPU, lambda: None)[1] == before + 4


def test_counting_again_begins_anew():
    with counting():
        mx.nd.zeros((10,)).wait_to_read()
    with counting():
        before = live(CPU)
        array = mx.nd.zeros((10,), dtype="float64")
        assert live(CPU) - before == 80
        del array
