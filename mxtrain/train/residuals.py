"""The residuals of 2-bit gradients in a checkpoint: what processes have not sent yet of their gradients."""

from __future__ import annotations

import logging
from typing import Dict

import numpy as np

from mxtrain.parallel.compression import TwoBits
from mxtrain.parallel.gradients import views

_log = logging.getLogger("mxtrain")


def gather(communicator) -> Dict[str, np.ndarray]:
    """In rank 0 the residuals of all processes, "<rank>/<parameter>" -> array; elsewhere nothing.

    All processes call it at the same time.
    """
    compression, found = communicator.compression, {}
    if not isinstance(compression, TwoBits):
        return found
    first = communicator.rank == 0
    if first and compression.sends_nothing():
        _log.warning("--compression-threshold %g: no gradient has reached it yet, and nothing was learnt",
                     compression.threshold)
    for rank in range(communicator.size):  # one after the other, so that only rank 0 has to hold those of all
        for group in compression.groups:
            mine = communicator.rank == rank
            own = group.residual.asnumpy().ravel() if mine else np.zeros(group.residual.size, "float32")
            vector = communicator.told(rank, own, group.residual.size)
            if first:
                parts = group.parts
                found.update({f"{rank}/{name}": part for name, part in zip(parts, views(vector, parts.values()))})
    return found


def scatter(communicator, saved: Dict[str, np.ndarray]) -> None:
    """Gives the processes back what `gather` has returned, of which only rank 0 has to know. All call it together.

    As many processes as there were get their own. Of another number rank 0 gets the sum, so that nothing of the
    gradient is lost; the log says so, and also where residuals are no longer wanted.
    """
    compression, size, first = communicator.compression, communicator.size, communicator.rank == 0
    before = communicator.share(len({name.split("/")[0] for name in saved}))
    if not before:
        return
    if not isinstance(compression, TwoBits):
        if first:
            _log.info("the residuals of --compression 2bit, what was not sent yet of the gradients, are dropped")
        return
    if before == size:
        sources = {rank: [rank] for rank in range(size)}
    else:
        sources = {0: range(before)}
        if first:
            _log.info("the residuals of --compression 2bit in %d processes are added up in rank 0 of %d", before, size)
    for rank, ranks in sources.items():
        for group in compression.groups:
            vector = np.zeros(group.residual.size)
            if first:
                for name, part in zip(group.parts, views(vector, group.parts.values())):
                    for old in ranks:
                        part += saved[f"{old}/{name}"]
            vector = communicator.told(0, vector, group.residual.size) if rank else vector
            if communicator.rank == rank:
                group.residual[:] = vector.reshape(group.residual.shape)
