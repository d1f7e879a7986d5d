"""Classification of texts."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import NamedTuple, Optional

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, loss, nn

from mxtrain.data.bags import Features
from mxtrain.data.loader import loaders
from mxtrain.data.text import TextData, open_texts
from mxtrain.errors import UserError
from mxtrain.models import plan, zoo
from mxtrain.models.text import EmbeddingMean
from mxtrain.tasks.heads import LabelSmoothing
from mxtrain.tasks.scores import F1
from mxtrain.tasks.start import freeze, start

_log = logging.getLogger("mxtrain")


class Words(NamedTuple):
    """How texts become a network's input; saved with a run, so that predictions see what training saw."""

    ngrams: int
    buckets: int
    max_tokens: int
    text_column: str
    label_column: str
    positive: Optional[str]
    """The class whose F1 is told; None for the mean over all classes."""

    @property
    def features(self) -> Features:
        return Features(self.ngrams, self.buckets, self.max_tokens)


class TextTask:
    """Data, network and loss for a configuration; the same interface as ImageTask.

    Raises UserError for what does not fit together.
    """

    preprocess = None

    def __init__(self, settings: SimpleNamespace, resumed: bool = False):
        model, train, text = settings.model, settings.train, settings.text
        self.data = data = open_texts(settings.data, text)
        for note in data.notes:
            _log.info("%s", note)
        model.model = model.model or zoo.default_text_name()
        self.classes = data.classes
        positive = _positive(data, text.positive)
        self.words = Words(text.ngrams, text.buckets, text.max_tokens, *data.columns, positive)
        self.net = zoo.create_text(model.model, len(data.classes), text.buckets)
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
        return {"kind": "text", **self.words._asdict()}

    def scores(self) -> F1:
        """Counts for the scores of one evaluation."""
        positive = self.words.positive
        return F1(len(self.classes), None if positive is None else self.classes.index(positive))

    def close(self) -> None:
        """Does nothing: texts lie in memory, and their loaders have no workers."""

    def sample(self) -> list:
        """(ids, labels) of two made-up rows."""
        ids = np.random.RandomState(0).randint(1, self.words.buckets + 1, (2, self.words.max_tokens))
        return [ids.astype("int32"), np.zeros(2, "int32")]

    def prepare(self, net: Block) -> None:
        """Starting weights and frozen parameters of an initialized network."""
        if not self._resumed:
            start(net, self._model)
        _check_rows(net, self.words.buckets, self._model.model)
        freeze(net, self._model)

    def check_output(self, output: mx.nd.NDArray) -> None:
        if output.ndim != 2 or output.shape[1] != len(self.classes):
            raise UserError(f"--model {self._model.model}: gives {output.shape[1:]} values per text; "
                            f"{len(self.classes)} are needed, one per class")


def _check_rows(net: Block, buckets: int, name: str) -> None:
    """Raises UserError for a network of a user's whose table of vectors is too short: MXNet would take its last row for
    every id beyond."""
    first = plan.segments(net)[0]
    if isinstance(first, (nn.Embedding, EmbeddingMean)) and first.weight.shape[0] <= buckets:
        rows = first.weight.shape[0]
        raise UserError(f"--model {name}: has vectors for {rows} ids, from 0 to {rows - 1}; --buckets {buckets} gives "
                        f"ids up to {buckets}")


def _positive(data: TextData, given: Optional[str]) -> Optional[str]:
    """The class whose F1 is told; None with more than two."""
    classes = data.classes
    if len(classes) > 2:
        if given is not None:
            raise UserError(f"--positive {given}: has no effect with {len(classes)} classes, whose mean F1 is told")
        return None
    if given is not None and given not in classes:
        raise UserError(f"--positive {given}: must be one of {', '.join(classes)}")
    counts = np.bincount(data.train.y, minlength=2)
    positive = given or classes[0 if counts[0] < counts[1] else 1]
    if data.val is not None:
        _log.info("F1 is that of class %r%s", positive, "" if given else ", the rarer one (--positive names another)")
    return positive
