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
from mxtrain.tasks.language import Sequences
from mxtrain.tasks.pixels import Pixels, preprocess
from mxtrain.tasks.text import Words
from mxtrain.train import checkpoint
from mxtrain.train.setup import initialize
from mxtrain.train.state import load_weights

_log = logging.getLogger("mxtrain")


_INPUTS = {"image": Pixels, "text": Words, "lm": Sequences}


class Trained(NamedTuple):
    """A network and what one must know to use it."""

    net: Block
    """With the checkpoint's weights on all contexts, and without gradients."""
    classes: List[str]
    """Names by output."""
    input: Union[Pixels, Words, Sequences]
    """How images, texts or language become its input."""
    settings: SimpleNamespace
    """Those that the run was trained with."""
    checkpoint: Path
    fingerprint: Optional[str]
    """Of the data that it was trained on."""

    @property
    def kind(self) -> str:
        """image, text or lm."""
        return next(kind for kind, how in _INPUTS.items() if isinstance(self.input, how))

    def preprocess(self) -> Optional[Block]:
        """What makes the network's input of a batch of the data, on the device; None when nothing has to."""
        return preprocess(self.input) if self.kind == "image" else None

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
    net = _network(settings, len(classes), how)
    net.collect_params().setattr("grad_req", "null")
    initialize(net, list(contexts), 0)
    parameters = weights.parameters(net)
    load_weights(parameters, found)
    for parameter in parameters.values():
        parameter._finish_deferred_init()  # now that its shape is known; it need not wait for a first batch
    _log.info("%s: %s, %d %s, after %d updates", found.path, settings.model.model, len(classes),
              "tokens" if isinstance(how, Sequences) else "classes", found.state["position"]["update"])
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


def _network(settings: SimpleNamespace, classes: int, how: Union[Pixels, Words, Sequences]) -> Block:
    name = settings.model.model
    if isinstance(how, Sequences):
        return zoo.create_language(name, classes, settings.gpt, settings.experts)
    if isinstance(how, Words):
        return zoo.create_text(name, classes, how.buckets)
    return zoo.create(name, classes, how.channels)


def _input(found: description.Description, place: Path) -> Union[Pixels, Words, Sequences]:
    try:
        return _INPUTS[found.kind](**found.values)
    except (KeyError, TypeError) as error:
        raise description.unreadable(place, error) from None
