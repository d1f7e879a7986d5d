"""The learning rate as a pure function of the update."""

from __future__ import annotations

import math

from mxtrain.optim.settings import OptimConfig


def learning_rate(config: OptimConfig, update: int, updates_per_epoch: int, epochs: int) -> float:
    """The rate of one update (counted from 0) of a run of `epochs` epochs.

    The warm-up rises linearly and reaches the full rate with its last update. The rest of the schedule counts
    epochs from the start of the run (step), or goes from the end of the warm-up to the end of the run.
    """
    warmup = round(config.warmup_epochs * updates_per_epoch)
    if update < warmup:
        return config.lr * (update + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "step":
        steps = sum(update >= epoch * updates_per_epoch for epoch in config.decay_epochs)
        return config.lr * config.decay_factor**steps
    done = min(1.0, (update - warmup) / max(1, updates_per_epoch * epochs - warmup))
    if config.schedule == "poly":
        share = (1 - done) ** config.poly_power
    else:
        share = (1 + math.cos(math.pi * done)) / 2
    return config.final_lr + (config.lr - config.final_lr) * share
