"""What is done to files of any kind, so that they survive and are known again."""

from __future__ import annotations

import hashlib
import os
from typing import Union


def sha256(path: Union[str, os.PathLike]) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def flush(path: Union[str, os.PathLike]) -> None:
    """Has the system write a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
