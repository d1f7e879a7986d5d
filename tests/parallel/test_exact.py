"""The exact sum: no order, no grouping and no way to compute it changes a bit, and it is as near as it must be."""

import math
from fractions import Fraction

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.parallel import exact
from mxtrain.parallel.exact import ExactSum, FloatSum, NotSummable, join, limit, split

CPU = mx.cpu(0)
QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def float32(mantissa, exponent):
    """A float32 of any magnitude: mantissa is a signed 24-bit integer."""
    return float(np.float32(math.ldexp(mantissa, exponent)))


# Magnitudes from the smallest float32, 2**-149, to just below 2**25, so that 256 of them may be added.
anything = st.builds(float32, st.integers(-(2**24) + 1, 2**24 - 1), st.integers(-149, 1))
# Close to the two places at which a number is cut.
residuals = st.builds(float32, st.integers(-(2**10), 2**10), st.integers(-72, -56) | st.integers(-28, -16))
numbers = st.lists(anything | residuals, min_size=1, max_size=40)


def add_up(values, on_cpu=True):
    """The parts and the total of some numbers that are added one by one."""
    total = ExactSum(1, CPU, len(values))
    total.on_cpu = on_cpu
    for value in values:
        total.add(0, mx.nd.array([value]))
    return total, float(total.finish().asscalar())


def parts(sums):
    return [float(part.asscalar()) for part in sums.parts]


def check_against_fsum(values, got):
    """Asserts that a float32 is as near to the sum of some numbers as DESIGN says."""
    true = sum(map(Fraction, values))
    assert abs(Fraction(math.fsum(values)) - true) <= abs(true) * Fraction(1, 2**53)  # fsum is the reference
    unit = Fraction(float(np.spacing(np.float32(abs(float(true))))))
    error = abs(Fraction(got) - true)
    # Cutting costs at most 2**-65 a number, and the float32 at the end half a unit. Above V * 2**-40 the first
    # is below half a unit too: together one unit, as DESIGN says.
    assert error <= len(values) * Fraction(1, 2**65) + unit / 2
    if abs(true) >= len(values) * Fraction(1, 2**40):
        assert error <= unit


@QUICK
@given(numbers, st.randoms(use_true_random=False))
def test_order_does_not_matter(values, random):
    expected, total = add_up(values)
    shuffled = random.sample(values, len(values))
    other, other_total = add_up(shuffled)
    assert parts(other) == parts(expected)
    assert other_total == total


@QUICK
@given(numbers, st.integers(2, 5), st.randoms(use_true_random=False))
def test_grouping_does_not_matter(values, groups, random):
    _, total = add_up(values)
    dealt = [[] for _ in range(groups)]
    for value in values:
        random.choice(dealt).append(value)
    sums = []
    for own in dealt:
        part = ExactSum(1, CPU, len(values))
        for value in own:
            part.add(0, mx.nd.array([value]))
        sums.append(part)
    random.shuffle(sums)
    for other in sums[1:]:
        for into, part in zip(sums[0].parts, other.parts):
            into += part
    assert float(sums[0].finish().asscalar()) == total


@QUICK
@given(numbers)
def test_is_near_the_true_sum(values):
    check_against_fsum(values, add_up(values)[1])


@QUICK
@given(numbers)
def test_all_ways_to_compute_it_agree(values):
    blocks, total = add_up(values)
    generic, generic_total = add_up(values, on_cpu=False)  # what runs on a GPU
    plain = [split(np.array([value], "float32")) for value in values]
    high, low = (math.fsum(float(pair[k][0]) for pair in plain) for k in range(2))
    assert parts(blocks) == parts(generic) == [high, low]
    assert total == generic_total == join(np.array([high]), np.array([low]))[0]


@QUICK
@given(anything | residuals)
def test_parts_are_whole_multiples_and_lose_little(value):
    high, low = (float(part[0]) for part in split(np.array([value], "float32")))
    assert (high * 2**20).is_integer() and abs(low) <= 2**-21 and (low * 2.0**64).is_integer()
    assert abs(Fraction(high) + Fraction(low) - Fraction(value)) <= Fraction(1, 2**65)


# Each residual is half of the last digit that is kept, and rounded the same way: the errors all add up.
WORST = {
    "1024 equal residuals": [2.0**-65] * 1024,
    "1024 equal residuals, rounded down": [float32(2 * 2**22 + 1, -65)] * 1024,
    "1024 equal residuals, rounded up": [float32(2 * (2**22 + 1) + 1, -65)] * 1024,
    "1023 equal residuals": [float32(2 * 8388606 + 1, -65)] * 1023,
    "1024 equal residuals of the high part": [float32(2**24 - 1, -44)] * 1024,
    "1024 smallest numbers": [2.0**-149] * 1024,
    "all cancel": [x for k in range(-149, 22) for x in (2.0**k, -(2.0**k))],
    "large ones cancel": [float32(2**24 - 1, -1), 2.0**-50, -float32(2**24 - 1, -1)] + [2.0**-64] * 5,
    "just below the limit": [float32(2**24 - 1, -1)] * 1024,
    "just below the limit and small": [float32(2**24 - 1, -1)] * 1000 + [2.0**-20] * 24,
    "just below the limit, cancelling": [float32(2**24 - 1, -1), -float32(2**24 - 1, -1)] * 500 + [2.0**-64] * 24,
}


