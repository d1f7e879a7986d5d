"""Processes that train without waiting for each other: MXNet's dist_async, with the optimizer on the servers.

Each process pushes the gradient of its own part of every batch; a server updates the weights at once and sends them
back. What processes have to agree on before a batch is told `ahead` batches before its turn, so that nobody waits but
for those who are further behind than that (stale synchronous parallel: Ho et al. 2013).
"""

from __future__ import annotations

import logging
import os
import time
from typing import Callable, Dict, List, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from mxtrain.errors import UserError
from mxtrain.optim.optimizer import create
from mxtrain.optim.settings import OptimConfig
from mxtrain.parallel.server import ParameterServer
from mxtrain.parallel.updates import ServerUpdates

_log = logging.getLogger("mxtrain")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02  # seconds between two looks at a sum that is not complete


class Asynchronous(ParameterServer):
    """Sums over processes, of which each waits for all; and what it takes not to wait: see Communicator.tell.

    A KVStore of this kind has no sums of its own; see ServerUpdates for how they are made.
    """

    apart = True
    seconds_between_logs = 10.0

    def __init__(self):
        super().__init__("dist_async")
        self._next_key, self._told = 0, 0
        self._sums: Dict[str, list] = {}  # name -> [key, rounds begun]
        self.send(ServerUpdates(self.size))

    def allreduce(self, arrays: Sequence[List[mx.nd.NDArray]]) -> None:
        """Sums over the contexts of this process only."""
        self._within.allreduce(arrays)

    def total(self, values: np.ndarray) -> np.ndarray:
        flat = values.ravel()
        answers = [self._push(f"total.{stop - start}.{start}", flat[start:stop]) for start, stop in pieces(flat.size)]
        return np.concatenate([flat[:0], *(answer() for answer in answers)]).reshape(values.shape)

    def tell(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        # Of `ahead` + 1 calls at most the answers are not known yet.
        self._told += 1
        return self._push(f"told.{self._uses}.{self._told % (self.ahead + 1)}", values)

    def broadcast(self, arrays: Sequence[mx.nd.NDArray]) -> None:
        for array in arrays:
            # Negative zeros, which change nothing when they are added, also not 0 and -0.
            values = array.asnumpy().astype("float64") if self.rank == 0 else -np.zeros(array.shape)
            array[:] = mx.nd.array(self.total(values), dtype="float64").astype(array.dtype)

    def send(self, updates: ServerUpdates) -> None:
        """Gives the servers another updater. All processes call it; no sum may be incomplete."""
        if self.rank == 0:
            self._store.set_optimizer(updates)
        self._store._barrier()

    def keep(self, arrays: Sequence[mx.nd.NDArray]) -> int:
        """Puts arrays, which are the same in all processes, on the servers -> the key of the first; those of the others
        follow. All processes call it."""
        first = self._next_key
        self._next_key += len(arrays)
        self._store.init(list(range(first, self._next_key)), list(arrays))
        return first

    def exchange(self, first: int, arrays: List[mx.nd.NDArray]) -> None:
        """Pushes arrays, whose keys begin with `first`, and replaces them by what the servers then have; waits."""
        self._store.pushpull(list(range(first, first + len(arrays))), arrays, out=arrays)
        _wait(arrays)

    def pull(self, first: int, arrays: List[mx.nd.NDArray]) -> None:
        """Replaces arrays, whose keys begin with `first`, by what the servers have; waits for it."""
        self._store.pull(list(range(first, first + len(arrays))), out=arrays)
        _wait(arrays)

    def _push(self, name: str, values: np.ndarray) -> Callable[[], np.ndarray]:
        """Pushes this process's numbers -> what waits for those of all and gives the sum; to be called before the next
        numbers of this name."""
        array = mx.nd.array(np.append(0.0, values), dtype="float64")
        if name not in self._sums:
            self._sums[name] = [self.keep([mx.nd.zeros_like(array)]), 0]
        self._sums[name][1] += 1
        key, rounds = self._sums[name]
        self._store.pushpull(key, array, out=array)

        def answer() -> np.ndarray:
            pause = _FIRST_PAUSE
            while array[0].asscalar() < rounds:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                self._store.pull(key, out=array)
            return array.asnumpy()[1:]

        return answer


class OnServers:
    """The interface of optim.optimizer.Optimizer, for weights and an optimizer that are on the servers.

    parameters: trainable, by name. statistics: running statistics, which every process has its own of; they become
    the mean over processes, by their updates, when processes have waited for each other. gradients: of the parameters,
    on the first context, summed over all.
    """

    def __init__(self, config: OptimConfig, parameters: Dict[str, Parameter], statistics: Sequence[Parameter],
                 contexts: Sequence[mx.Context], gradients: Sequence[mx.nd.NDArray], communicator: Asynchronous):
        self._communicator, self._statistics, self._contexts = communicator, list(statistics), list(contexts)
        self._gradients = list(gradients)
        self._parameters = list(parameters.values())
        self._pieces = [(parameter, start, stop) for parameter in self._parameters
                        for start, stop in pieces(int(np.prod(parameter.shape)))]
        if config.optimizer == "lamb" and len(self._pieces) > len(self._parameters):
            raise UserError("--optimizer lamb: needs norms of whole parameters, and --kvstore dist_async sends those "
                            f"of more than {largest_piece():,} elements in pieces; take another optimizer")
        # Multipliers are known by the number of a piece, as if it were a parameter.
        self._optimizer = create(config, [piece[0] for piece in self._pieces])
        self._buffers = [mx.nd.zeros((stop - start + 1,), ctx=contexts[0]) for _, start, stop in self._pieces]
        self._first, self._updates = None, 0
        _log.info("dist_async: servers update at every push, so that the result depends on timing; a gradient may come "
                  "from weights that lack up to %d updates of other processes; optimizer states are not saved",
                  missing_updates(communicator.ahead, communicator.size))

    def begin(self) -> None:
        """Puts weights and optimizer on the servers."""
        self._fill([parameter.data(self._contexts[0]) for parameter in self._parameters], 1.0, 0.0)
        _wait(self._buffers)
        self._first = self._communicator.keep(self._buffers)
        self._communicator.send(ServerUpdates(self._communicator.size, self._first, self._optimizer))

    def update(self, update: int, lr: float, scale: float) -> None:
        """One step at rate lr along scale * gradient, on the servers; then every context has the new weights."""
        self._fill(self._gradients, scale, lr)
        self._communicator.exchange(self._first, self._buffers)
        self._updates += 1
        self._spread()

    def gather(self) -> None:
        """Gives all processes the weights with all updates, and the same running statistics. All processes call it."""
        if self._first is None:
            return
        mx.nd.waitall()
        self._communicator.barrier()  # nobody is about to push
        self._communicator.pull(self._first, self._buffers)
        self._spread()
        self._average()  # nobody goes on before all have come here

    def state_arrays(self, assemble: Callable) -> Dict[str, np.ndarray]:
        """Nothing: MXNet's servers do not hand out their states."""
        return {}

    def load_state_arrays(self, arrays: Dict[str, np.ndarray]) -> None:
        """States begin anew."""
        if _has_states(self._optimizer):
            _log.warning("--kvstore dist_async: optimizer states (momentum and the like) are not kept, they begin anew")

    def _fill(self, arrays: Sequence[mx.nd.NDArray], scale: float, last: float) -> None:
        """Writes scale * arrays, piece by piece, to the buffers, with one more element."""
        flat = {id(p): (scale * array).reshape((-1,)) for p, array in zip(self._parameters, arrays)}
        last = mx.nd.full((1,), last, ctx=self._contexts[0])
        for (parameter, start, stop), buffer in zip(self._pieces, self._buffers):
            mx.nd.concat(flat[id(parameter)][start:stop], last, dim=0, out=buffer)

    def _spread(self) -> None:
        """Writes the buffers to the weights of all contexts."""
        parts: Dict[int, list] = {}
        for (parameter, *_), buffer in zip(self._pieces, self._buffers):
            parts.setdefault(id(parameter), []).append(buffer[:-1])
        for parameter in self._parameters:
            own = parts[id(parameter)]
            whole = own[0] if len(own) == 1 else mx.nd.concat(*own, dim=0)
            for ctx in self._contexts:
                whole.reshape(parameter.shape).copyto(parameter.data(ctx))

    def _average(self) -> None:
        arrays = [parameter.data(self._contexts[0]).asnumpy() for parameter in self._statistics]
        own = np.concatenate([np.ones(1), *(array.astype("float64").ravel() for array in arrays)])
        updates, *values = np.split(self._communicator.total(self._updates * own),
                                    np.cumsum([1, *(array.size for array in arrays)])[:-1])
        self._updates = 0
        if updates:
            for parameter, array, total in zip(self._statistics, arrays, values):
                parameter.set_data(mx.nd.array((total / updates).reshape(array.shape), dtype=array.dtype))


def missing_updates(ahead: int, workers: int) -> int:
    """How many updates of others the weights can lack, at most, that a gradient comes from when it is pushed.

    A worker pulls after its batch v - 1, when all have told of batch v - 1 and so pushed v - 2 - ahead; when it pushes
    batch v, it has told of batch v + ahead, so that another may have pushed up to this one.
    """
    return 2 * (ahead + 1) * (workers - 1)


def largest_piece() -> int:
    """Elements of a vector that MXNet, with one more, keeps on one server; from this bound on it is spread over all."""
    return int(os.environ.get("MXNET_KVSTORE_BIGARRAY_BOUND", 1_000_000)) - 2


def pieces(size: int) -> List[tuple]:
    """Start and end of the pieces that a vector is sent in."""
    step = largest_piece()
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def _has_states(optimizer: mx.optimizer.Optimizer) -> bool:
    return optimizer.create_state(0, mx.nd.zeros((1,))) is not None


def _wait(arrays: Sequence[mx.nd.NDArray]) -> None:
    for array in arrays:
        array.wait_to_read()
