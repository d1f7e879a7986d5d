"""Texts from elsewhere, as a network was trained to see them: to be classified, or to evaluate it on."""

from __future__ import annotations

import logging
from typing import Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from mxtrain.data.bags import Features, TextDataset, encode
from mxtrain.data.table import TEXT_COLUMNS, Table, find_column, has_column
from mxtrain.data.text import absent, check_known, dataset, labelled, open_table, open_texts
from mxtrain.errors import UserError
from mxtrain.inference.load import Trained
from mxtrain.inference.samples import Samples, outputs, same_place
from mxtrain.inference.settings import EvaluateConfig, PredictConfig

_log = logging.getLogger("mxtrain")


class Text(NamedTuple):
    """A text and its number from 1: of its row in the table, without the header and blank lines, or in the command."""

    row: int
    text: str


class Texts(TextDataset):
    """Items are (ids, number of the text from 0)."""

    def __init__(self, texts: Sequence[Text], how: Features):
        bags = encode((one.text for one in texts), how)
        super().__init__(bags, np.arange(len(texts)), how.max_tokens)
        for count, what in ((bags.cut, f"have more than {how.max_tokens} features and are cut"),
                            (bags.empty, "have no words")):
            if count:
                _log.info("%d of %d texts %s", count, len(texts), what)
        self._texts = texts
        self.failed: Dict[int, str] = {}
        """None: every text can be read."""

    def source(self, number: int) -> dict:
        return self._texts[number]._asdict()


def find_texts(path: Optional[str], settings: PredictConfig, run: Trained) -> List[Text]:
    """What predict.py is to classify: the texts of the command line, or those of a table."""
    if settings.text:
        return [Text(row, text) for row, text in enumerate(settings.text, 1)]
    table = open_table(path, settings.encoding or run.settings.text.encoding, "the table")
    for note in table.notes:
        _log.info("%s", note)
    column = _column(table, settings.text_column, run)
    _log.info("%s: %d texts in column %r", table.path, len(table.rows), table.columns[column])
    return [Text(row, fields[column]) for row, fields in enumerate(table.rows, 1)]


def _column(table: Table, given: Optional[str], run: Trained) -> int:
    given = _known(table, given, run.input.text_column)
    if given is None and len(table.columns) == 1 and not has_column(table.columns, TEXT_COLUMNS):
        raise UserError(f"{table.path}: its only column is {table.columns[0][:30]!r}, which may be a text itself: "
                        "--text-column says that it is the column's name; else add such a line above it")
    return find_column(table, given, TEXT_COLUMNS, "--text-column")


def open_text_samples(settings: EvaluateConfig, run: Trained) -> Samples:
    """The run's own validation texts, or all texts of another table, whose labels are matched by name.

    Raises UserError for a table without the columns, and for a class that the network does not know.
    """
    if settings.data is None or same_place(settings.data, run.settings.data.data):
        for flag in ("text_column", "label_column", "encoding"):
            if getattr(settings, flag) is not None:
                raise UserError(f"--{flag.replace('_', '-')} {getattr(settings, flag)}: has no effect; the run's own "
                                "data are read as in its training")
        samples = _own(run)
    else:
        samples = _others(settings, run)
    positive = f"; F1 is that of class {run.input.positive!r}" if run.input.positive else "; F1 is the classes' mean"
    _log.info("evaluating on %d texts: %s%s", len(samples.dataset), samples.name, positive)
    return samples


def _others(settings: EvaluateConfig, run: Trained) -> Samples:
    table = open_table(settings.data, settings.encoding or run.settings.text.encoding)
    found = labelled(table, _known(table, settings.text_column, run.input.text_column),
                     _known(table, settings.label_column, run.input.label_column))
    check_known(found, run.classes)
    samples, more = dataset(found, run.classes, run.input.features, "evaluated")
    for note in [*table.notes, *more, *absent(found, run.classes)]:
        _log.info("%s", note)
    return Samples(found.path, samples, np.arange(len(run.classes), dtype=np.int32))


def _own(run: Trained) -> Samples:
    config = run.settings.data
    data = open_texts(config, run.settings.text)
    for note in data.notes[1:]:  # the first counts all texts
        _log.info("%s", note)
    if data.val is None:
        raise UserError(f"--data {config.data}: the run was trained without validation texts; give others")
    if data.fingerprint != run.fingerprint:
        _log.warning("%s has changed since the run was trained: its validation part may be another", config.data)
    name = f"the validation part of {config.data}" if config.val is None else config.val
    return Samples(name, data.val, outputs(data.classes, config.data, run))


def _known(table: Table, given: Optional[str], trained: str) -> Optional[str]:
    """The column of the training where there is one of its name."""
    return trained if given is None and has_column(table.columns, [trained]) else given
