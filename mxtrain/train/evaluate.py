"""Evaluation over all samples of a loader."""

from __future__ import annotations

from collections import deque
from typing import Callable, Iterable, Sequence

import numpy as np

from mxtrain.errors import UserError
from mxtrain.train.metrics import IN_FLIGHT, Totals


def evaluate(layout, batches: Iterable[Sequence], names: Sequence[str], see: Callable = None,
             timing: Callable = None) -> Totals:
    """Totals of the evaluation head's columns `names` over some batches (*inputs, label).

    see: called for each batch with (labels, values (rows, number of columns)), also columns without a name.
    timing: given the batches and what tells the arrays computed last, returns the batches (train.waiting.timed).
    Raises UserError when there are samples but none could be read.
    """
    totals, pending = Totals(names), deque()

    def read():
        label, outputs = pending.popleft()
        values = np.concatenate([output.asnumpy() for output in outputs])
        totals.add(values[:, :len(totals.names)])
        if see is not None:
            see(label, values)

    if timing is not None:
        batches = timing(batches, lambda: pending[-1][1] if pending else [])
    for batch in batches:
        totals.skipped += len(getattr(batch, "bad", ()))
        if not len(batch[-1]):
            continue
        pending.append((batch[-1], layout.evaluate(batch)))
        if len(pending) > IN_FLIGHT:
            read()
    while pending:
        read()
    if totals.skipped and not totals.samples:
        raise UserError(f"none of the {totals.skipped} samples to evaluate on can be read")
    return totals
