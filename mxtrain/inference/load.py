"""A trained network, opened for use: from its run folder and nothing else."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
from mxnet.gluon import Block

from mxtrain import config
from mxtrain.errors import UserError
from mxtrain.inference.settings import RunConfig
from mxtrain.models import weights, zoo
from mxtrain.tasks.image import Pixels
from mxtrain.train import checkpoint, folder
from mxtrain.train.setup import initialize
from mxtrain.train.state import load_weights

_log = logging.getLogger("mxtrain")


class Trained(NamedTuple):
    """A network and what one must know to use it."""

    net: Block
    """With the checkpoint's weights on all contexts, and without gradients."""
    classes: List[str]
    """Names by output."""
    pixels: Pixels
    settings: SimpleNamespace
    """Those that the run was trained with."""
    checkpoint: Path
    fingerprint: Optional[str]
    """Of the data that it was trained on."""

    def origin(self) -> dict:
        """What --json tells about where the network comes from."""
        return {"run": str(self.checkpoint.parent.parent), "checkpoint": self.checkpoint.name}


def load(which: RunConfig, contexts: Sequence[mx.Context]) -> Trained:
    """Opens a run of train.py. Needs none of the devices that it was trained on, and reads no data.

    Raises UserError for a folder that is none, a checkpoint that is missing or damaged, and a network that is
    not the one that was trained.
    """
    place, found = _checkpoint(which)
    classes, pixels = _classes_and_pixels(place)
    settings = config.build(config.load(place / "config.yaml"))
    net = zoo.create(settings.model.model, len(classes), pixels.channels)
    net.collect_params().setattr("grad_req", "null")
    initialize(net, list(contexts), 0)
    parameters = weights.parameters(net)
    load_weights(parameters, found)
    for parameter in parameters.values():
        parameter._finish_deferred_init()  # now that its shape is known; it need not wait for a first batch
    _log.info("%s: %s, %d classes, after %d updates", found.path, settings.model.model, len(classes),
              found.state["position"]["update"])
    return Trained(net, classes, pixels, settings, found.path, found.state["data"])


def _checkpoint(which: RunConfig) -> Tuple[Path, checkpoint.Checkpoint]:
    """(run folder, checkpoint)."""
    place, named = checkpoint.find(which.run)
    if named is not None:
        if which.checkpoint is not None:
            raise UserError(f"--checkpoint {which.checkpoint}: --run {which.run} is one checkpoint; give the run "
                            "folder")
        return place, _read(named)
    kept = checkpoint.Folder(place / "checkpoints", reads_only=True)
    if which.checkpoint == "latest":
        return place, kept.newest()
    name = which.checkpoint or "best"
    if name == "best":
        name = kept.pointed("best")
        if name is None:
            raise UserError(f"--run {which.run}: has no best checkpoint, which it gets with its first complete "
                            "epoch; --checkpoint latest takes the newest")
    if name not in kept.names():
        raise UserError(f"--checkpoint {name}: must be one of {', '.join(['best', 'latest', *kept.names()])}")
    return place, _read(kept.path / name)


def _read(path: Path) -> checkpoint.Checkpoint:
    try:
        return checkpoint.read(path)
    except checkpoint.CorruptCheckpoint as error:
        raise UserError(f"{error}; --checkpoint latest takes the newest that is whole") from None


def _classes_and_pixels(place: Path) -> Tuple[List[str], Pixels]:
    for name in ("classes.txt", "input.json"):
        if not (place / name).is_file():
            raise UserError(f"{place}: has no {name}; only runs of train.py, which makes the network itself, can "
                            "be opened")
    try:
        return folder.read_classes(place), Pixels(**json.loads((place / "input.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{place}: classes.txt or input.json cannot be read ({error})") from None
