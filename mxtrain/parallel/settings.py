"""Settings of how the work is spread and summed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Optional, Union

from mxtrain.errors import UserError


@dataclass
class ParallelConfig:
    kvstore: Optional[Literal["none", "local", "device", "nccl", "horovod", "dist_sync", "dist_device_sync"]] = None
    """How gradients are summed: over the contexts of a process by plain copies or one of MXNet's KVStores (nccl: GPUs
    only); over processes by horovod, or on parameter servers by dist_sync or dist_device_sync (default: horovod under
    horovodrun, else device)."""
    shards: Optional[int] = None
    """Number of pieces V that each global batch is cut into; default: the number of contexts, or 8 with --exact."""
    micro_batch: Optional[int] = None
    """Largest number of samples a context runs at once; sets --shards to ceil(batch size / this)."""
    exact: bool = False
    """Sum gradients exactly: the same bits of every weight on any number of contexts."""
    recompute: Union[int, str] = "none"
    """Save memory by running segments again in backward: none, a number of segments, or blocks (the network's own)."""

    def __post_init__(self):
        for name in ("shards", "micro_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
        if self.shards is not None and self.micro_batch is not None:
            raise UserError("--shards and --micro-batch both set the number of shards: give one of them")
        if self.exact and (self.shards or 0) > 1024:
            raise UserError(f"--shards {self.shards}: exact sums hold for up to 1024 shards")
        self.recompute = str(self.recompute)
        if self.recompute not in ("none", "blocks") and not re.fullmatch("[1-9][0-9]*", self.recompute):
            raise UserError(f"--recompute {self.recompute}: must be none, blocks or a number of segments from 1 on")


def number_of_shards(config: ParallelConfig, batch_size: int, replicas: int) -> int:
    """V, the number of shards of every global batch of a run that starts on this many replicas."""
    if config.shards is not None:
        shards = config.shards
    elif config.micro_batch is not None:
        shards = -(-batch_size // config.micro_batch)
    else:
        shards = 8 if config.exact else replicas
    if config.exact and shards > 1024:
        raise UserError(f"--micro-batch {config.micro_batch}: makes {shards} shards, exact sums hold for up to 1024")
    if config.exact and shards < replicas:
        raise UserError(f"--exact with {shards} shards on {replicas} contexts would leave some idle: "
                        f"give --shards {replicas} or more, or fewer contexts")
    return shards
