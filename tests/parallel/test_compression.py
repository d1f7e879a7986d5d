"""2-bit gradients against the same arithmetic in numpy."""

import itertools

import mxnet as mx
import numpy as np
import pytest

from mxtrain.errors import UserError
from mxtrain.parallel import compression
from mxtrain.parallel.communicator import AmongProcesses
from mxtrain.parallel.compression import Half, TwoBits, compression_for, digits
from mxtrain.parallel.settings import ParallelConfig

SHAPES = {"a": (7,), "b": (3, 1, 5), "c": (1,), "d": (4, 2)}  # 31 elements, which no number of digits divides


@pytest.fixture
def small_groups(monkeypatch):
    """The first of two groups holds a and b."""
    monkeypatch.setattr(compression, "_GROUP", 20)


def quantized(gradient, residual, threshold):
    """(codes, new residual), as ParallelConfig.compression and the module say."""
    residual = residual + gradient
    codes = (residual >= threshold).astype("float32") - (residual <= -threshold)
    return codes, residual - np.float32(threshold) * codes


def ndarrays(values):
    return [mx.nd.array(value) for value in values]


def ours(processes, threshold):
    gradients = {name: mx.nd.zeros(shape) for name, shape in SHAPES.items()}
    return [TwoBits(gradients, processes, threshold) for _ in range(processes)]


def summed(processes):
    """Adds what all have packed, one after the other, as a transport does."""
    return [sum(arrays[1:], arrays[0].copy()) for arrays in zip(*processes)]


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("threshold", [0.5, 0.1])
def test_sums_over_processes_and_updates(small_groups, processes, threshold):
    """Bit for bit: both round in the same places. Gradients of whole tenths and halves often meet the threshold."""
    random, all_ours = np.random.RandomState(processes), ours(processes, threshold)
    expected_residuals = [[np.zeros(shape, "float32") for shape in SHAPES.values()] for _ in range(processes)]
    for _ in range(5):
        gradients = [[(threshold * random.randint(-4, 5, shape) * random.choice([0.5, 1, 0.3])).astype("float32")
                      for shape in SHAPES.values()] for _ in range(processes)]
        expected = [np.zeros(shape, "float32") for shape in SHAPES.values()]
        for kept, own in zip(expected_residuals, gradients):
            for number, gradient in enumerate(own):
                codes, kept[number] = quantized(gradient, kept[number], threshold)
                expected[number] += codes
        sums = summed([one.pack(ndarrays(own)) for one, own in zip(all_ours, gradients)])
        result = [mx.nd.full(shape, np.nan) for shape in SHAPES.values()]
        all_ours[0].unpack(sums, result)
        for total, codes in zip(result, expected):
            np.testing.assert_array_equal(total.asnumpy(), np.float32(threshold) * codes)
    assert len(sums) == 2
    for one, kept in zip(all_ours, expected_residuals):
        assert [name for group in one.groups for name in group.parts] == list(SHAPES)
        for part, expected in zip((part for group in one.groups for part in group.parts.values()), kept):
            np.testing.assert_array_equal(part.asnumpy(), expected)


