"""The flags of launch.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional, get_args

from mxtrain.errors import UserError

Transport = Literal["ps", "horovod"]


@dataclass
class LaunchConfig:
    """How many processes, where, and what becomes of failures."""

    workers: Optional[int] = None
    """Number of training processes (-n)."""
    servers: Optional[int] = None
    """Number of parameter servers (-s; default: 1; there are none with --transport horovod)."""
    transport: Transport = "ps"
    """ps (MXNet's parameter server, for train.py --kvstore dist_sync and its like) or horovod."""
    hosts: Optional[str] = None
    """File of hosts, one `name slots=N` a line (slots: how many workers it takes, 1 if not given); others than this
    one are reached by ssh, with keys, and have the same files at the same paths (default: all on this host)."""
    restarts: int = 0
    """How often to start again after a failure, from the last checkpoint."""
    min_workers: Optional[int] = None
    """Go on with as few workers when some fail or their hosts do not answer (default: the number of workers)."""
    port: Optional[int] = None
    """TCP port of the scheduler, or of Horovod's rendezvous, on this host (default: a free one)."""
    grace: float = 15.0
    """Seconds that processes have to end, and perhaps to finish a checkpoint, after another one has failed."""

    def __post_init__(self):
        if self.workers is None:
            raise UserError("-n is missing: give the number of workers")
        if self.transport not in get_args(Transport):
            raise UserError(f"--transport {self.transport}: must be one of {', '.join(get_args(Transport))}")
        if self.transport == "horovod" and self.servers is not None:
            raise UserError(f"-s {self.servers}: Horovod has no servers; leave it out, or give --transport ps")
        if self.servers is None:
            self.servers = 1 if self.transport == "ps" else 0
        least = [("-n", self.workers, 1), ("--restarts", self.restarts, 0), ("--grace", self.grace, 0)]
        if self.transport == "ps":
            least.append(("-s", self.servers, 1))
        for flag, value, smallest in least:
            if not smallest <= value < float("inf"):
                raise UserError(f"{flag} {value}: must be at least {smallest}")
        if self.min_workers is None:
            self.min_workers = self.workers
        elif not 1 <= self.min_workers <= self.workers:
            raise UserError(f"--min-workers {self.min_workers}: must be from 1 to {self.workers}, the workers of -n")
        elif not self.restarts:
            raise UserError(f"--min-workers {self.min_workers}: has an effect only with --restarts")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise UserError(f"--port {self.port}: must be from 1 to 65535")
