"""What a training consists of."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Optional, Sequence, Set

from mxtrain.callbacks.base import Callbacks
from mxtrain.callbacks.monitor import Monitor
from mxtrain.train.audit import Audit
from mxtrain.train.metrics import Meter
from mxtrain.train.signals import Signals
from mxtrain.train.state import State


@dataclass
class Run:
    """The parts that the loop puts to work. Data have `batches(epoch, start)`, which yields (*inputs, label)."""

    contexts: list
    parameters: Dict[str, Any]
    """All parameters of the network by their place in it."""
    layout: Any
    audit: Audit
    communicator: Any
    optimizer: Any
    learning_rate: Callable[[int], float]
    """Rate of an update."""
    train_data: Any
    val_data: Optional[Any]
    data_fingerprint: Optional[str]
    epochs: int
    meter: Meter
    evaluation_names: Sequence[str]
    monitor: Monitor
    scores: Optional[Callable] = None
    """Makes what counts the scores of one evaluation, such as tasks.scores.F1; None for none."""
    values: Callable[[dict], dict] = dict
    """Means -> all values that follow from them, such as the perplexity from the loss."""
    told: Callable[[], dict] = dict
    """What else is logged of the updates so far: how a network's experts are used."""
    clip_norm: Optional[float] = None
    callbacks: Callbacks = field(default_factory=lambda: Callbacks([]))
    checkpoints: Optional[Any] = None
    """train.checkpoint.Folder, or None to keep nothing."""
    checkpoint_updates: Optional[int] = None
    checkpoint_minutes: Optional[float] = None
    signals: Signals = field(default_factory=Signals)
    state: State = field(default_factory=State)
    saved_at: float = field(default_factory=time.monotonic)
    reported_at: float = 0.0
    trace_at: Optional[int] = None
    """After so many updates the trace of the latest one is written: see train.tracing."""
    trace_to: Optional[Any] = None
    """The run folder, in rank 0."""
    asked: Set[str] = field(default_factory=set)
    """What this process has asked all for, and not been answered yet: see train.agreement."""
    advice: Optional[str] = None
    """What may be done when the devices wait for data; None when that was said, or nothing is known."""
