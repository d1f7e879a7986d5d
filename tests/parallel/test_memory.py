import pytest

from mxtrain.parallel.memory import Cost, activations, fewest_groups, group_peak, recorded


def layer(input=1, output=1, kept=None, passing=0, frees=0, inner=0, draws=False):
    return Cost(input, output, output if kept is None else kept, passing, frees, inner, draws)


def test_a_chain_of_layers_that_keep_their_inputs():
    chain = [layer(), layer(), layer()]
    assert recorded(chain) == 3
    # Three outputs; the gradients of the last one and of one between, while a middle layer makes the next.
    assert group_peak(chain, first=True) == 3 + 1 + 2
    assert group_peak(chain) == 3 + 1 + 2 + 1  # and that of the input
    assert group_peak(chain[:1], first=True) == 1 + 1


def test_an_activation_takes_the_place_of_its_input():
    chain = [layer(), layer(frees=1), layer()]
    assert recorded(chain) == 2
    assert recorded(chain[1:]) == 2  # the group's own input stays
    # An activation writes its gradient over the one it got: one of the chain's own at a time.
    assert group_peak(chain, first=True) == 2 + 1 + 1


def test_backward_of_a_layer_with_large_insides():
    assert group_peak([layer(inner=5), layer()], first=True) == 2 + 1 + 5
    assert group_peak([layer(), layer(inner=5)], first=True) == 2 + 1 + 5 + 1


def test_forward_can_be_the_peak():
    assert group_peak([layer(passing=9), layer()], first=True) == 1 + 9


def test_chunks_are_given_up_one_by_one_unless_memory_is_static():
    chain = [layer(inner=4), layer(draws=True)]
    # The second chunk: 2 kept, gradients of its output and input. The first: 1 kept, gradient of its output, 4.
    assert group_peak(chain, first=True) == 1 + 1 + 4
    assert group_peak(chain, first=True, static=True) == 2 + (1 + 1) + (1 + 4)


def test_recomputation_keeps_the_inputs_of_groups():
    chain = [layer(10, 10)] + [layer(10, 1)] + [layer()] * 4
    assert activations(chain, [0]) == activations(chain, [0], recompute=False) == group_peak(chain, first=True)
    # The last group: inputs 10 and 1, and its peak. The one before: 10 and its own. The first has the network's input.
    last, middle, first = chain[3:], chain[1:3], chain[:1]
    expected = [10 + 1 + group_peak(last), 10 + group_peak(middle), group_peak(first, first=True)]
    assert activations(chain, [0, 1, 3]) == max(expected)


def test_micro_batches_that_wait_keep_all_or_only_the_inputs_of_groups():
    chain = [layer()] * 4
    once = activations(chain, [0], first=False)
    assert once == 1 + group_peak(chain)
    assert activations(chain, [0], in_flight=3, recompute=False, first=False) == 2 * (1 + 4) + once
    assert activations(chain, [0, 2], in_flight=3, first=False) == 2 * (1 + 1) + activations(chain, [0, 2], first=False)
    assert activations(chain, [0], in_flight=3, first=False) == 2 * 1 + once


def test_a_larger_budget_needs_fewer_groups():
    chain = [layer(kept=k) for k in (8, 1, 1, 8, 1, 1, 8, 1)]
    found = [fewest_groups(chain, budget) for budget in range(12, 40)]
    assert all(needed <= budget for budget, (_, needed) in zip(range(12, 40), found) if budget >= found[0][1])
    counts = [len(starts) for starts, _ in found]
    assert counts == sorted(counts, reverse=True) and counts[0] > 2 and counts[-1] == 1
    assert found[-1] == ([0], group_peak(chain, first=True))


def test_groups_are_even():
    chain = [layer(kept=k) for k in (8, 1, 1, 8, 1, 1, 8, 1)]
    # With three groups, each has one of the large layers: 10 kept at most, the gradients of the output, of the input and
    # of what is in between (2); the last one has its input and that of the group before, too.
    starts, needed = fewest_groups(chain, 16)
    assert needed <= 16
    assert len(starts) == 3 and 0 < starts[1] <= 3 < starts[2] <= 6


def test_the_least_is_told_where_no_number_of_groups_is_enough():
    chain = [layer(kept=9), layer(kept=9)]
    starts, needed = fewest_groups(chain, 1)
    # The second group is the larger one: its input, what it keeps, and two gradients.
    assert starts == [0, 1] and needed == 1 + 9 + 2
    assert fewest_groups(chain, needed) == fewest_groups(chain, needed - 1) == (starts, needed)


def test_a_later_stage_has_an_input_that_takes_memory():
    chain = [layer(kept=9), layer(kept=9)]
    assert fewest_groups(chain, 1, first=False) == ([0, 1], 1 + 1 + 9 + 2)


@pytest.mark.parametrize("count", (1, 2, 40))
def test_any_number_of_segments(count):
    starts, _ = fewest_groups([layer()] * count, 0)
    assert starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < count
