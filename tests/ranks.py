"""Processes of a training that are threads of one, for tests of what they say to each other."""

import threading

from mxtrain.parallel.communicator import Communicator


class Threaded(Communicator):
    """Sums by a barrier and a list."""

    def __init__(self, rank, given, barrier):
        self.rank, self.size, self._given, self._barrier = rank, len(given), given, barrier

    def total(self, values):
        self._given[self.rank] = values
        self._barrier.wait(10)
        total = sum(self._given[1:], self._given[0])  # no 0, which is not -0
        self._barrier.wait(10)
        return total


def among(count, function):
    """What function(communicator) returns or raises for each of some ranks that talk to each other."""
    given, barrier, results = [None] * count, threading.Barrier(count), [None] * count

    def run(rank):
        try:
            results[rank] = function(Threaded(rank, given, barrier))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
