"""Language modelling: the next token of a text."""

from __future__ import annotations

import logging
import math
from typing import Dict, NamedTuple, Tuple

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, HybridBlock

from mxtrain.data.tokens import TokenData, open_tokens
from mxtrain.errors import UserError
from mxtrain.models import zoo
from mxtrain.models.split import Slices
from mxtrain.tasks.base import Classification

_log = logging.getLogger("mxtrain")


class Sequences(NamedTuple):
    """What a language model takes; saved with a run, so that it is evaluated and sampled as it was trained."""

    vocabulary: str
    """How text becomes tokens: bytes."""
    context: int
    """Tokens of a sequence."""


def with_perplexity(means: Dict[str, float]) -> Dict[str, float]:
    """The means with `perplexity` = exp(loss) after them, per token; infinite where no float holds it."""
    if "loss" not in means:
        return means
    return {**means, "perplexity": math.exp(means["loss"]) if means["loss"] < 700 else math.inf}


class TokenLoss(HybridBlock):
    """Cross-entropy (in nats) of the next token, as the mean over a sequence: (rows, time, vocabulary), (rows, time) ->
    (rows,). All sequences of a run are of one length, so the mean over rows is the mean over tokens."""

    def __init__(self):
        super().__init__(prefix="")

    def hybrid_forward(self, F, output, label):
        return -F.mean(F.pick(F.log_softmax(output, axis=-1), label, axis=-1), axis=1)

    def split_loss(self, slices: Slices, scores: int) -> Tuple[HybridBlock, HybridBlock]:
        """(what a rank does with its share of the scores and the labels, what makes the loss of the sum of that).

        scores: how many a rank has for a place. Between the two go size + 1 numbers for each place.
        """
        return _ShareOfLoss(slices.rank, slices.size, scores), _LossOfShares(slices.size)


class _ShareOfLoss(HybridBlock):
    """(rows, time, scores), (rows, time) -> (size + 1, rows, time): for each rank the logarithm of the sum of its scores'
    exponentials, and the score of the label; 0 for what other ranks have."""

    def __init__(self, rank: int, size: int, scores: int):
        super().__init__(prefix="")
        self._rank, self._size, self._scores = rank, size, scores

    def hybrid_forward(self, F, output, label):
        own = F.cast(label, "float32") - self._rank * self._scores
        picked = F.pick(output, own, axis=-1) * (own >= 0) * (own < self._scores)  # which takes the nearest for others
        total = _log_sum_exp(F, output, -1)
        nothing = F.zeros_like(total)
        return F.stack(*(total if rank == self._rank else nothing for rank in range(self._size)), picked, axis=0)


class _LossOfShares(HybridBlock):
    """(size + 1, rows, time) -> (rows,)."""

    def __init__(self, size: int):
        super().__init__(prefix="")
        self._size = size

    def hybrid_forward(self, F, shares):
        total = _log_sum_exp(F, F.slice_axis(shares, axis=0, begin=0, end=self._size), 0)
        picked = F.squeeze(F.slice_axis(shares, axis=0, begin=self._size, end=None), axis=0)
        return F.mean(total - picked, axis=1)


def _log_sum_exp(F, x, axis: int):
    # Its gradient does not depend on what is taken off.
    largest = F.BlockGrad(F.max(x, axis=axis, keepdims=True))
    return F.log(F.sum(F.exp(F.broadcast_sub(x, largest)), axis=axis)) + F.squeeze(largest, axis=axis)


class LanguageTask(Classification):
    """See Classification. The classes are the tokens; there is no accuracy, so the monitored value is the loss."""

    noun, values = "token", staticmethod(with_perplexity)

    def __init__(self, settings, *arguments):
        super().__init__(settings, *arguments)
        self.loss = self.evaluation_loss = TokenLoss()

    def _open(self, settings) -> TokenData:
        return open_tokens(settings.data, settings.gpt.context)

    def _make(self, settings) -> Block:
        model = settings.model
        model.model = model.model or zoo.default_language_name()
        self._context = settings.gpt.context
        if model.model == "gpt" and settings.optim.optimizer in ("sgd", "nag", "signum"):
            _log.info("--optimizer %s is slow to train a GPT; adamw is usual, see scripts/configs/gpt-1m.yaml",
                      settings.optim.optimizer)
        return zoo.create_language(model.model, len(self.data.classes), settings.gpt, settings.experts)

    def input(self) -> dict:
        return {"kind": "lm", **Sequences("bytes", self._context)._asdict()}

    def sample(self) -> list:
        return [np.zeros((2, self._context), "int32") for _ in range(2)]

    def check_output(self, output: mx.nd.NDArray) -> None:
        """Raises UserError for a network that does not give one score per place and token."""
        wanted = (self._context, len(self.classes))
        if output.shape[1:] != wanted:
            raise UserError(f"--model {self._model.model}: gives scores of shape {output.shape[1:]} for a sequence; "
                            f"{wanted} is needed: a score for each token that may follow, at each place")
