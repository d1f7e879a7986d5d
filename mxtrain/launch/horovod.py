"""Horovod with Gloo: the meeting point of the workers, and what they have to know.

The launcher does what horovodrun does, with Horovod's own rendezvous, so that signals, the time for a save, restarts
and the number of workers are its own.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from dataclasses import replace
from typing import Callable, List, Optional

from mxtrain.errors import UserError
from mxtrain.launch.ports import Port
from mxtrain.launch.processes import Task
from mxtrain.launch.slots import Place

SET_HERE = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
"""Variables that only a launcher sets."""


def check_installed() -> None:
    """UserError where Horovod is not."""
    if importlib.util.find_spec("horovod") is None:
        raise UserError("--transport horovod: Horovod is not installed; make setup HOROVOD=1 builds it")


class Horovod:
    """The rendezvous of one start, served by threads of this process."""

    def __init__(self, places: List[Place], address: str, port: Optional[int]):
        """address: of this machine, as the hosts of the workers reach it. UserError when the port is in use."""
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        self._address, self._hosts = address, len({place.host for place in places})
        self._port = Port(address, port)
        self._server = RendezvousHTTPServer((address, self._port.number), RendezvousHandler, 0)
        self._server.daemon_threads = True
        # What a worker has said here is deleted once the others know it. Of a list of workers Horovod would make scopes
        # that are emptied as a whole; it counts wrongly where one worker is much slower than others, and what is left
        # would mislead those who meet again.
        self._server.init([])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def services(self, is_here: Callable[[str], bool], this_host: str) -> List[Task]:
        """None: there are no processes but the workers."""
        return []

    def worker(self, task: Task, place: Place) -> Task:
        """A worker's task with what it has to know."""
        ours = {"HOROVOD_HOSTNAME": place.host, "HOROVOD_RANK": place.rank, "HOROVOD_SIZE": place.size,
                "HOROVOD_LOCAL_RANK": place.local_rank, "HOROVOD_LOCAL_SIZE": place.local_size,
                "HOROVOD_CROSS_RANK": place.cross_rank, "HOROVOD_CROSS_SIZE": place.cross_size,
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": self._address,
                "HOROVOD_GLOO_RENDEZVOUS_PORT": self._port.number,
                "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
        # Without it, Gloo takes what the host's own name stands for. A Horovod 0.28.1 that make setup has not built
        # obeys it for its first connections only, so that names have to be right all the same (`named`).
        for variable in ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"):
            if not os.environ.get(variable):
                ours[variable] = "{interface}"
        return replace(task, variables={**task.variables, **{name: str(value) for name, value in ours.items()}},
                       towards=self._address, named=self._hosts > 1)

    def close(self) -> None:
        """Ends the rendezvous and frees its port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._port.close()
