"""How pixels become the input of a network."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence, Tuple

import cv2
import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock

from mxtrain.data.sources import Data
from mxtrain.errors import UserError
from mxtrain.models import zoo
from mxtrain.parallel.exact import memory

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_ROWS_AT_ONCE = 32  # few calls, since each lets the interpreter go and must get it back, and little memory


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
    """uint8 (rows, height, width, channels) -> float32 (rows, channels, height, width), normalized by channel.

    On CPU contexts `on_host` does the same in a fifth of the time of MXNet's operators. It takes each value from a
    table, rounded once; the operators round twice, so they may differ in the last bit.
    """

    def __init__(self, pixels: Pixels):
        super().__init__(prefix="")
        self._repeats = pixels.channels // pixels.shape[2]
        # x / peak - mean, all over std, as one multiplication and one addition.
        std = np.array(pixels.std, "float64")
        self._scale = tuple((1 / (pixels.peak * std)).tolist())
        self._shift = tuple((-np.array(pixels.mean) / std).tolist())
        values = np.arange(256)[:, np.newaxis] * np.array(self._scale) + np.array(self._shift)
        self._tables = list(np.ascontiguousarray(values.T, "float32"))

    def hybrid_forward(self, F, x):
        x = F.transpose(F.cast(x, "float32"), axes=(0, 3, 1, 2))
        if self._repeats > 1:
            x = F.repeat(x, repeats=self._repeats, axis=1)
        if len(set(self._scale)) == 1 and len(set(self._shift)) == 1:
            return x * self._scale[0] + self._shift[0]
        channels = (F.slice_axis(x, axis=1, begin=c, end=c + 1) * scale + shift
                    for c, (scale, shift) in enumerate(zip(self._scale, self._shift)))
        return F.concat(*channels, dim=1)

    def on_host(self, x: np.ndarray, ctx: mx.Context) -> mx.nd.NDArray:
        """The output for images on the host, on a CPU context."""
        rows, height, width, channels = x.shape
        output = mx.nd.empty((rows, len(self._tables), height, width), ctx)
        values = memory(output).reshape(rows, len(self._tables), height * width)
        for first in range(0, rows, _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            planes = np.ascontiguousarray(x[part].reshape(-1, height * width, channels).transpose(2, 0, 1))
            for c, table in enumerate(self._tables):
                cv2.LUT(planes[c // self._repeats], table, values[part, c])
        return output


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
