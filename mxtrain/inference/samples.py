"""The samples that a trained network is evaluated on: its run's own, or others with the same classes."""

from __future__ import annotations

import functools
import logging
import os
from typing import Dict, NamedTuple, Optional, Sequence

import numpy as np
from mxnet import gluon

from mxtrain.data import folder
from mxtrain.data.datasets import transformed
from mxtrain.data.delivery import by
from mxtrain.data.parts import listed
from mxtrain.data.record_files import paths_of
from mxtrain.data.settings import DataConfig
from mxtrain.data.sources import is_image_folder, open_data, open_source, unused
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


def open_samples(path: Optional[str], run: Trained, **columns: Optional[str]) -> Samples:
    """The validation part of `path` where it has one, else all of it; by default the run's own validation samples.

    columns: data_root, image_column and label_column, for a list; see DataConfig.

    Classes are matched by name. Raises UserError when nothing is found, and for a class that the network does
    not know.
    """
    if path is None or same_place(path, run.settings.data.data):
        given = [name for name, value in columns.items() if value is not None]
        if given:
            raise UserError(f"--{given[0].replace('_', '-')}: the run's own data are read as it was trained on them")
        samples = _own(run)
    elif is_image_folder(path):
        samples = _image_folder(path, run, columns)
    else:
        samples = _stored(path, run, columns)
    _log.info("evaluating on %d images: %s", len(samples.dataset), samples.name)
    return samples


def _own(run: Trained) -> Samples:
    config = run.settings.data
    data = open_data(config)
    for note in data.notes[1:]:  # the first counts all samples
        _log.info("%s", note)
    if data.val is None:
        raise UserError(f"--data {config.data}: the run was trained without validation samples; give others")
    if (tuple(data.shape), data.peak) != (tuple(run.input.shape), run.input.peak):
        raise UserError(f"--data {config.data}: its images are {by(data.shape)} now, the run was trained on "
                        f"{by(run.input.shape)}")
    if data.fingerprint != run.fingerprint:
        _log.warning("%s has changed since the run was trained: its validation part may be another", config.data)
    name = f"the validation part of {config.data}" if config.val is None else config.val
    return Samples(name, data.val, outputs(data.classes, config.data, run))


def _image_folder(path: str, run: Trained, columns: Dict[str, Optional[str]]) -> Samples:
    part = folder.scan(folder.evaluation_part(os.path.expanduser(path)))
    idle = unused(DataConfig(data=path, **columns), "folder")
    for note in [*part.notes(), *folder.check_val_classes(part, run.classes), *idle]:
        _log.info("%s", note)
    dataset = transformed(folder.labelled_files(part.images, run.classes), _adapter(run, peak=255))
    return Samples(part.root, dataset, np.arange(len(run.classes), dtype=np.int32))


def _stored(path: str, run: Trained, columns: Dict[str, Optional[str]]) -> Samples:
    # Without a validation part there is nothing to be held out here.
    source = open_source(DataConfig(data=path, val_split=0.0, **columns))
    for note in source.notes:
        if not note.startswith("--val-split"):  # which nobody gave
            _log.info("%s", note)
    name = path if source.val is None else f"the validation part of {path}"
    dataset = source.train if source.val is None else source.val
    if (source.shape, source.peak, run.input.resize) != (tuple(run.input.shape), run.input.peak, None):
        dataset = transformed(dataset, _adapter(run, source.peak))
    return Samples(name, dataset, outputs(source.classes, path, run))


def _adapter(run: Trained, peak: int):
    return functools.partial(_adapt, pixels=run.input, peak=peak)


def _adapt(image: np.ndarray, epoch: int, index: int, pixels, peak: int) -> np.ndarray:
    return adapt(image, pixels, peak)


def outputs(classes: Sequence[str], path: str, run: Trained) -> np.ndarray:
    """Place in `classes` -> output of the network. Raises UserError for a class that it does not know."""
    place = {name: output for output, name in enumerate(run.classes)}
    unknown = [name for name in classes if name not in place]
    if unknown:
        raise UserError(f"--data {path}: the network does not know the class {unknown[0]!r}; it knows "
                        + listed(run.classes))
    return np.array([place[name] for name in classes], np.int32)


def same_place(path: str, other: str) -> bool:
    """Whether two values of --data name the same."""
    if "digits" in (path, other):
        return path == other
    return _place(path) == _place(other)


def _place(path: str) -> str:
    place = os.path.realpath(os.path.expanduser(path))
    record = paths_of(place).rec  # which may be named without its ending
    return record if os.path.isfile(record) and not os.path.isdir(place) else place
