"""Schedules of a pipeline, against hand-written lists and formulas."""

import pytest

from mxtrain.parallel.schedule import (SCHEDULES, Instruction, bubble, gpipe, idle_share, most_in_flight,
                                       one_forward_one_backward, timeline)

SIZES = [(stages, micro_batches) for stages in range(1, 7) for micro_batches in range(10)]
each_schedule = pytest.mark.parametrize("name", SCHEDULES)


def written(instructions):
    return " ".join(f"{kind[0]}{m}" for kind, m in instructions)


def read(text):
    return [Instruction({"f": "forward", "b": "backward"}[word[0]], int(word[1:])) for word in text.split()]


def test_order():
    assert [written(stage) for stage in gpipe(2, 3)] == ["f0 f1 f2 b0 b1 b2"] * 2
    assert [written(stage) for stage in one_forward_one_backward(3, 4)] == [
        "f0 f1 f2 b0 f3 b1 b2 b3",
        "f0 f1 b0 f2 b1 f3 b2 b3",
        "f0 b0 f1 b1 f2 b2 f3 b3"]
    # Fewer micro-batches than stages.
    assert [written(stage) for stage in one_forward_one_backward(4, 2)] == [
        "f0 f1 b0 b1", "f0 f1 b0 b1", "f0 f1 b0 b1", "f0 b0 f1 b1"]


@each_schedule
def test_each_micro_batch_goes_forward_and_backward_once_in_order_and_nothing_deadlocks(name):
    for stages, micro_batches in SIZES:
        schedule = SCHEDULES[name](stages, micro_batches)
        assert len(schedule) == stages
        for instructions in schedule:
            for kind in ("forward", "backward"):
                assert [i.micro_batch for i in instructions if i.kind == kind] == list(range(micro_batches))
            assert len(instructions) == 2 * micro_batches
        times = timeline(schedule)
        assert [[span.instruction for span in spans] for spans in times] == schedule


def test_no_more_micro_batches_in_memory_than_promised():
    for stages, micro_batches in SIZES:
        for instructions in gpipe(stages, micro_batches):
            assert most_in_flight(instructions) == micro_batches
        for s, instructions in enumerate(one_forward_one_backward(stages, micro_batches)):
            assert most_in_flight(instructions) == min(stages - s, micro_batches)
    assert most_in_flight(read("f0 f1 b0 f2 f3 b1 b2 b3")) == 3


@each_schedule
def test_instructions_wait_for_what_they_need(name):
    # Whole numbers: the sums are exact.
    forward, backward = [3, 1, 2, 5], [4, 9, 1, 6]
    spans = timeline(SCHEDULES[name](4, 7), forward, backward)
    when = [{span.instruction: span for span in stage} for stage in spans]
    for s in range(4):
        for before, after in zip(spans[s], spans[s][1:]):
            assert before.end <= after.start
        for m in range(7):
            there, back = when[s]["forward", m], when[s]["backward", m]
            assert there.end - there.start == forward[s] and back.end - back.start == backward[s]
            assert there.end <= back.start
            if s:
                assert when[s - 1]["forward", m].end <= there.start
                assert back.end <= when[s - 1]["backward", m].start


def test_times_of_a_small_pipeline():
    first, second = timeline(one_forward_one_backward(2, 2), forward=1, backward=2)
    assert [(start, end) for start, end, _ in first] == [(0, 1), (1, 2), (4, 6), (7, 9)]
    assert [(start, end) for start, end, _ in second] == [(1, 2), (2, 4), (4, 5), (5, 7)]


@pytest.mark.parametrize("stages", [
    ["b0 f0"],  # backward before forward
    ["f0 b0 f1 b1", "f1 b1 f0 b0"],  # the second stage waits for what the first one does only after its backward
    ["f0 b0", "f0"],  # a backward that never comes
])
def test_a_deadlock_is_seen(stages):
    with pytest.raises(RuntimeError, match="deadlock in a schedule: stage 0 at backward 0"):
        timeline([read(text) for text in stages])


@each_schedule
def test_bubble_of_equal_stages(name):
    for stages, micro_batches in SIZES:
        expected = (stages - 1) / (micro_batches + stages - 1) if micro_batches else 0
        # The sum of at most 108 costs that are no whole multiples of a power of two.
        assert bubble(SCHEDULES[name](stages, micro_batches), 0.1, 0.3) == pytest.approx(expected, abs=1e-12)


@each_schedule
def test_bubble_of_unequal_stages(name):
    # The dear stage never waits but at the ends: it is busy for 4 * 6 of 4 * 6 + 3, the other for 4 * 3.
    assert bubble(SCHEDULES[name](2, 4), forward=[1, 2], backward=[2, 4]) == pytest.approx(1 - 36 / (2 * 27))


def test_idle_share():
    assert idle_share([[(10, 12), (13, 14)], [(12, 14)]]) == 1 - 5 / 8
    assert idle_share([]) == idle_share([[]]) == 0
