"""Which processes train together, as the environment says; imports no mxnet.

horovodrun and scripts/launch.py start one command several times and describe each to itself in environment variables.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import Mapping, NamedTuple, Optional

from mxtrain.errors import UserError

OVER_SERVERS = ("dist_sync", "dist_device_sync", "dist_async")
IN_PROCESS = ("none", "local", "device", "nccl")

_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""How many processes mpirun (of Open MPI; of MPICH and Intel) and srun have started. A Horovod with MPI meets there."""

_RANKS = ("MXTRAIN_RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_LATER = 3.0  # seconds


class World(NamedTuple):
    """The processes of a training, seen from one of them."""

    kvstore: str
    """How gradients are summed: one of IN_PROCESS, horovod, or one of OVER_SERVERS."""
    size: int = 1
    """Number of processes."""
    local_rank: int = 0
    """Number of this one among those of its host."""
    local_size: int = 1

    @property
    def several(self) -> bool:
        """Whether there may be other processes."""
        return self.kvstore not in IN_PROCESS


def world(kvstore: Optional[str], environment: Mapping[str, str] = os.environ) -> World:
    """What `--kvstore` (None when it was not given) and the environment make together.

    Raises UserError where they contradict each other or something is missing.
    """
    under_horovod = "HOROVOD_RANK" in environment
    role = environment.get("DMLC_ROLE")
    asked = f"--kvstore {kvstore}"
    if under_horovod and role:
        raise UserError(f"HOROVOD_RANK and DMLC_ROLE={role} are both set: start the processes by horovodrun, or by "
                        "scripts/launch.py, not by one inside the other")
    if under_horovod:
        size = _number(environment, "HOROVOD_SIZE", 1)
        if kvstore not in (None, "horovod"):
            raise UserError(f"{asked}: these are {size} processes of Horovod, which would not hear of each other; "
                            "leave the flag out, or say horovod")
        return World("horovod", size, _number(environment, "HOROVOD_LOCAL_RANK", 0),
                     _number(environment, "HOROVOD_LOCAL_SIZE", 1))
    if kvstore in OVER_SERVERS:
        if role != "worker":
            raise UserError(f"{asked}: needs servers and a scheduler (DMLC_ROLE is not worker); start it by "
                            f"python scripts/launch.py -n 2 -s 1 -- python scripts/train.py {asked} ...")
        missing = [name for name in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
                   if not environment.get(name)]
        if missing:
            raise UserError(f"{asked}: {', '.join(missing)} not set; scripts/launch.py sets them")
        return World(kvstore, _number(environment, "DMLC_NUM_WORKER", 1), _number(environment, "MXTRAIN_LOCAL_RANK", 0),
                     _number(environment, "MXTRAIN_LOCAL_SIZE", 1))
    if role:
        raise UserError(f"DMLC_ROLE={role}: this is a {role} of a parameter server, but --kvstore is "
                        f"{kvstore or 'not given'}; allowed here are {', '.join(OVER_SERVERS)}")
    if kvstore in IN_PROCESS:
        return World(kvstore)
    size = max(_number(environment, name, 1) for name in _OTHER_LAUNCHERS)
    if size > 1:
        return World("horovod", size)  # or it says so when they meet
    if kvstore == "horovod":
        raise UserError(f"{asked}: this process was started alone; start several by horovodrun -np 2 python "
                        "scripts/train.py ..., or leave the flag out")
    return World("device")


@contextmanager
def rank_0_first(environment: Mapping[str, str] = os.environ):
    """For mistakes that processes find before they hear of each other: rank 0 says them at once. Another one waits;
    whoever has started them ends it meanwhile when rank 0 had the same to say."""
    try:
        yield
    except UserError:
        if next((environment[name] for name in _RANKS if name in environment), "0") != "0":
            time.sleep(_LATER)
        raise


def started_together(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process with others."""
    return "HOROVOD_RANK" in environment or "DMLC_ROLE" in environment


def processes_here(environment: Mapping[str, str] = os.environ) -> int:
    """Number of processes of this host that were started together, with this one."""
    return max(_number(environment, name, 1) for name in ("HOROVOD_LOCAL_SIZE", "MXTRAIN_LOCAL_SIZE"))


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name)
    if text is None:
        return default
    if not text.isdigit():
        raise UserError(f"{name}={text}: must be a whole number")
    return int(text)