@pytest.mark.parametrize("name", WORST)
def test_worst_cases(name):
    values = WORST[name]
    orders = [values, sorted(values), sorted(values, reverse=True), sorted(values, key=abs),
              np.random.RandomState(0).permutation(values)]
    sums = ExactSum(len(orders), CPU, len(values))
    for column in np.array(orders, "float32").T:
        sums.add(0, mx.nd.array(column))
    totals = sums.finish().asnumpy()
    for array in [totals, *(part.asnumpy() for part in sums.parts)]:
        np.testing.assert_array_equal(array, array[0])
    check_against_fsum(values, float(totals[0]))


def test_cancellation_is_complete():
    values = [3.0e6, 2.0**-63, -3.0e6, 2.0**-62]
    assert add_up(values)[1] == 2.0**-63 + 2.0**-62  # float32 addition gives 2**-62, or 0


def test_the_limit_keeps_every_partial_sum_exact():
    # Five numbers below 2**31 pass 2**33, where a float64 has no digit for 2**-20: they are not taken.
    assert limit(1) == limit(4) == 2.0**31
    assert limit(8) == 2.0**30 and limit(1024) == 2.0**23
    assert all(count * limit(count) <= 2.0**33 for count in range(1, 1025))


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("count, bound", [(1, 2.0**31), (8, 2.0**30), (1024, 2.0**23)])
def test_numbers_just_below_the_limit_are_taken(on_cpu, count, bound):
    total = ExactSum(3, CPU, count)
    total.on_cpu = on_cpu
    largest = np.nextafter(np.float32(bound), np.float32(0))
    total.add(0, mx.nd.array([largest, -largest, 1]))
    np.testing.assert_array_equal(total.finish().asnumpy(), [largest, -largest, 1])


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("place", [0, 1, 40000])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**31, -(2.0**31), 3e38])
def test_refuses_what_cannot_be_added(on_cpu, place, value):
    total = ExactSum(40001, CPU, 2)
    total.on_cpu = on_cpu
    bad = np.ones(40001, "float32")
    bad[place] = value
    with pytest.raises(NotSummable):
        total.add(0, mx.nd.array(bad))
        total.add(0, mx.nd.array(-bad))  # infinities and large numbers that cancel are no excuse
        total.finish()
    total.clear()
    total.add(0, mx.nd.ones((40001,)))
    np.testing.assert_array_equal(total.finish().asnumpy(), np.ones(40001))


@pytest.mark.parametrize("size", [1, exact._BLOCK - 1, exact._BLOCK, exact._BLOCK + 1, 2 * exact._BLOCK + 5])
def test_long_vectors_are_added_in_blocks_without_a_seam(size):
    generator = np.random.RandomState(size)
    vectors = [(generator.randn(size) * 2.0 ** generator.randint(-60, 20, size)).astype("float32") for _ in range(3)]
    blocks, generic = ExactSum(size, CPU, 3), ExactSum(size, CPU, 3)
    generic.on_cpu = False
    for vector in vectors:
        blocks.add(0, mx.nd.array(vector))
        generic.add(0, mx.nd.array(vector))
    high, low = (sum(pair) for pair in zip(*map(split, vectors)))
    for sums in (blocks, generic):
        np.testing.assert_array_equal(sums.finish().asnumpy(), join(high, low))
        np.testing.assert_array_equal(sums.parts[0].asnumpy(), high)
        np.testing.assert_array_equal(sums.parts[1].asnumpy(), low)


@pytest.mark.parametrize("make", [
    lambda: ExactSum(7, CPU, 8), lambda: ExactSum(7, mx.cpu(1), 8), lambda: FloatSum(7, CPU),
    lambda: FloatSum(7, mx.cpu(1)),
])
def test_ranges_are_added_at_their_place_and_cleared(make):
    sums = make()
    ctx = sums.total.context
    for _ in range(2):
        sums.clear()
        sums.add(0, mx.nd.array([1, 2, 3], ctx=ctx))
        sums.add(3, mx.nd.array([4, 5, 6, 7], ctx=ctx))
        sums.add(2, mx.nd.array([10, 20], ctx=ctx))
        np.testing.assert_array_equal(sums.finish().asnumpy(), [1, 2, 13, 24, 5, 6, 7])


@pytest.mark.parametrize("on_cpu", [True, False])
def test_views_of_the_total_follow_it(on_cpu):
    # The layout hands out the gradients as such views.
    sums = ExactSum(6, CPU)
    sums.on_cpu = on_cpu
    view = sums.total[2:6].reshape((2, 2))
    for round_ in (1, 2):
        sums.clear()
        sums.add(0, mx.nd.arange(6) * round_)
        sums.finish()
        np.testing.assert_array_equal(view.asnumpy(), np.arange(2, 6).reshape(2, 2) * round_)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_memory_is_the_array_itself(dtype):
    array = mx.nd.arange(12, dtype=dtype).reshape((3, 4))
    view = exact.memory(array)
    np.testing.assert_array_equal(view, np.arange(12))
    view[5] = -1
    assert array.asnumpy()[1, 1] == -1


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("ranges", [[0], [3], [0, 3], [3, 0]])
def test_what_one_cannot_add_no_one_can_sum(on_cpu, ranges):
    """Two processes: the parts of one that was given an infinity, in whichever of its ranges, spoil those of both."""
    sums = [ExactSum(6, CPU, 2) for _ in range(2)]
    for number, each in enumerate(sums):
        each.on_cpu = on_cpu
        for place, start in enumerate(ranges):
            each.add(start, mx.nd.array([1, np.inf if number == 1 and place == 0 else 2, 3]))
    for one, other in zip(*(each.parts for each in sums)):
        one += other
        one.copyto(other)
    for each in sums:
        with pytest.raises(NotSummable):
            each.finish()
        each.clear()
        each.add(0, mx.nd.ones((6,)))
        np.testing.assert_array_equal(each.finish().asnumpy(), np.ones(6))
