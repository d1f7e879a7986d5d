"""Checkpoints: folders of arrays and JSON that are complete or absent.

    checkpoints/update-00001234/arrays.npz      weights and optimizer states
                                state.json      everything else
                                manifest.json   format, sizes and checksums; written last
                latest, best                    files that name a checkpoint

A checkpoint is written to a hidden folder, flushed to the disk and renamed, so what has the name of a checkpoint
is whole; its checksums find what broke later. Nothing in it is code, and reading it needs none of the
devices that it was saved from.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from mxtrain.errors import TrainingError, UserError
from mxtrain.files import flush, sha256

FORMAT = 1
_NAME = re.compile(r"update-(\d{8,})$")

_log = logging.getLogger("mxtrain")


class Checkpoint(NamedTuple):
    """What a checkpoint folder holds."""

    path: Path
    arrays: Dict[str, np.ndarray]
    state: dict


class CorruptCheckpoint(Exception):
    """A checkpoint folder is incomplete or damaged; the text names the file."""


def write(path: Path, arrays: Dict[str, np.ndarray], state: dict) -> None:
    """Writes a checkpoint folder, replacing one of the same name. On an OSError nothing has changed."""
    temporary = path.parent / f".new-{path.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _save_arrays(temporary / "arrays.npz", arrays)
        (temporary / "state.json").write_text(json.dumps(state, indent=1))
        files = {name: {"bytes": (temporary / name).stat().st_size, "sha256": sha256(temporary / name)}
                 for name in ("arrays.npz", "state.json")}
        (temporary / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
        for file in [*temporary.iterdir(), temporary]:
            flush(file)
        replaced = path.parent / f".old-{path.name}"
        if path.exists():
            os.replace(path, replaced)  # `repair` undoes this if we die before the next line
        os.replace(temporary, path)
        flush(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        repair(path.parent)
        raise


def _save_arrays(path: Path, arrays: Dict[str, np.ndarray]) -> None:
    # As np.savez does, which on a full disk leaves an open archive behind, with a traceback when that is collected.
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def read(path: Path) -> Checkpoint:
    """Reads a checkpoint folder and checks it against its manifest. Raises CorruptCheckpoint."""
    try:
        for name, expected in _manifest(path).items():
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                raise CorruptCheckpoint(f"{path / name}: {size} bytes instead of {expected['bytes']}")
            if sha256(path / name) != expected["sha256"]:
                raise CorruptCheckpoint(f"{path / name}: its checksum is wrong")
        with np.load(path / "arrays.npz", allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return Checkpoint(path, arrays, json.loads((path / "state.json").read_text()))
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{error.filename}: missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise CorruptCheckpoint(f"{path}: unreadable ({error})") from None


def _manifest(path: Path) -> Dict[str, dict]:
    """File -> its size and checksum."""
    file = path / "manifest.json"
    try:
        manifest = json.loads(file.read_text())
        written, files = manifest["format"], manifest["files"]
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{file}: missing") from None
    except (IsADirectoryError, ValueError, KeyError, TypeError):
        raise CorruptCheckpoint(f"{file}: not a manifest") from None
    if written != FORMAT:
        raise UserError(f"{path}: written in format {written}, this version reads format {FORMAT}")
    return files


def read_chosen(path: Path) -> Checkpoint:
    """Reads the checkpoint that a user named. Raises UserError when it is damaged."""
    try:
        return read(path)
    except CorruptCheckpoint as error:
        raise UserError(f"{error}; the run folder itself resumes from the newest checkpoint that is whole") from None


class Folder:
    """The checkpoints of a run: writes, finds and thins them out.

    reads_only: touch nothing, since the training may be running.
    """

    def __init__(self, path: Path, keep: int = 3, reads_only: bool = False):
        self.path, self._keep = Path(path), keep
        if not reads_only:
            repair(self.path)

    def save(self, update: int, arrays: Dict[str, np.ndarray], state: dict, best: bool) -> Path:
        """Writes a checkpoint, marks it as the latest and perhaps the best, and drops those no longer kept.

        Raises TrainingError when the disk does not take it; what was there stays.
        """
        path = self.path / f"update-{update:08d}"
        try:
            write(path, arrays, {**state, "best": best})
            _point(self.path / "latest", path.name)
            if best:
                _point(self.path / "best", path.name)
        except OSError as error:
            kept = self.names()
            rest = f"; the last good one is {self.path / kept[-1]}" if kept else ""
            raise TrainingError(f"cannot write checkpoint {path}: {error.strerror or error}{rest}") from None
        for name in self.names()[:-self._keep]:
            if name != self.pointed("best"):
                with suppress(OSError):
                    _remove(self.path / name)
        return path

    def names(self) -> List[str]:
        """Names of the checkpoints, oldest first."""
        found = [entry for entry in os.listdir(self.path) if _NAME.match(entry)] if self.path.is_dir() else []
        return sorted(found, key=_update)

    def pointed(self, pointer: str) -> Optional[str]:
        """The name of the checkpoint that "latest" or "best" points to."""
        try:
            name = (self.path / pointer).read_text().strip()
        except OSError:
            return None
        return name if name in self.names() else None

    def newest(self) -> Checkpoint:
        """The newest checkpoint that is whole; damaged ones are named in a warning and passed over."""
        for name in reversed(self.names()):
            try:
                return read(self.path / name)
            except CorruptCheckpoint as error:
                _log.warning("%s; going back to the checkpoint before it", error)
        raise UserError(f"{self.path}: no usable checkpoint")

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """Makes a checkpoint the latest, and the best if it was, for a training that goes on from it.

        Whoever wrote it may have died before it had done so. Those of later updates belong to a course that is left.
        """
        self._discard_after(_update(checkpoint.path.name))
        _point(self.path / "latest", checkpoint.path.name)
        if checkpoint.state["best"]:
            _point(self.path / "best", checkpoint.path.name)

    def _discard_after(self, update: int) -> None:
        for name in self.names():
            if _update(name) > update:
                _log.info("removing %s, which is past the checkpoint that the run goes on from", self.path / name)
                _remove(self.path / name)


def find(path: str) -> Tuple[Path, Optional[Path]]:
    """(run folder, checkpoint folder or None) for what a user names: a run folder or a checkpoint in it."""
    given = Path(path)
    if not given.exists():
        raise UserError(f"{path}: no such run folder")
    if _NAME.match(given.name) and given.is_dir():
        return given.resolve().parent.parent, given
    if not (given / "config.yaml").is_file():
        raise UserError(f"{path}: not a run folder (it has no config.yaml)")
    return given, None


def repair(path: Path) -> None:
    """Cleans up after a process that died while it wrote a checkpoint."""
    if not path.is_dir():
        return
    for entry in os.listdir(path):
        if entry.startswith(".old-") and not (path / entry[len(".old-"):]).exists():
            os.replace(path / entry, path / entry[len(".old-"):])
        elif entry.startswith((".new-", ".old-", ".gone-")):
            shutil.rmtree(path / entry, ignore_errors=True)


def _remove(path: Path) -> None:
    """Removes a checkpoint, which loses its name first: whoever dies on the way leaves none that is not whole."""
    gone = path.with_name(f".gone-{path.name}")
    os.replace(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _update(name: str) -> int:
    return int(_NAME.match(name).group(1))


def _point(pointer: Path, name: str) -> None:
    temporary = pointer.with_name(f".{pointer.name}")
    temporary.write_text(name + "\n")
    flush(temporary)
    os.replace(temporary, pointer)
    flush(pointer.parent)
