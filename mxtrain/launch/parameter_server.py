"""MXNet's parameter server: a scheduler, servers, and what the processes have to know of each other.

MXNet 1.9.1 reads DMLC_ROLE, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER and DMLC_NUM_SERVER. A worker or
server listens on DMLC_NODE_HOST, else on the address of DMLC_INTERFACE, else on the first one that is no loopback.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Callable, List, Optional

from mxtrain.launch.ports import Port
from mxtrain.launch.processes import Task
from mxtrain.launch.slots import Place

SET_HERE = ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
"""Variables that only a launcher sets."""

# New memory is zero (255 stands for the byte 0). MXNet 1.9.1's server never sets its switch for keeping float64 sums as
# float32, so that whatever lies in memory would decide.
_ZERO_MEMORY = {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "MALLOC_PERTURB_": "255"}

_COMMAND = [sys.executable, "-m", "mxtrain.launch.server"]

# PORT is what containers set for their web server; MXNet would take it for the port of every node.
# DMLC_LOCAL asks for files instead of ports, DMLC_RANK and DMLC_NODE_HOST belong to one process.
_UNSET = ("PORT", "DMLC_LOCAL", "DMLC_RANK", "DMLC_NODE_HOST")


class ParameterServer:
    """The parameter server of one start."""

    def __init__(self, servers: int, places: List[Place], address: str, port: Optional[int]):
        """address: of this machine, as the hosts of the workers reach it. UserError when the port is in use."""
        self._servers, self._places, self._address = servers, places, address
        self._port = Port(address, port)

    def services(self, is_here: Callable[[str], bool], this_host: str) -> List[Task]:
        """The scheduler, on this machine, and the servers, in turn on the hosts of the workers."""
        hosts = list(dict.fromkeys(place.host for place in self._places))
        homes = [("scheduler", "scheduler", this_host)]
        homes += [("server", f"server {n}", hosts[n % len(hosts)]) for n in range(self._servers)]
        return [self._task(role, Task(name, _COMMAND, host, host == this_host or is_here(host),
                                      _ZERO_MEMORY if role == "server" else {"OMP_NUM_THREADS": "1"}))
                for role, name, host in homes]

    def worker(self, task: Task, place: Place) -> Task:
        """A worker's task with what it has to know."""
        return self._task("worker", task)

    def _task(self, role: str, task: Task) -> Task:
        ours = {"DMLC_ROLE": role, "DMLC_PS_ROOT_URI": self._address, "DMLC_PS_ROOT_PORT": str(self._port.number),
                "DMLC_NUM_WORKER": str(len(self._places)), "DMLC_NUM_SERVER": str(self._servers)}
        if not os.environ.get("DMLC_INTERFACE"):
            ours["DMLC_NODE_HOST"] = self._address if task.here else "{address}"
        return replace(task, variables={**task.variables, **ours}, unset=_UNSET,
                       towards=None if task.here else self._address)

    def close(self) -> None:
        """Gives the port back, once all processes have ended."""
        self._port.close()
