"""The folder of a run."""

from __future__ import annotations

import json
import logging
import logging.handlers
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import List, Optional

from mxtrain.errors import TrainingError, UserError


def make(out: Optional[str], name: str) -> Path:
    """Makes the folder `out`, which must not hold anything yet, or the next free runs/<name>-<number>."""
    if out is not None:
        folder = Path(out)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--out {out}: exists already; --resume {out} goes on with it; "
                            "else remove it, or give another folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {out}: cannot be made ({error.strerror})") from None
        return folder
    number = 1
    while True:
        folder = Path("runs") / f"{name}-{number:03d}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(f"{folder}: cannot be made ({error.strerror}); --out says where") from None


@contextmanager
def naming(path: Path):
    """Makes an OSError a TrainingError that names a file or folder: one that a write raises names none."""
    try:
        yield
    except OSError as error:
        raise TrainingError(f"{error.filename or path}: cannot be written ({error.strerror or error})") from None


def write_classes(folder: Path, classes: List[str]) -> None:
    """classes.txt: one name a line, in the order of the network's outputs."""
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")


def read_classes(folder: Path) -> List[str]:
    return (folder / "classes.txt").read_text(encoding="utf-8").splitlines()


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1))


_early = logging.handlers.MemoryHandler(capacity=1000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)


def remember_log() -> None:
    """Keeps what is logged from now on for the log.txt to come."""
    _early.buffer.clear()  # of a start before, in the same process
    logging.getLogger("mxtrain").addHandler(_early)


def log_to(folder: Path) -> logging.Handler:
    """Adds a handler that appends the program's log to log.txt, what was remembered first."""
    handler = logging.FileHandler(folder / "log.txt", encoding="utf-8")
    handler.handleError = lambda record: None  # a full disk shows elsewhere, and not by tracebacks
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _early.setTarget(handler)
    _early.flush()
    _early.setTarget(None)
    logging.getLogger("mxtrain").removeHandler(_early)
    logging.getLogger("mxtrain").addHandler(handler)
    return handler


def write_line(level: int, text: str) -> None:
    """Adds a line to log.txt alone."""
    for handler in logging.getLogger("mxtrain").handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(logging.makeLogRecord(
                {"levelno": level, "levelname": logging.getLevelName(level), "msg": text}))


def close_log(handler: logging.Handler) -> None:
    logging.getLogger("mxtrain").removeHandler(handler)
    with suppress(OSError):  # of the lines that could not be written
        handler.close()
