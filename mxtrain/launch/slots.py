"""Which places for workers a start uses. Pure functions."""

from __future__ import annotations

from typing import Collection, List, NamedTuple

from mxtrain.launch.hosts import Slot


class Place(NamedTuple):
    """A worker's numbers, as Horovod defines them."""

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    """Number of this host among those that have a worker of this local rank."""
    cross_size: int


def choose(slots: List[Slot], workers: int, least: int, failed: Collection[Slot],
           silent: Collection[str]) -> List[Slot]:
    """The places of the next start, at most `workers`, in their order; fewer than `least` if hosts are lacking.

    failed: those that failed in the last start. They are left out while `least` others remain.
    silent: hosts that do not answer.
    """
    answering = [slot for slot in slots if slot.host not in silent]
    sound = [slot for slot in answering if slot not in failed]
    if len(sound) < least:
        lacking = least - len(sound)
        again = [slot for slot in answering if slot in failed][:lacking]
        sound = [slot for slot in answering if slot in sound or slot in again]
    return sound[:workers]


def places(slots: List[Slot]) -> List[Place]:
    """The numbers of each worker; ranks follow the order of the places."""
    hosts = list(dict.fromkeys(slot.host for slot in slots))
    count = {host: sum(slot.host == host for slot in slots) for host in hosts}
    result: List[Place] = []
    for slot in slots:
        local_rank = sum(place.host == slot.host for place in result)
        peers = [host for host in hosts if count[host] > local_rank]
        result.append(Place(slot.host, len(result), len(slots), local_rank, count[slot.host],
                            peers.index(slot.host), len(peers)))
    return result
