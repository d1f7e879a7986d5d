"""The samples that a trained network is evaluated on: its run's own, or others with the same classes."""

from __future__ import annotations

import functools
import logging
import os
from typing import NamedTuple, Optional

import numpy as np
from mxnet import gluon

from mxtrain.data import folder
from mxtrain.data.datasets import transformed
from mxtrain.data.delivery import by
from mxtrain.data.settings import DataConfig
from mxtrain.data.sources import Data, is_image_folder, labelled_files, open_data
from mxtrain.errors import UserError
from mxtrain.inference.adapt import adapt
from mxtrain.inference.load import Trained

_log = logging.getLogger("mxtrain")


class Samples(NamedTuple):
    """A dataset whose images have the shape and intensities that the run was trained on."""

    name: str
    dataset: gluon.data.Dataset
    outputs: np.ndarray
    """Label in the dataset -> output of the network, (labels,) int32."""


def open_samples(path: Optional[str], run: Trained) -> Samples:
    """The validation part of `path` where it has one, else all of it; by default the run's own validation samples.

    Classes are matched by name. Raises UserError when nothing is found, and for a class that the network does
    not know.
    """
    if path is None or _same_place(path, run.settings.data.data):
        samples = _own(run)
    elif is_image_folder(path):
        samples = _image_folder(path, run)
    else:
        samples = _arrays(path, run)
    _log.info("evaluating on %d images: %s", len(samples.dataset), samples.name)
    return samples


def _own(run: Trained) -> Samples:
    config = run.settings.data
    data = open_data(config)
    for note in data.notes[1:]:  # the first counts all samples
        _log.info("%s", note)
    if data.val is None:
        raise UserError(f"--data {config.data}: the run was trained without validation samples; give others")
    if (tuple(data.shape), data.peak) != (tuple(run.pixels.shape), run.pixels.peak):
        raise UserError(f"--data {config.data}: its images are {by(data.shape)} now, the run was trained on "
                        f"{by(run.pixels.shape)}")
    if data.fingerprint != run.fingerprint:
        _log.warning("%s has changed since the run was trained: its validation part may be another", config.data)
    name = f"the validation part of {config.data}" if config.val is None else config.val
    return Samples(name, data.val, _outputs(data, config.data, run))


def _image_folder(path: str, run: Trained) -> Samples:
    part = folder.scan(folder.evaluation_part(os.path.expanduser(path)))
    for note in [*part.notes(), *folder.check_val_classes(part, run.classes)]:
        _log.info("%s", note)
    dataset = transformed(labelled_files(part.images, run.classes), _adapter(run, peak=255))
    return Samples(part.root, dataset, np.arange(len(run.classes), dtype=np.int32))


def _arrays(path: str, run: Trained) -> Samples:
    # Without a validation part there is nothing to be held out here.
    data = open_data(DataConfig(data=path, val_split=0.0, augment="none"))
    name = path if data.val is None else f"the validation part of {path}"
    dataset = data.train if data.val is None else data.val
    if (tuple(data.shape), data.peak, run.pixels.resize) != (tuple(run.pixels.shape), run.pixels.peak, None):
        dataset = transformed(dataset, _adapter(run, data.peak))
    return Samples(name, dataset, _outputs(data, path, run))


def _adapter(run: Trained, peak: int):
    return functools.partial(_adapt, pixels=run.pixels, peak=peak)


def _adapt(image: np.ndarray, epoch: int, index: int, pixels, peak: int) -> np.ndarray:
    return adapt(image, pixels, peak)


def _outputs(data: Data, path: str, run: Trained) -> np.ndarray:
    place = {name: output for output, name in enumerate(run.classes)}
    unknown = [name for name in data.classes if name not in place]
    if unknown:
        raise UserError(f"--data {path}: the network does not know the class {unknown[0]!r}; it knows "
                        + ", ".join(map(repr, run.classes[:10])) + (", ..." if len(run.classes) > 10 else ""))
    return np.array([place[name] for name in data.classes], np.int32)


def _same_place(path: str, other: str) -> bool:
    if "digits" in (path, other):
        return path == other
    return os.path.realpath(os.path.expanduser(path)) == os.path.realpath(os.path.expanduser(other))
