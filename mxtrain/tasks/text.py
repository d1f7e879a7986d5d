"""Classification of texts."""

from __future__ import annotations

import logging
from typing import NamedTuple, Optional

import numpy as np
from mxnet.gluon import Block, nn

from mxtrain.data.bags import Features
from mxtrain.data.text import TextData, open_texts
from mxtrain.errors import UserError
from mxtrain.models import plan, zoo
from mxtrain.models.text import EmbeddingMean
from mxtrain.tasks.base import Classification
from mxtrain.tasks.scores import F1

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


class TextTask(Classification):
    """See Classification."""

    noun = "text"

    def _open(self, settings) -> TextData:
        return open_texts(settings.data, settings.text)

    def _make(self, settings) -> Block:
        model, text = settings.model, settings.text
        model.model = model.model or zoo.default_text_name()
        positive = _positive(self.data, text.positive)
        self.words = Words(text.ngrams, text.buckets, text.max_tokens, *self.data.columns, positive)
        return zoo.create_text(model.model, len(self.data.classes), text.buckets)

    def input(self) -> dict:
        return {"kind": "text", **self.words._asdict()}

    def scores(self) -> F1:
        positive = self.words.positive
        return F1(len(self.classes), None if positive is None else self.classes.index(positive))

    def sample(self) -> list:
        ids = np.random.RandomState(0).randint(1, self.words.buckets + 1, (2, self.words.max_tokens))
        return [ids.astype("int32"), np.zeros(2, "int32")]

    def prepare(self, net: Block) -> None:
        super().prepare(net)
        _check_rows(net, self.words.buckets, self._model.model)


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
        why = "as frequent as the other" if counts[0] == counts[1] else "the rarer one"
        _log.info("F1 is that of class %r%s", positive, "" if given else f", {why} (--positive names another)")
    return positive
