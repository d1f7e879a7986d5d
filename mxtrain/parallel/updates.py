"""What MXNet's servers do with what workers push in dist_async: update weights, or add up numbers of all workers.

A server knows of an array only its key. MXNet hands pushes to its updater one by one, each at once, and answers a push
with the array as it then is; so a push and its effect are never seen in part.
"""

from __future__ import annotations

from typing import Optional

import mxnet as mx
import numpy as np


class ServerUpdates(mx.optimizer.Optimizer):
    """What is sent to every server, which uses it for all keys.

    workers: how many there are. optimizer: updates the weights, which have the keys from `first` on, in the order of
    its multipliers; all other keys are sums.

    A weight is a vector with one element more, and so is its gradient: the last one is the learning rate, so that a
    rate and its gradient come together. A sum is a float64 vector: element 0 counts the rounds that are complete, the
    others are the sums of the latest one. In a round, each worker pushes once (element 0 is not looked at), and pulls
    until it is complete; only then may it push the next, so that nobody misses a sum.
    """

    def __init__(self, workers: int, first: int = 0, optimizer: Optional[mx.optimizer.Optimizer] = None):
        super().__init__()
        self._workers, self._first, self._optimizer = workers, first, optimizer
        self._count = len(optimizer.lr_mult) if optimizer else 0

    def create_state_multi_precision(self, index, weight):
        if self._is_weight(index):
            return self._optimizer.create_state_multi_precision(index - self._first, weight[:-1])
        return []

    def update_multi_precision(self, index, weight, grad, state):
        if not self._is_weight(index):
            return add(weight, grad, state, self._workers)
        self._optimizer.lr = float(grad[-1].asscalar())
        arguments = index - self._first, weight[:-1], grad[:-1], state
        if self._optimizer.aggregate_num > 1:
            arguments = [[argument] for argument in arguments]
        self._optimizer.update_multi_precision(*arguments)

    def _is_weight(self, index) -> bool:
        return self._first <= index < self._first + self._count


def add(stored: mx.nd.NDArray, pushed: mx.nd.NDArray, waiting: list, workers: int) -> None:
    """Takes one worker's numbers. The last of a round writes their sum, in the order in which they came, to `stored`.

    waiting: what came before in this round (changed).
    """
    waiting.append(pushed.asnumpy())
    if len(waiting) == workers:
        total = waiting[0]  # not zero plus this: the sum of negative zeros is negative
        for values in waiting[1:]:
            total = total + values
        stored[:] = np.concatenate([stored[:1].asnumpy() + 1, total[1:]])
        waiting.clear()
