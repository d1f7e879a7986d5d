"""One start of a training: with a new run folder, in an old one, or with none."""

from __future__ import annotations

import logging
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from mxtrain import config
from mxtrain.errors import UserError
from mxtrain.launch import worker
from mxtrain.parallel.world import IN_PROCESS
from mxtrain.train import checkpoint, folder

_log = logging.getLogger("mxtrain")


class Place(NamedTuple):
    """What a training goes on from."""

    path: Path
    """The run folder."""
    chosen: Optional[Path]
    """The checkpoint that was named, None for the newest that is whole."""


def configure(given: Dict[str, Any], communicator=None) -> Tuple[SimpleNamespace, Optional[Place]]:
    """The settings for what was given, joined with those of the run to be resumed. Imports no mxnet.

    communicator: of several processes, of which only rank 0 needs to see the run.
    """
    if communicator is None or communicator.size == 1:
        values, place = _joined(given)
    else:
        _check_alike(given, communicator)
        mine = communicator.together(lambda: _joined(given) if communicator.rank == 0 else (None, None))
        values, place = communicator.share([mine[0], mine[1] and [str(path) if path else None for path in mine[1]]])
        place = place and Place(*(path and Path(path) for path in place))
        return communicator.together(lambda: config.build(values)), place
    return config.build(values), place


def _check_alike(given: Dict[str, Any], communicator) -> None:
    """Raises UserError for a setting that this process was given and rank 0 was not, or the other way round."""
    # Of the folder of the run only rank 0 takes note.
    mine = {name: value for name, value in given.items() if name not in ("out", "resume")}

    def mistake(expected: Dict[str, Any]) -> str:
        name = next(name for name in (*mine, *expected) if mine.get(name) != expected.get(name))
        return (f"--{name.replace('_', '-')} {mine.get(name)}: for rank {communicator.rank}, and {expected.get(name)} "
                "for rank 0; all processes are given the same settings")

    communicator.check_same(mine, mistake)


def threads_of_run(given: Dict[str, Any]) -> Optional[int]:
    """Threads per CPU context of the run to be resumed, where there is one and it can be seen from here."""
    path = worker.folder_to_resume() or given.get("resume")
    if not path:
        return None
    try:
        return config.load(checkpoint.find(str(path))[0] / "config.yaml").get("threads")
    except UserError:  # it is said where the run is needed, which is rank 0
        return None


def _joined(given: Dict[str, Any]) -> Tuple[Dict[str, Any], Optional[Place]]:
    begun = worker.folder_to_resume()
    if begun is not None:  # launch.py starts the same command again
        given = {**given, **_again(given, begun)}
    if not given.get("resume"):
        return given, None
    place = Place(*checkpoint.find(given["resume"]))
    if given.get("out") is not None and Path(given["out"]).resolve() != place.path.resolve():
        raise UserError(f"--out {given['out']}: has no effect with --resume, which goes on in {place.path}")
    return config.resume_values(config.load(place.path / "config.yaml"), given), place


def _again(given: Dict[str, Any], begun: Path) -> Dict[str, Any]:
    """What to give for the run that this launch has begun before: its last checkpoint, or nothing, in its folder."""
    out = given.get("out")
    if out is not None and Path(out).resolve() != begun.resolve():  # another training of the same script
        return {}
    if given.get("resume") or checkpoint.Folder(begun / "checkpoints", reads_only=True).names():
        return {"resume": str(begun), "out": None}
    _log.warning("%s: there is no checkpoint of the start before; the run begins anew", begun)
    shutil.rmtree(begun, ignore_errors=True)
    return {"resume": None, "out": str(begun)}


