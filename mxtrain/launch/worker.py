"""What a worker exchanges with the launcher that started it: see mxtrain.launch for the whole contract."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Optional

LOST_PEER = 75
"""Exit code of a worker that ends only because another process has gone (EX_TEMPFAIL of sysexits.h)."""

RUN_FOLDER = b"\x1emxtrain run "
"""Beginning of the line on stderr that announces the run folder; a record separator begins no line of a log."""


def launched() -> bool:
    """Whether this process was started by launch.py."""
    return "MXTRAIN_LAUNCH" in os.environ


def announce_run(folder: Path) -> None:
    """Tells the launcher, if there is one, where a restart finds the run. For rank 0, once the folder exists."""
    if launched():
        with suppress(OSError):  # of a launcher that has gone
            os.write(2, b"\n" + RUN_FOLDER + os.fsencode(os.path.abspath(folder)) + b"\n")


def leave(code: int) -> NoReturn:
    """Ends this process at once: for one that has lost another, or a worker of the parameter server that fails, which
    MXNet would else have wait, when Python ends, for a barrier of all workers, as they for this one."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # it may be closed, or nobody read it
            stream.flush()
    os._exit(code)


def folder_to_resume() -> Optional[Path]:
    """The run folder that an earlier start of this launch announced: go on from its last complete checkpoint, or
    start anew in it when there is none. None at the first start."""
    folder = os.environ.get("MXTRAIN_RESUME")
    return Path(folder) if folder else None
