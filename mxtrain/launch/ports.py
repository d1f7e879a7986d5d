"""TCP ports of this machine."""

from __future__ import annotations

import errno
import random
import socket
from contextlib import suppress
from typing import Optional

from mxtrain.errors import UserError

# Below those that Linux gives to outgoing connections: it takes seconds until somebody listens on a port found here.
_CHOICE = range(20000, 32768)
_TRIES = 50


class Port:
    """A free port on one of this machine's addresses: the given one, or any. UserError when it is in use.

    No other launch takes it until it is closed, even while nobody listens there yet.
    """

    def __init__(self, address: str, port: Optional[int]):
        self._hold: Optional[socket.socket] = None
        if port is not None:
            self._take(address, port)
            return
        for candidate in random.sample(_CHOICE, _TRIES):
            with suppress(UserError):
                self._take(address, candidate)
                return
        raise UserError(f"no free port was found on {address}; --port gives one")

    def close(self) -> None:
        """Lets other launches have the port."""
        self._hold.close()

    def _take(self, address: str, port: int) -> None:
        self.number = port
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as those do that will listen there
            try:
                one.bind((address, port))
                one.listen(1)
                self._hold = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._hold.bind(f"\0mxtrain-launch-{port}")  # a name without a file, gone with this process
            except OSError as error:
                if self._hold:
                    self._hold.close()
                why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
                raise UserError(f"--port {port}: {why} on {address}; give another one, or leave it out for a free "
                                "one") from None
