"""python -m mxtrain.launch.server: the scheduler or a server of MXNet's parameter server, as DMLC_ROLE says.

With that variable set, `import mxnet` itself becomes the server and never returns. Here mxnet is imported whole
before, so that an optimiser that a worker sends (dist_async) finds all of it.
"""

from __future__ import annotations

import os
import sys

import mxtrain  # noqa: F401  (its gate prepares the import of mxnet)


def main() -> None:
    """Serves until all workers have ended."""
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


if __name__ == "__main__":
    main()
