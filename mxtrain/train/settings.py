"""Settings of the training itself: how long, what is kept, when to stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional

from mxtrain.errors import UserError


@dataclass
class TrainConfig:
    task: Literal["auto", "image", "text", "lm"] = "auto"
    """What is learned: image (classification of images), text (classification of the texts of a table) or lm (language:
    the next byte of a text file); auto works it out from the data."""
    batch_size: int = 64
    """Samples (images, texts, sequences of --context tokens) of a global batch, over all devices."""
    epochs: int = 20
    """Passes over the training data."""
    seed: int = 0
    """Seed of everything random: initial weights, order, augmentation, dropout."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over all classes."""
    monitor: str = "auto"
    """Validation column of metrics.csv that decides which checkpoint is best and when to stop early: auto (accuracy
    where there is one, else loss), accuracy, loss, f1 (texts), ..."""
    patience: Optional[int] = None
    """Stop after this many epochs in a row without an improvement of the monitored value."""
    min_delta: float = 0.0
    """Smallest change of the monitored value that counts as an improvement for --patience."""
    out: Optional[str] = None
    """Run folder to make; default: a new one below runs/."""
    resume: Optional[str] = None
    """Run folder, or one of its checkpoints, to go on from."""
    checkpoint_updates: Optional[int] = None
    """Save also every so many updates."""
    checkpoint_minutes: Optional[float] = None
    """Save also every so many minutes."""
    keep: int = 3
    """Number of newest checkpoints to keep, besides the best."""
    tensorboard: bool = True
    """Write events for TensorBoard."""
    plots: bool = True
    """Draw curves.png after every epoch."""
    progress: bool = True
    """Show a progress bar (lines now and then where the output is not a terminal)."""

    def __post_init__(self):
        for name in ("batch_size", "epochs", "keep"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be 1 or more")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed}: must be 0 or more")
        if self.min_delta and self.patience is None:
            raise UserError(f"--min-delta {self.min_delta}: has no effect without --patience")
        for name in ("patience", "checkpoint_updates", "checkpoint_minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"--{name.replace('_', '-')} {value}: must be above 0")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"--label-smoothing {self.label_smoothing}: must be from 0 to below 1")
        if not self.min_delta >= 0:
            raise UserError(f"--min-delta {self.min_delta}: must be 0 or more")
