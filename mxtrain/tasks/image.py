"""Classification of images."""

from __future__ import annotations

import numpy as np
from mxnet.gluon import Block

from mxtrain.data.sources import Data, open_data
from mxtrain.models import zoo
from mxtrain.tasks.base import Classification
from mxtrain.tasks.pixels import pixels_for, preprocess


class ImageTask(Classification):
    """See Classification."""

    noun = "image"

    def _open(self, settings) -> Data:
        return open_data(settings.data, settings.train.seed)

    def _make(self, settings) -> Block:
        model, data = settings.model, self.data
        model.model = model.model or zoo.default_name(data.shape)
        self.pixels = pixels_for(data, model.model, model.pretrained)
        self.preprocess = preprocess(self.pixels)
        return zoo.create(model.model, len(data.classes), self.pixels.channels)

    def input(self) -> dict:
        return {"kind": "image", **self.pixels._asdict()}

    def sample(self) -> list:
        images = np.random.RandomState(0).randint(0, self.pixels.peak + 1, (2, *self.pixels.shape)).astype("uint8")
        return [images, np.zeros(2, "int32")]
