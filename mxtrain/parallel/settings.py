"""Settings of how the work is spread and summed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
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
    dp: Optional[int] = None
    """Replicas of the network, each on --pp times --tp contexts; default: as many as the contexts of all processes make
    up."""
    tp: int = 1
    """Contexts that each layer is split over, where it says how, as those of a GPT do; a stage of a pipeline has so
    many."""
    pp: int = 1
    """Stages of a pipeline that the network is cut into, each on a context of its own (or on --tp)."""
    cut: List[int] = field(default_factory=list)
    """Number of the first segment of each stage after the first; default: stages that take the same time, as measured
    at the start."""
    pp_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of a pipeline's shards: gpipe runs all forward, then all backward; 1f1b holds fewer of them at a time."""
    trace: bool = False
    """Note when each context ran each shard of the second update, and draw it: trace.json and trace.png in the run
    folder. That update waits for every step, and takes longer."""
    zero: Literal[0, 1, 2, 3] = 0
    """What replicas share out instead of keeping it all: 1, the optimizer's states; 2, the gradients too; 3, the weights
    too, which are brought together for one block after the other, and again in backward, which runs it again."""
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
        self._check_layout()
        self.recompute = str(self.recompute)
        if self.recompute not in ("none", "blocks") and not re.fullmatch("[1-9][0-9]*", self.recompute) and (
                parse_bytes(self.recompute) is None):
            raise UserError(f"--recompute {self.recompute}: must be none, blocks, a number of segments from 1 on, or an "
                            "amount of memory such as 500MB, 1.5GB or 2GiB")
        self._check_tensor()

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

    def _check_layout(self):
        for name in ("dp", "tp", "pp"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} {value}: must be 1 or more")
        if self.cut and self.pp == 1:
            raise UserError(f"--cut {' '.join(map(str, self.cut))}: has no effect without a pipeline; give --pp, too")
        if self.audit and self.pp > 1:
            raise UserError(f"--audit {self.audit:g}: compares replicas of one context each, and --pp {self.pp} spreads "
                            "a replica over several; leave one out")
        if self.audit and self.zero == 3:
            raise UserError(f"--audit {self.audit:g}: compares the weights of replicas, of which --zero 3 leaves each a "
                            "part of its own; leave one out, or give --zero 1")
        if self.audit and self.audit < 1 and self.zero == 2:
            raise UserError(f"--audit {self.audit:g}: compares gradients of whole shards, which --zero 2 never keeps; "
                            "give a whole number of updates, or --zero 1")

    def _check_tensor(self):
        if self.tp == 1:
            return
        given = f"--tp {self.tp}"
        if self.exact:
            raise UserError(f"{given}: splits the sums within a layer, in float32, so that --exact cannot be; leave one out")
        if self.zero:
            raise UserError(f"{given}: does not go with --zero {self.zero}; leave one out")
        if self.audit:
            raise UserError(f"{given}: does not go with --audit {self.audit:g}, which compares whole copies; leave one out")
        if self.compression != "none":
            raise UserError(f"{given}: does not go with --compression {self.compression}; leave one out")
        if parse_bytes(self.recompute) is not None:
            raise UserError(f"{given}: --recompute {self.recompute} measures a network that is not split; give blocks, or "
                            "a number of segments")

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
    if config.compression != "none" and config.zero:
        raise UserError(f"--compression {config.compression}: is for gradients that all processes get whole, which --zero "
                        f"{config.zero} does not do; leave one out")
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
        for name, value in ((f"--pp {config.pp}", config.pp > 1), (f"--tp {config.tp}", config.tp > 1),
                            (f"--zero {config.zero}", config.zero)):
            if value:
                raise UserError(f"{name}: --kvstore dist_async cannot, since its servers keep and update all weights; "
                                "use dist_sync or horovod")
    elif config.staleness is not None:
        raise UserError(f"--staleness {config.staleness}: is for --kvstore dist_async, and this is {around.kvstore}; "
                        "leave it out")
    if (config.audit or 0) >= 1 and alone:
        raise UserError(f"--audit {config.audit:g}: has no effect with one process and one context, whose weights have "
                        "none to be compared with; leave it out, or say null where the run has it")


def idle_flags(config: ParallelConfig, contexts: int, processes: int) -> List[str]:
    """Lines on what does nothing in this start, but may in another: a launch can go on with fewer processes."""
    lines = []
    if config.zero and contexts * processes == config.pp:
        lines.append(f"--zero {config.zero}: " + ("has no effect with one replica, which shares out nothing"
                     if config.zero < 3 else "one replica shares out nothing, and runs blocks again all the same"))
    if config.pp_schedule != "1f1b" and config.pp == 1:
        lines.append(f"--pp-schedule {config.pp_schedule}: has no effect without a pipeline (--pp)")
    if config.compression != "none" and processes == 1:
        lines.append(f"--compression {config.compression}: has no effect with one process")
    if config.staleness is not None and processes == 1:
        lines.append(f"--staleness {config.staleness}: has no effect with one process")
    if (config.audit or 0) >= 1 and processes * contexts == 1:
        lines.append(f"--audit {config.audit:g}: has no effect with one process and one context")
    return lines


def number_of_shards(config: ParallelConfig, batch_size: int, contexts: int) -> int:
    """V, the number of shards of every global batch of a run that starts on so many contexts, over all processes."""
    contexts //= config.tp  # a team counts as one
    replicas = contexts // config.pp
    if config.shards is not None:
        shards = config.shards
    elif config.micro_batch is not None:
        shards = -(-batch_size // config.micro_batch)
    else:
        shards = 8 if config.exact else contexts
    if config.exact and shards > 1024:
        raise UserError(f"--micro-batch {config.micro_batch}: makes {shards} shards, exact sums hold for up to 1024")
    if config.exact and shards < replicas:
        raise UserError(f"--exact with {shards} shards on {replicas} {'contexts' if config.pp == 1 else 'replicas'} would "
                        f"leave some idle: give --shards {replicas} or more, or fewer contexts")
    if config.pp > 1 and shards < contexts:
        each = f", {shards} for {replicas} replicas" if replicas > 1 else ""
        raise UserError(f"--pp {config.pp}: a pipeline is idle with fewer shards than stages, and a batch has {shards} in "
                        f"all{each}; give --shards {contexts} or more at the first start, or fewer stages")
    return shards
