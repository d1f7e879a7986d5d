"""What evaluate.py, predict.py and export.py have in common: their command lines and the files they write."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List

from mxtrain import compat, config
from mxtrain.devices import DeviceConfig, contexts
from mxtrain.errors import UserError


def parse(parser, sections: Dict[str, type], argv: List[str]) -> SimpleNamespace:
    """One checked settings object per section, and all that was given (`given`), from a command line."""
    parser.add_argument("--json", action="store_true", help="Print one JSON object and nothing else.")
    for section in sections.values():
        config.add_fields(parser, section)
    given: Dict[str, Any] = vars(parser.parse_args(argv, defaults=False))
    settings = config.sections_of(given, sections)
    return SimpleNamespace(**vars(settings), json=bool(given.get("json")), given=given)


def open_contexts(devices: DeviceConfig) -> list:
    """The contexts that the flags ask for. Imports mxnet."""
    if devices.threads:
        compat.set_threads(devices.threads)
    return contexts(devices)


@contextmanager
def replacing(path: str):
    """A text file to write that gets its name when it is complete; what had the name before stays until then."""
    temporary = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    try:
        # Names of files need not be valid text; they come out as they went in.
        with open(temporary, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            yield file
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    finally:
        temporary.unlink(missing_ok=True)
