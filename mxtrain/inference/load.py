"""A trained network, opened for use: from its run folder and nothing else."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import List, NamedTuple, Optional, Sequence, Tuple, Union

import mxnet as mx
from mxnet.gluon import Block

from mxtrain import config
from mxtrain.errors import UserError
from mxtrain.inference import description
from mxtrain.inference.settings import RunConfig
from mxtrain.models import weights, zoo
from mxtrain.tasks.pixels import Pixels, preprocess
from mxtrain.tasks.text import Words
from mxtrain.train import checkpoint
from mxtrain.train.setup import initialize
from mxtrain.train.state import load_weights

_log = logging.getLogger("mxtrain")


class Trained(NamedTuple):
    """A network and what one must know to use it."""

    net: Block
    """With the checkpoint's weights on all contexts, and without gradients."""
    classes: List[str]
    """Names by output."""
    input: Union[Pixels, Words]
    """How images, or texts, become its input."""
    settings: SimpleNamespace
    """Those that the run was trained with."""
    checkpoint: Path
    fingerprint: Optional[str]
    """Of the data that it was trained on."""

    @property
    def kind(self) -> str:
        """text or image."""
        return "text" if isinstance(self.input, Words) else "image"

    def preprocess(self) -> Optional[Block]:
        """What makes the network's input of a batch of the data, on the device; None when nothing has to."""
        return None if self.kind == "text" else preprocess(self.input)

    def origin(self) -> dict:
        """What --json tells about where the network comes from."""
        return {"run": str(self.checkpoint.parent.parent), "checkpoint": self.checkpoint.name}


def load(which: RunConfig, contexts: Sequence[mx.Context]) -> Trained:
    """Opens a run of train.py. Needs none of the devices that it was trained on, and reads no data.

    Raises UserError for a folder that is none, a checkpoint that is missing or damaged, and a network that is
    not the one that was trained.
    """
    place, found = _checkpoint(which)
    about = description.read(place)
    classes, how = about.classes, _input(about, place)
    settings = config.build(config.load(place / "config.yaml"))
    name, count = settings.model.model, len(classes)
    net = zoo.create_text(name, count, how.buckets) if isinstance(how, Words) else zoo.create(name, count, how.channels)
    net.collect_params().setattr("grad_req", "null")
    initialize(net, list(contexts), 0)
    parameters = weights.parameters(net)
    load_weights(parameters, found)
    for parameter in parameters.values():
        parameter._finish_deferred_init()  # now that its shape is known; it need not wait for a first batch
    _log.info("%s: %s, %d classes, after %d updates", found.path, settings.model.model, len(classes),
              found.state["position"]["update"])
    return Trained(net, classes, how, settings, found.path, found.state["data"])


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


def _input(found: description.Description, place: Path) -> Union[Pixels, Words]:
    try:
        return (Words if found.kind == "text" else Pixels)(**found.values)
    except TypeError as error:
        raise description.unreadable(place, error) from None
