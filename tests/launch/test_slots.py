"""Which places a start uses, and the numbers of its workers: by hand, on small cases."""

from mxtrain.launch.hosts import Slot
from mxtrain.launch.slots import choose, places

A0, A1, B0, C0 = Slot("a", 0), Slot("a", 1), Slot("b", 0), Slot("c", 0)
ALL = [A0, A1, B0, C0]


def test_ranks_follow_the_places_and_cross_ranks_count_hosts():
    found = [tuple(place) for place in places([A0, A1, B0])]
    #         host rank size local of cross of
    assert found == [("a", 0, 3, 0, 2, 0, 2), ("a", 1, 3, 1, 2, 0, 1), ("b", 2, 3, 0, 1, 1, 2)]


def test_a_failed_place_is_left_out_while_enough_remain():
    assert choose(ALL[:3], 3, 1, {A1}, []) == [A0, B0]
    assert choose(ALL[:3], 3, 2, {A1}, []) == [A0, B0]


def test_a_failed_place_is_used_again_when_it_is_needed():
    assert choose(ALL[:3], 3, 3, {A1}, []) == [A0, A1, B0]
    assert choose([A0], 1, 1, {A0}, []) == [A0]


def test_a_spare_place_stands_in():
    assert choose(ALL, 3, 3, {A1}, []) == [A0, B0, C0]


def test_silent_hosts_are_never_used():
    assert choose(ALL, 4, 1, {B0}, ["a"]) == [C0]
    assert choose(ALL, 4, 3, set(), ["a"]) == [B0, C0]  # too few: the caller says so
