"""Texts that a language model is evaluated on: the end of its run's own, or another one."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np

from mxtrain.data.tokens import open_sequences, open_tokens
from mxtrain.errors import UserError
from mxtrain.inference.load import Trained
from mxtrain.inference.samples import Samples, same_place
from mxtrain.inference.settings import EvaluateConfig

_log = logging.getLogger("mxtrain")


def open_language_samples(settings: EvaluateConfig, run: Trained) -> Samples:
    """The run's own validation sequences, or all sequences of another file. UserError for what is about classes."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name != "data" and value != field.default:
            flag = f"--{field.name.replace('_', '-')}" + ("" if value is True else f" {value}")
            raise UserError(f"{flag}: the run is a language model")
    length = run.input.context
    if settings.data is None or same_place(settings.data, run.settings.data.data):
        name, dataset, notes = _own(run, length)
    else:
        name, (dataset, notes) = settings.data, open_sequences("--data", settings.data, length)
    for note in notes:
        _log.info("%s", note)
    _log.info("evaluating on %d sequences of %d tokens: %s", len(dataset), length, name)
    return Samples(name, dataset, np.arange(len(run.classes), dtype=np.int32))


def _own(run: Trained, length: int) -> tuple:
    """(name, dataset, notes)."""
    config = run.settings.data
    data = open_tokens(config, length)
    if data.val is None:
        raise UserError(f"--data {config.data}: the run was trained without validation; give another text")
    if data.fingerprint != run.fingerprint:
        _log.warning("%s has changed since the run was trained: its validation part may be another", config.data)
    return f"the validation part of {config.data}" if config.val is None else config.val, data.val, data.notes[1:]
