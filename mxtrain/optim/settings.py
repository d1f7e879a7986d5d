"""Settings of the optimizer and its learning rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Literal, Optional

from mxtrain.errors import UserError


@dataclass
class OptimConfig:
    optimizer: str = "sgd"
    """sgd, nag, adam, adamw, or another optimizer that MXNet has registered."""
    lr: float = 0.1
    """Learning rate at its highest; it is never rescaled by the batch size or the number of devices."""
    momentum: float = 0.9
    """Momentum of sgd and nag."""
    weight_decay: float = 1e-4
    """Weight decay: added to the gradient, or with adamw taken off the weight (times the learning rate)."""
    decay_all: bool = True
    """Decay biases and normalization parameters (gamma, beta) too."""
    beta1: float = 0.9
    """Decay of the first moment of adam and adamw."""
    beta2: float = 0.999
    """Decay of the second moment of adam and adamw."""
    epsilon: float = 1e-8
    """Added to the root of the second moment in adam and adamw."""
    schedule: Literal["constant", "step", "poly", "cosine"] = "cosine"
    """Course of the learning rate after the warm-up."""
    warmup_epochs: float = 0.0
    """Epochs in which the learning rate rises in a straight line from nearly 0; may be a fraction."""
    decay_epochs: List[float] = field(default_factory=list)
    """Epochs at which the step schedule multiplies the rate by --decay-factor."""
    decay_factor: float = 0.1
    """What the step schedule multiplies by."""
    poly_power: float = 2.0
    """Exponent of the poly schedule."""
    final_lr: float = 0.0
    """Learning rate at the end of the poly and cosine schedules."""
    clip_norm: Optional[float] = None
    """Largest global norm of the gradient (of the mean over the batch); longer gradients are scaled down to it."""

    def __post_init__(self):
        self.optimizer = self.optimizer.lower()
        for name in ("lr", "weight_decay", "warmup_epochs", "final_lr", "momentum", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be a number from 0 on")
        for name in ("momentum", "beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be below 1")
        for name in ("epsilon", "decay_factor", "poly_power"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be a number above 0")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"--clip-norm {self.clip_norm}: must be above 0")
        if self.schedule == "step" and not self.decay_epochs:
            raise UserError("--schedule step: give the epochs of its steps by --decay-epochs")
        if self.decay_epochs and self.schedule != "step":
            raise UserError(f"--decay-epochs: has no effect with --schedule {self.schedule}; use --schedule step")
        if any(epoch < 0 for epoch in self.decay_epochs):
            raise UserError(f"--decay-epochs {self.decay_epochs}: epochs count from 0")
