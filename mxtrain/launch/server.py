"""python -m mxtrain.launch.server: the scheduler or a server of MXNet's parameter server, as DMLC_ROLE says.

With that variable set, `import mxnet` itself becomes the server and never returns. Here mxnet is imported whole
before, so that an optimiser that a worker sends (dist_async) finds all of it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import List

import mxtrain  # noqa: F401  (its gate prepares the import of mxnet)
from mxtrain import cli
from mxtrain.errors import UserError
from mxtrain.launch.hosts import address_of
from mxtrain.signals import SIGNALS


def main(_: List[str]) -> int:
    """Serves until all workers have ended."""
    if "MXTRAIN_PROCESS" in os.environ:
        # What is sent to all processes of a job asks the workers to save, for which they need this one. A launcher that
        # started it ends it otherwise.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    root = os.environ.get("DMLC_PS_ROOT_URI", "")
    address = address_of(root)
    if address is None:
        raise UserError(f"DMLC_PS_ROOT_URI={root}: is no host that this one knows")
    os.environ["DMLC_PS_ROOT_URI"] = address  # MXNet takes a name for an address that is in use
    role = os.environ.pop("DMLC_ROLE")
    from mxnet.base import MXNetError
    from mxnet.kvstore import kvstore_server

    os.environ["DMLC_ROLE"] = role
    try:
        kvstore_server._init_kvstore_server_module()  # ends the process
    except MXNetError as error:
        if role != "scheduler" or "bind failed" not in str(error):
            raise
        where = "{DMLC_PS_ROOT_URI}:{DMLC_PS_ROOT_PORT}".format(**os.environ)
        print(f"{where} is in use since a moment ago", file=sys.stderr, flush=True)
        os._exit(1)
    return 0


if __name__ == "__main__":
    cli.run("server", main)
