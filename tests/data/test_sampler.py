import math
import tracemalloc

import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxtrain.data.sampler import BatchSampler, BlockPermutation, Permutation
from mxtrain.errors import UserError


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1000, 4096, 99991])
def test_permutation_is_a_bijection(n):
    order = Permutation(n, seed=3, epoch=1)(np.arange(n))
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(n))


def test_permutation_depends_on_seed_and_epoch_only():
    positions = np.arange(500)
    order = Permutation(500, 1, 2)(positions)
    assert np.array_equal(order, Permutation(500, 1, 2)(positions))
    assert np.array_equal(order[100:200], Permutation(500, 1, 2)(positions[100:200]))
    for seed, epoch in ((1, 3), (2, 2), (2, 1), (1 + 2**32, 2)):
        # Two random orders of 500 agree in about one place; ten has a chance below 1e-6.
        assert (Permutation(500, seed, epoch)(positions) == order).sum() < 10


def test_permutation_is_the_same_for_ever():
    # A run must resume with another release of numpy or of this package: these numbers may never change.
    assert Permutation(10, 0, 0)(np.arange(10)).tolist() == [3, 7, 6, 8, 1, 4, 0, 2, 5, 9]
    assert Permutation(10**9, 7, 3)(np.arange(3)).tolist() == [179960439, 64957001, 603414051]


@pytest.mark.parametrize("n", [3, 5, 10, 40])
def test_every_sample_comes_to_every_place_equally_often(n):
    epochs = 3000
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), Permutation(n, 5, epoch)(np.arange(n))] += 1
    expected = epochs / n
    freedom = (n - 1) ** 2
    # Chi-squared of a table with fixed margins: not five standard deviations by chance.
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("n, block, window", [(7, 3, 2), (12, 4, 1), (10, 16, 2), (9, 1, 3), (1, 1, 1), (103, 8, 3)])
def test_a_block_permutation_is_a_bijection_that_any_part_agrees_with(n, block, window):
    whole = BlockPermutation(n, 3, 1, block, window)(np.arange(n))
    assert np.array_equal(np.sort(whole), np.arange(n))
    scattered = np.arange(n)[::-2]
    assert np.array_equal(BlockPermutation(n, 3, 1, block, window)(scattered), whole[scattered])


def test_a_block_permutation_reads_few_places_at_a_time():
    n, block, window = 1000, 16, 4
    order = BlockPermutation(n, 0, 5, block, window)(np.arange(n))
    for start in range(0, n, block * window):
        blocks = set((order[start : start + block * window] // block).tolist())
        assert len(blocks) <= window + 2  # the short last block shifts the others against the windows
    assert len(set(np.diff(order).tolist())) > 100  # mixed within the window all the same


@pytest.mark.parametrize("n, block, window", [(6, 2, 2), (7, 2, 2), (40, 4, 3)])
def test_blocks_bring_every_sample_to_every_place_equally_often(n, block, window):
    epochs = 4000
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), BlockPermutation(n, 5, epoch, block, window)(np.arange(n))] += 1
    expected = epochs / n
    if n % block:  # samples of the short block come with it to fewer places: only their own count is looked at
        assert (counts.sum(axis=0) == epochs).all() and (counts[:, -1] > 0).sum() >= n // block
        return
    freedom = (n - 1) ** 2
    # Samples of a block move together, so the table's cells are not independent: the bound is wider than above.
    assert ((counts - expected) ** 2 / expected).sum() < 2 * freedom


def test_a_billion_samples_cost_nothing():
    order = Permutation(10**9, 0, 0)
    some = order(np.arange(10**9 - 1000, 10**9))
    assert some.min() >= 0 and some.max() < 10**9 and len(set(some.tolist())) == 1000


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_a_sampler_of_a_billion_holds_no_order(shuffle):
    tracemalloc.start()
    sampler = BatchSampler(10**9, 64, seed=0, shuffle=shuffle)
    indices = sampler.indices(3, 10**7)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(indices.tolist())) == 64 and memory < 100_000
    assert np.array_equal(sampler.indices(3, 10**7, 10, 20), indices[10:20])


def test_a_position_outside_is_refused():
    with pytest.raises(IndexError, match="0..9"):
        Permutation(10, 0, 0)(np.array([3, 10]))
    with pytest.raises(IndexError, match="0..9"):
        Permutation(10, 0, 0)(np.array([-1]))


@pytest.mark.parametrize("length, batch_size", [(5, 4), (9, 8), (8, 4), (3, 8), (1, 1), (2, 1)])
@pytest.mark.parametrize("shuffle", ["full", "block", "none"])
def test_an_epoch_has_every_sample_once(length, batch_size, shuffle):
    sampler = BatchSampler(length, batch_size, seed=0, shuffle=shuffle)
    batches = list(sampler)
    assert len(batches) == len(sampler) == math.ceil(length / batch_size)
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert sorted(key for batch in batches for key in batch) == [(0, index) for index in range(length)]
    assert all(type(number) is int for batch in batches for key in batch for number in key)


def test_without_shuffle_the_order_is_the_data_s():
    assert list(BatchSampler(5, 2, seed=9, shuffle="none")) == [[(0, 0), (0, 1)], [(0, 2), (0, 3)], [(0, 4)]]


def test_drop_leaves_the_short_batch_out_and_counts_it():
    sampler = BatchSampler(11, 4, seed=0, last_batch="drop")
    assert [len(batch) for batch in sampler] == [4, 4]
    assert len(sampler) == 2 and sampler.dropped == 3
    assert BatchSampler(12, 4, seed=0, last_batch="drop").dropped == 0


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_starting_in_mid_epoch_gives_the_rest_of_it(start):
    whole = BatchSampler(11, 4, seed=1)
    whole.start_at(6)
    resumed = BatchSampler(11, 4, seed=1)
    resumed.start_at(6, start)
    assert list(resumed) == list(whole)[start:]


def test_plain_iteration_goes_on_to_the_next_epoch():
    sampler = BatchSampler(50, 20, seed=1)
    first, second = list(sampler), list(sampler)
    assert {epoch for batch in second for epoch, _ in batch} == {1}
    assert [index for _, index in first[0]] != [index for _, index in second[0]]


def test_an_iteration_keeps_its_start_when_the_position_moves():
    sampler = BatchSampler(6, 2, seed=1)
    sampler.start_at(4, 1)
    batches = iter(sampler)
    sampler.start_at(0, 0)
    assert [epoch for batch in batches for epoch, _ in batch] == [4, 4, 4, 4]


@pytest.mark.parametrize(
    "arguments, text",
    [
        (dict(length=0, batch_size=4), "no sample"),
        (dict(length=4, batch_size=0), "--batch-size 0"),
        (dict(length=3, batch_size=8, last_batch="drop"), "3 samples at --batch-size 8"),
        (dict(length=3, batch_size=2, last_batch="rollover"), "rollover"),
        (dict(length=3, batch_size=2, shuffle="some"), "--shuffle some: must be one of full, block, none"),
    ],
)
def test_what_cannot_make_batches_is_refused(arguments, text):
    with pytest.raises(UserError, match=text):
        BatchSampler(seed=0, **arguments)


def test_positions_outside_the_epoch_are_refused():
    sampler = BatchSampler(8, 4, seed=0)
    for epoch, batch in ((0, 3), (0, -1), (-1, 0)):
        with pytest.raises(IndexError):
            sampler.start_at(epoch, batch)
    with pytest.raises(IndexError):
        sampler.indices(0, 2)