def carry_out(run, settings: SimpleNamespace, place: Optional[Place], new_folder: Callable[[], Optional[Path]],
              callbacks: Sequence = (), describe: Callable[[], None] = lambda: None,
              signals: bool = False) -> Optional[Path]:
    """Trains a run that has been set up, and returns its folder.

    new_folder: makes one, or returns None to write nothing; not called on a resume. describe: writes and logs what is
    about to be trained. signals: let SIGINT, SIGTERM and SIGHUP save and raise Stopped.
    """
    from mxtrain.callbacks.base import Callbacks  # from here on mxnet is needed
    from mxtrain.train.loop import save, train
    from mxtrain.train.relay import Relay
    from mxtrain.train import tracing
    from mxtrain.train.setup import start_alike

    communicator, writes = run.communicator, run.communicator.rank == 0
    if place:
        path, notes = place.path, _resume(run, settings, place)
    else:
        made = communicator.together(lambda: new_folder() if writes else None)
        path, notes = communicator.share(made and str(made)), []
        path = path and Path(path)
    if run.state.finished:
        return path
    if path is not None:
        settings.train.out, settings.train.resume = str(path), None
    if path is not None and not place and writes:
        run.checkpoints = checkpoint.Folder(path / "checkpoints", settings.train.keep)
    with ExitStack() as stack:
        def begin() -> None:
            if path is not None:
                with folder.naming(path):
                    config.save(path / "config.yaml", _to_keep(settings), notes)
                    stack.callback(folder.close_log, folder.log_to(path))
            describe()
            if path is not None:
                worker.announce_run(path)

        communicator.together(begin if writes else lambda: None)
        for note in notes:
            _log.info("%s", note)
        run.callbacks = Callbacks([*([Relay(communicator)] if path and communicator.size > 1 else []),
                                   *(_file_callbacks(settings, path) if path and writes else []), *callbacks])
        stack.callback(run.callbacks.close)
        if signals:
            stack.enter_context(run.signals)
        if settings.parallel.trace:
            tracing.plan(run, path)
        began = time.monotonic()
        if not place:
            start_alike(run)
        run.layout.forget_others()
        if not place:
            save(run)  # so that a run can be resumed from its very start, and a full disk shows now
        train(run)
        if run.trace_at is not None and run.state.update < run.trace_at:
            _log.warning("--trace: nothing was drawn, since this start made fewer than two updates")
        _log.info("%s (%.1f s)", run.state.finished, time.monotonic() - began)
    return path


def _to_keep(settings: SimpleNamespace) -> Dict[str, Any]:
    """What config.yaml says, so that it makes the same run anew, here or elsewhere: not in which folder, which may be
    moved, nor how the processes met, of which the next start may have others, nor what is drawn of one start."""
    values = config.flatten(settings)
    kvstore = values["kvstore"] if values["kvstore"] in IN_PROCESS else None
    return {**values, "out": None, "kvstore": kvstore, "staleness": None, "dp": None, "trace": False}


def _resume(run, settings, place: Place) -> List[str]:
    """Restores the run; returns the lines that say what is new. A run that is over has `finished` set."""
    from mxtrain.train.state import distribute, restore, restore_residuals

    def read():
        run.checkpoints = checkpoint.Folder(place.path / "checkpoints", settings.train.keep)
        return checkpoint.read_chosen(place.chosen) if place.chosen else run.checkpoints.newest()

    communicator = run.communicator
    loaded = distribute(communicator, communicator.together(read if communicator.rank == 0 else lambda: None))
    communicator.together(lambda: restore(run, loaded))
    restore_residuals(run, loaded)
    state = run.state
    if state.epoch >= run.epochs or run.monitor.exhausted:
        state.finished = state.finished or f"{state.epoch} epochs are done, --epochs {run.epochs} asks for no more"
        _log.info("%s is finished: %s", place.path, state.finished)
        return []
    state.finished = None

    def go_on() -> List[str]:
        with folder.naming(place.path):
            run.checkpoints.go_on_from(loaded)
        before, now = config.load(place.path / "config.yaml"), config.flatten(settings)
        return [f"resumed after update {state.update} (epoch {state.epoch + 1}, batch {state.batch})",
                *(f"from update {state.update + 1} on: {name} {now[name]} (was {before.get(name)})"
                  for name in sorted(config.RENEWABLE) if now[name] != before.get(name))]

    return communicator.together(go_on if communicator.rank == 0 else lambda: [])


def _file_callbacks(settings, path: Path) -> list:
    from mxtrain.callbacks.curves import Curves
    from mxtrain.callbacks.events import Events
    from mxtrain.callbacks.table import Table

    return [Table(path / "metrics.csv"), *([Events(path)] if settings.train.tensorboard else []),
            *([Curves(path)] if settings.train.plots else [])]