def test_what_meets_the_threshold_is_sent():
    (one,) = ours(1, 0.5)
    just_below = np.nextafter(np.float32(0.5), np.float32(0))
    gradients = ndarrays([[0.5, -0.5, just_below, -just_below, 0, 1.75, -7], *map(np.zeros, list(SHAPES.values())[1:])])
    result = ndarrays(map(np.ones, SHAPES.values()))
    rest = 2 * just_below - 0.5
    for sent, kept in (([1, -1, 0, 0, 0, 1, -1], [0, 0, just_below, -just_below, 0, 1.25, -6.5]),
                       ([1, -1, 1, -1, 0, 1, -1], [0, 0, rest, -rest, 0, 2.5, -13])):
        one.unpack(one.pack(gradients), result)
        np.testing.assert_array_equal(result[0].asnumpy(), 0.5 * np.array(sent))
        np.testing.assert_array_equal(one.groups[0].parts["a"].asnumpy(), np.array(kept, "float32"))


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 5, 8, 64, 2047])
def test_every_sum_of_codes_comes_back(processes):
    """Also where all digits are at an end: numbers are then largest, and quotients nearest to one half."""
    base, count = 2 * processes + 1, digits(processes)
    assert base**count <= 2**24 < base ** (count + 1)
    ends = np.array(list(itertools.islice(itertools.product([processes, -processes], repeat=count), 2**15)))
    mixed = np.random.RandomState(0).randint(-processes, processes + 1, (5000, count))
    codes = np.concatenate([ends, mixed]).T
    numbers = (codes * base ** np.arange(count)[:, None]).sum(axis=0)
    assert abs(numbers).max() == (base**count - 1) // 2
    one = TwoBits({"w": mx.nd.zeros(codes.shape)}, processes, 0.25)
    result = mx.nd.zeros(codes.shape)
    one.unpack([mx.nd.array(numbers[None])], [result])
    np.testing.assert_array_equal(result.asnumpy(), 0.25 * codes)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_all(value):
    first, second = ours(2, 0.5)
    bad = [np.full(shape, 0.1) for shape in SHAPES.values()]
    bad[2][0] = value
    sums = summed([first.pack(ndarrays(map(np.zeros, SHAPES.values()))), second.pack(ndarrays(bad))])
    result = ndarrays(map(np.zeros, SHAPES.values()))
    first.unpack(sums, result)
    assert all(np.isnan(array.asnumpy()).all() for array in result)


def test_half():
    values = [np.array([1 + 2.0**-10, 1 + 2.0**-11, -3]), np.zeros((2, 2))]
    arrays, one = ndarrays(values), Half(2)
    packed = one.pack(arrays)
    assert [array.dtype for array in packed] == [np.float16] * 2
    one.unpack([2 * array for array in packed], arrays)
    assert arrays[0].dtype == np.float32
    assert arrays[0].asnumpy().tolist() == [2 + 2.0**-9, 2, -6] and not arrays[1].asnumpy().any()


def test_which_compression():
    gradients = {"w": mx.nd.zeros((3,))}
    assert compression_for(ParallelConfig(), gradients, 2) is None
    assert compression_for(ParallelConfig(compression="2bit"), gradients, 1) is None
    assert compression_for(ParallelConfig(compression="2bit"), {}, 2) is None  # all is frozen
    assert compression_for(ParallelConfig(compression="fp16"), gradients, 2).count == 1
    assert compression_for(ParallelConfig(compression="2bit"), gradients, 2).threshold == 0.5
    assert compression_for(ParallelConfig(compression="2bit", compression_threshold=3), gradients, 2).threshold == 3
    with pytest.raises(UserError, match="--compression 2bit: saves nothing among 2048 processes"):
        compression_for(ParallelConfig(compression="2bit"), gradients, 2048)


class Twins(AmongProcesses):
    """Two processes that have the same; this is one of them."""

    size = 2

    def _add(self, arrays):
        for array in arrays:
            array *= 2


@pytest.mark.parametrize("kind, sums", [("none", [1.5, -3, 0.125]), ("fp16", [1.5, -3, 0.125]), ("2bit", [1, -1, 0])])
def test_contexts_add_first_and_statistics_are_sent_whole(kind, sums):
    """Two contexts of two processes; the second array is no gradient, and has more digits than float16."""
    contexts, statistic = [mx.cpu(0), mx.cpu(1)], 1 + 2.0**-20
    communicator = Twins()
    communicator.use(contexts)
    gradients = [mx.nd.array(values, ctx=ctx) for values, ctx in zip(([0.5, -1, 0.0625], [0.25, -0.5, 0]), contexts)]
    statistics = [mx.nd.array([value], ctx=ctx) for value, ctx in zip((statistic, 1), contexts)]
    communicator.compression = compression_for(ParallelConfig(compression=kind), {"w": gradients[0]}, 2)
    communicator.allreduce([gradients, statistics])
    assert [copy.asnumpy().tolist() for copy in gradients] == [sums] * 2
    assert [copy.asscalar() for copy in statistics] == [2 * (statistic + 1)] * 2
