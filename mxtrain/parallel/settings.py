"""Settings of how the work is spread and summed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import List, Literal, Optional, Union

from mxtrain.errors import UserError
from mxtrain.parallel.world import World
from mxtrain.sizes import parse_bytes


@dataclass
class ParallelConfig:
    kvstore: Optional[Literal["none", "local", "device", "nccl", "horovod", "dist_sync", "dist_device_sync",
                              "dist_async"]] = None
    """How gradients are summed: over the contexts of a process by plain copies or one of MXNet's KVStores (nccl: GPUs
    only); over processes by horovod, or on parameter servers by dist_sync or dist_device_sync (default: horovod under
    horovodrun, else device). dist_async does not sum over processes: the servers update at once by what each sends."""
    staleness: Optional[int] = None
    """How many batches a process of dist_async may be ahead of another one (default: 4)."""
    shards: Optional[int] = None
    """Number of pieces V that each global batch is cut into; default: the number of contexts of all processes, or
    8 with --exact."""
    micro_batch: Optional[int] = None
    """Largest number of samples a context runs at once; sets --shards to ceil(batch size / this)."""
    exact: bool = False
    """Sum gradients exactly: the same bits of every weight on any number of contexts and processes."""
    compression: Literal["none", "fp16", "2bit"] = "none"
    """What processes send each other of gradients: all; fp16, half of it, sums are then rounded to 11 bits; or 2bit, a
    tenth of it among two processes: which of them have reached a threshold, the rest is kept for later updates."""
    compression_threshold: Optional[float] = None
    """The threshold of 2bit, for a gradient summed over the samples of a process; default: 0.5."""
    audit: Optional[float] = None
    """Compare the weights of all contexts and processes every so many updates, and before every checkpoint. A fraction,
    with --exact: in this share of the updates; and run one of their shards again elsewhere, to compare its gradient."""
    recompute: Union[int, str] = "none"
    """Save memory by running segments again in backward: none, a number of segments, blocks (the network's own), or the
    memory that the activations of a shard may take on a device, such as 500MB, 1.5GB or 2GiB."""

    def __post_init__(self):
        if self.staleness is not None and self.staleness < 0:
            raise UserError(f"--staleness {self.staleness}: must be 0 or more")
        for name in ("shards", "micro_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
        if self.shards is not None and self.micro_batch is not None:
            raise UserError("--shards and --micro-batch both set the number of shards: give one of them")
        if self.exact and (self.shards or 0) > 1024:
            raise UserError(f"--shards {self.shards}: exact sums hold for up to 1024 shards")
        if self.exact and self.compression != "none":
            raise UserError(f"--compression {self.compression}: rounds sums, which --exact must not; leave one out")
        self._check_threshold()
        self._check_audit()
        self.recompute = str(self.recompute)
        if self.recompute not in ("none", "blocks") and not re.fullmatch("[1-9][0-9]*", self.recompute) and (
                parse_bytes(self.recompute) is None):
            raise UserError(f"--recompute {self.recompute}: must be none, blocks, a number of segments from 1 on, or an "
                            "amount of memory such as 500MB, 1.5GB or 2GiB")

    def _check_threshold(self):
        if self.compression == "2bit" and self.compression_threshold is None:
            self.compression_threshold = 0.5
        if self.compression_threshold is None:
            return
        given = f"--compression-threshold {self.compression_threshold:g}"
        if self.compression != "2bit":
            raise UserError(f"{given}: has no effect with --compression {self.compression}; it is for 2bit")
        if not 1e-30 <= self.compression_threshold <= 1e30:
            raise UserError(f"{given}: must be above 0, from 1e-30 to 1e30")

    def _check_audit(self):
        if self.audit is None:
            return
        if not (0 < self.audit < 1 or self.audit == self.audit // 1 >= 1):
            raise UserError(f"--audit {self.audit:g}: must be a whole number of updates, or a fraction between 0 and 1")
        if self.audit < 1 and not self.exact:
            raise UserError(f"--audit {self.audit:g}: a fraction, by which shards are run again, needs --exact; "
                            "without it give a whole number of updates")


def refuse_without_effect(config: ParallelConfig, around: World, contexts: int) -> None:
    """Raises UserError for what does nothing, or cannot be done, among these processes with so many contexts each."""
    alone = not around.several and contexts == 1
    if config.compression != "none" and not around.several:
        raise UserError(f"--compression {config.compression}: is for what processes send each other, and has no effect "
                        f"in a single one (--kvstore {around.kvstore}); say none")
    if around.kvstore == "dist_async":
        for name, value in (("--exact", config.exact), (f"--audit {config.audit or 0:g}", config.audit)):
            if value:
                raise UserError(f"{name}: --kvstore dist_async cannot, since its processes have other weights at the "
                                "same time, and never the same twice; use dist_sync or horovod")
        if config.compression != "none":
            raise UserError(f"--compression {config.compression}: is for sums, and --kvstore dist_async makes none; "
                            "use dist_sync or horovod, or say none")
    elif config.staleness is not None:
        raise UserError(f"--staleness {config.staleness}: is for --kvstore dist_async, and this is {around.kvstore}; "
                        "leave it out")
    if (config.audit or 0) >= 1 and alone:
        raise UserError(f"--audit {config.audit:g}: has no effect with one process and one context, whose weights have "
                        "none to be compared with; leave it out, or say null where the run has it")


def idle_flags(config: ParallelConfig, contexts: int, processes: int) -> List[str]:
    """Lines on what does nothing in this start, but may in another: a launch can go on with fewer processes."""
    lines = []
    if config.compression != "none" and processes == 1:
        lines.append(f"--compression {config.compression}: has no effect with one process")
    if config.staleness is not None and processes == 1:
        lines.append(f"--staleness {config.staleness}: has no effect with one process")
    if (config.audit or 0) >= 1 and processes * contexts == 1:
        lines.append(f"--audit {config.audit:g}: has no effect with one process and one context")
    return lines


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
