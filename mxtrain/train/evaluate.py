"""Evaluation over all samples of a loader."""

from __future__ import annotations

from collections import deque
from typing import Callable, Iterable, Sequence

import numpy as np

from mxtrain.train.metrics import IN_FLIGHT, Totals


def evaluate(layout, batches: Iterable[Sequence], names: Sequence[str], see: Callable = None) -> Totals:
    """Totals of the evaluation head's columns `names` over some batches (*inputs, label).

    see: called for each batch with (labels, values (rows, number of columns)), also columns without a name.
    """
    totals, pending = Totals(names), deque()

    def read():
        label, outputs = pending.popleft()
        values = np.concatenate([output.asnumpy() for output in outputs])
        totals.add(values[:, :len(totals.names)])
        if see is not None:
            see(label, values)

    for batch in batches:
        pending.append((batch[-1], layout.evaluate(batch)))
        if len(pending) > IN_FLIGHT:
            read()
    while pending:
        read()
    return totals
