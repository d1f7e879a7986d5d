"""Evaluation over all samples of a loader."""

from __future__ import annotations

from collections import deque
from typing import Callable, Iterable, Sequence

import numpy as np

from mxtrain.errors import UserError
from mxtrain.parallel.communicator import ALONE
from mxtrain.train.metrics import IN_FLIGHT, Part, Totals, whole

_BATCHES_AT_ONCE = 256  # whose values the processes exchange


def evaluate(layout, batches: Iterable[Sequence], names: Sequence[str], see: Callable = None,
             timing: Callable = None, communicator=ALONE) -> Totals:
    """Totals of the evaluation head's columns `names` over some batches (*inputs, label).

    see: called for each batch with (labels, values (rows, number of columns)), also columns without a name.
    timing: given the batches and what tells the arrays computed last, returns the batches (train.waiting.timed).
    communicator: of the processes that evaluate together, each its part of every batch.
    Raises UserError when there are samples but none could be read.
    """
    totals, pending, parts = Totals(names), deque(), []

    def read():
        label, outputs, size, positions = pending.popleft()
        values = np.concatenate([output.asnumpy() for output in outputs]) if outputs else None
        parts.append(Part(size, positions, values if label is None or values is None else
                          np.column_stack([values, label])))

    def count():
        for values in whole(parts, communicator):
            totals.add(values[:, :len(totals.names)])
            if see is not None:
                see(values[:, -1].astype(np.int64), values[:, :-1])
        parts.clear()

    if timing is not None:
        batches = timing(batches, lambda: pending[-1][1] if pending else [])
    for number, batch in enumerate(batches, 1):
        totals.skipped += layout.bad_of(batch)
        size, positions, here = layout.place_of(batch)
        pending.append((None if see is None else batch[-1][here], layout.evaluate(batch), size, positions))
        if len(pending) > IN_FLIGHT:
            read()
        if number % _BATCHES_AT_ONCE == 0:
            count()
    while pending:
        read()
    count()
    totals.skipped = int(communicator.total(np.array([float(totals.skipped)]))[0])
    if totals.skipped and not totals.samples:
        raise communicator.once(UserError(f"none of the {totals.skipped} samples to evaluate on can be read"))
    return totals
