"""Settings of the optimizer and its learning rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Literal, Optional, get_args

from mxtrain.errors import UserError

# Not: nadam, lars, lbsgd and dcasgd, which remember more than can be saved; sgld, whose noise would differ by device;
# adamax, which divides zero by zero where a gradient is zero; adadelta, which takes no notice of the learning rate.
OptimizerName = Literal["sgd", "nag", "adam", "adamw", "adagrad", "ftml", "ftrl", "lamb", "rmsprop", "signum"]


@dataclass
class OptimConfig:
    optimizer: OptimizerName = "sgd"
    """How the gradient moves the weights; MXNet's optimizers whose whole state is arrays and the number of the update,
    and adamw (Loshchilov and Hutter 2019)."""
    lr: Optional[float] = None
    """Learning rate at its highest (default: 0.1 for sgd and nag, 0.001 for the others); it is never rescaled by the
    batch size or the number of devices."""
    momentum: float = 0.9
    """Momentum of sgd, nag and signum."""
    weight_decay: float = 1e-4
    """Weight decay: added to the gradient, or with adamw taken off the weight (times the learning rate)."""
    decay_all: bool = True
    """Decay biases and normalization parameters (gamma, beta) too."""
    beta1: Optional[float] = None
    """Decay of the first moment of adam, adamw, ftml and lamb (default: the optimizer's own, 0.9 for adam)."""
    beta2: Optional[float] = None
    """Decay of the second moment of adam, adamw, ftml and lamb (default: the optimizer's own, 0.999 for adam)."""
    epsilon: Optional[float] = None
    """Added to the root of the second moment in adam, adamw, ftml, lamb and rmsprop (default: the optimizer's own,
    1e-8 for adam)."""
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
        if self.optimizer not in get_args(OptimizerName):
            raise UserError(f"--optimizer {self.optimizer}: must be one of {', '.join(get_args(OptimizerName))}")
        if self.lr is None:
            self.lr = 0.1 if self.optimizer in ("sgd", "nag") else 0.001
        for name in ("lr", "weight_decay", "warmup_epochs", "final_lr", "momentum", "beta1", "beta2"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be a number from 0 on")
        for name in ("momentum", "beta1", "beta2"):
            if getattr(self, name) is not None and getattr(self, name) >= 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be below 1")
        for name in ("epsilon", "decay_factor", "poly_power"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be a number above 0")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"--clip-norm {self.clip_norm}: must be above 0")
        if self.schedule == "step" and not self.decay_epochs:
            raise UserError("--schedule step: give the epochs of its steps by --decay-epochs")
        if self.decay_epochs and self.schedule != "step":
            raise UserError(f"--decay-epochs: has no effect with --schedule {self.schedule}; use --schedule step")
        if any(epoch < 0 for epoch in self.decay_epochs):
            raise UserError(f"--decay-epochs {self.decay_epochs}: epochs count from 0")
