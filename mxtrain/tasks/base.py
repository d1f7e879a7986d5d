"""What all tasks have in common."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, Callable, List

import mxnet as mx
from mxnet.gluon import Block, loss

from mxtrain.data.loader import loaders
from mxtrain.data.workers import everything
from mxtrain.errors import UserError
from mxtrain.models import plan, weights
from mxtrain.tasks.heads import LabelSmoothing

_log = logging.getLogger("mxtrain")


class Classification:
    """Data, network and loss for a configuration. Raises UserError for what does not fit together.

    A kind of data gives its `noun`, `_open` (the data: train, val, classes, fingerprint, name, notes), `_make` (sets
    what belongs to the kind and returns the network), `input` and `sample`.

    resumed: the weights will come from a checkpoint, and the files of the starting weights need not be there any more.
    part: of a batch's rows those that this process reads; see Loader.
    """

    noun: str
    """What a sample is called."""
    preprocess = None
    """Block that makes inputs of what the data give, on the devices."""
    scores = None
    """Makes what counts the values of an evaluation that are no means; None where there are none."""
    values: Callable[[dict], dict] = dict
    """Means -> all values that follow from them."""

    def __init__(self, settings: SimpleNamespace, resumed: bool = False, part: Callable = everything):
        self._model, self._resumed = settings.model, resumed
        self.data = self._open(settings)
        for note in self.data.notes:
            _log.info("%s", note)
        self.classes: List[str] = self.data.classes
        self.net: Block = self._make(settings)
        self.evaluation_loss = loss.SoftmaxCrossEntropyLoss()
        smoothing, train = settings.train.label_smoothing, settings.train
        self.loss = LabelSmoothing(smoothing) if smoothing else self.evaluation_loss
        self.train_data, self.val_data = loaders(self.data.train, self.data.val, settings.data, train.batch_size,
                                                 train.seed, part)

    @property
    def name(self) -> str:
        """For the run folder."""
        return f"{self.data.name}-{self._model.model.replace(':', '-').replace('/', '-')}"

    def input(self) -> dict:
        """How data become the network's input, as JSON."""
        raise NotImplementedError

    def sample(self) -> list:
        """(inputs, labels) of two made-up rows."""
        raise NotImplementedError

    def prepare(self, net: Block) -> None:
        """Starting weights and frozen parameters of an initialized network."""
        model = self._model
        if not self._resumed:
            _start(net, model)
        if model.freeze:
            frozen = weights.freeze(net, model.freeze)
            _log.info("--freeze: %d of %d parameters keep their values", len(frozen), len(weights.parameters(net)))

    def check_output(self, output: mx.nd.NDArray) -> None:
        """Raises UserError for a network that does not give one value per class."""
        if output.ndim != 2 or output.shape[1] != len(self.classes):
            raise UserError(f"--model {self._model.model}: gives {output.shape[1:]} values per {self.noun}; "
                            f"{len(self.classes)} are needed, one per class")

    def close(self) -> None:
        """Stops the loaders' workers."""
        for loader in (self.train_data, self.val_data):
            if loader is not None:
                loader.close()

    def _open(self, settings: SimpleNamespace) -> Any:
        raise NotImplementedError

    def _make(self, settings: SimpleNamespace) -> Block:
        raise NotImplementedError


def _start(net: Block, model) -> None:
    """Applies the starting weights of a ModelConfig to an initialized network."""
    if model.zero_gamma:
        _log.info("--zero-gamma: %d residual blocks start as the identity", len(weights.zero_gamma(net)))
    if model.pretrained:
        weights.pretrained(net, model.model, model.pretrained_root)
    if model.init_from:
        weights.init_from(net, model.init_from)
        for one, other in plan.tied(net):
            if (one.list_data()[0] != other.list_data()[0]).sum().asscalar():
                _log.warning("--init-from %s: %s takes the values of %s, since both are one weight here", model.init_from,
                             other.name, one.name)
