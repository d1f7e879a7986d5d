"""Classification of images."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, loss

from mxtrain.data.loader import loaders
from mxtrain.data.sources import open_data
from mxtrain.errors import UserError
from mxtrain.models import zoo
from mxtrain.tasks.heads import LabelSmoothing
from mxtrain.tasks.pixels import pixels_for, preprocess
from mxtrain.tasks.start import freeze, start

_log = logging.getLogger("mxtrain")


class ImageTask:
    """Data, network and loss for a configuration. Raises UserError for what does not fit together.

    resumed: the weights will come from a checkpoint, and the files of the starting weights need not be there any more.
    """

    scores = None

    def __init__(self, settings: SimpleNamespace, resumed: bool = False):
        model, train = settings.model, settings.train
        self.data = data = open_data(settings.data, train.seed)
        for note in data.notes:
            _log.info("%s", note)
        model.model = model.model or zoo.default_name(data.shape)
        self.classes = data.classes
        self.pixels = pixels_for(data, model.model, model.pretrained)
        self.net = zoo.create(model.model, len(data.classes), self.pixels.channels)
        self.preprocess = preprocess(self.pixels)
        self.evaluation_loss = loss.SoftmaxCrossEntropyLoss()
        self.loss = LabelSmoothing(train.label_smoothing) if train.label_smoothing else self.evaluation_loss
        self.train_data, self.val_data = loaders(data.train, data.val, settings.data, train.batch_size, train.seed)
        self._model, self._resumed = model, resumed

    @property
    def name(self) -> str:
        """For the run folder."""
        return f"{self.data.name}-{self._model.model.replace(':', '-').replace('/', '-')}"

    def input(self) -> dict:
        """How data become the network's input, as JSON."""
        return {"kind": "image", **self.pixels._asdict()}

    def close(self) -> None:
        """Stops the loaders' workers."""
        for loader in (self.train_data, self.val_data):
            if loader is not None:
                loader.close()

    def sample(self) -> list:
        """(images, labels) of two made-up rows."""
        images = np.random.RandomState(0).randint(0, self.pixels.peak + 1, (2, *self.pixels.shape)).astype("uint8")
        return [images, np.zeros(2, "int32")]

    def prepare(self, net: Block) -> None:
        """Starting weights and frozen parameters of an initialized network."""
        if not self._resumed:
            start(net, self._model)
        freeze(net, self._model)

    def check_output(self, output: mx.nd.NDArray) -> None:
        if output.ndim != 2 or output.shape[1] != len(self.classes):
            raise UserError(f"--model {self._model.model}: gives {output.shape[1:]} values per image; "
                            f"{len(self.classes)} are needed, one per class")
