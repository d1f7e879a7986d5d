"""What all programs have in common: exit codes, the log, JSON."""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import time
from typing import Callable, List

from tqdm import tqdm

from mxtrain.errors import Elsewhere, LostPeer, TrainingError, UserError
from mxtrain.launch.worker import LOST_PEER, leave

_log = logging.getLogger("mxtrain")

_SECONDS_TO_SPEAK = 2.0  # that a process has that knows why all end: horovodrun ends all when the first has ended


class _StandardError(logging.Handler):
    """Log lines on stderr that do not tear a progress bar."""

    def emit(self, record):
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        try:
            tqdm.write(level + record.getMessage(), file=sys.stderr)
        except Exception:  # a terminal that has gone must not end a training
            self.handleError(record)


def run(program: str, main: Callable[[List[str]], int]) -> None:
    """Runs main(argv) as a program: a user's mistake is one line on stderr and exit code 2, a training that cannot go
    on exit code 1, an interrupt 130."""
    _log.setLevel(logging.INFO)
    _log.addHandler(_StandardError())
    try:
        code = main(sys.argv[1:])
    except UserError as error:
        code = _fail(program, error, 2)
    except LostPeer as error:
        code = _fail(program, error, LOST_PEER)
    except Elsewhere:
        atexit._run_exitfuncs()  # the one that knows why would wait for Horovod's leave of this one
        time.sleep(_SECONDS_TO_SPEAK)
        code = LOST_PEER
    except TrainingError as error:
        code = _fail(program, error, 1)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone
        code = 1
    if code == LOST_PEER or code and "DMLC_ROLE" in os.environ:
        leave(code)  # Horovod and MXNet would complain of the lost peer, or wait for it
    sys.exit(code)


def print_json(value: dict) -> None:
    """One JSON object on a line of its own, the last of a program's output."""
    print(json.dumps(value, allow_nan=False), flush=True)


def _fail(program: str, error: Exception, code: int) -> int:
    text = " ".join(str(error).split())
    print(f"{program}: error: {text}", file=sys.stderr, flush=True)
    if "--json" in sys.argv:
        print_json({"error": text, "exit_code": code})
    return code
