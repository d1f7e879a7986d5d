"""Classification of images."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, HybridBlock, loss

from mxtrain.data.loader import loaders
from mxtrain.data.sources import Data, open_data
from mxtrain.errors import UserError
from mxtrain.models import zoo
from mxtrain.tasks.heads import LabelSmoothing
from mxtrain.tasks.start import freeze, start

_log = logging.getLogger("mxtrain")

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Pixels(NamedTuple):
    """How pixels become a network's input; saved with a run, so that predictions see what training saw."""

    shape: Tuple[int, int, int]
    """Height, width, channels of an image."""
    channels: int
    """Channels of the network's input; a grey image is repeated."""
    peak: int
    """The value of full intensity."""
    mean: Sequence[float]
    std: Sequence[float]
    """Of each channel, for intensities from 0 to 1."""
    resize: Optional[int] = None
    """Shorter side that an image is scaled to before its center is cut out; None: the shape's own."""


class Normalize(HybridBlock):
    """uint8 (rows, height, width, channels) -> float32 (rows, channels, height, width), normalized by channel."""

    def __init__(self, pixels: Pixels):
        super().__init__(prefix="")
        self._repeats = pixels.channels // pixels.shape[2]
        # x / peak - mean, all over std, as one multiplication and one addition.
        std = np.array(pixels.std, "float64")
        self._scale = tuple((1 / (pixels.peak * std)).tolist())
        self._shift = tuple((-np.array(pixels.mean) / std).tolist())

    def hybrid_forward(self, F, x):
        x = F.transpose(F.cast(x, "float32"), axes=(0, 3, 1, 2))
        if self._repeats > 1:
            x = F.repeat(x, repeats=self._repeats, axis=1)
        if len(set(self._scale)) == 1 and len(set(self._shift)) == 1:
            return x * self._scale[0] + self._shift[0]
        channels = (F.slice_axis(x, axis=1, begin=c, end=c + 1) * scale + shift
                    for c, (scale, shift) in enumerate(zip(self._scale, self._shift)))
        return F.concat(*channels, dim=1)


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


def pixels_for(data: Data, model: str, pretrained: bool) -> Pixels:
    """Zoo networks get 3 channels; color images, and what pretrained networks see, ImageNet's mean and deviation."""
    channels = zoo.wants_channels(model) or data.shape[2]
    if channels % data.shape[2]:
        raise UserError(f"--model {model} takes {channels} channels, the images have {data.shape[2]}")
    if channels == 3 and (data.shape[2] == 3 or pretrained):
        mean, std = _IMAGENET_MEAN, _IMAGENET_STD
    else:
        mean, std = (0.5,) * channels, (0.5,) * channels
    return Pixels(tuple(data.shape), channels, data.peak, mean, std, data.resize)


def preprocess(pixels: Pixels) -> HybridBlock:
    """A compiled Normalize."""
    block = Normalize(pixels)
    block.hybridize()
    return block
