"""Language modelling: the next token of a text."""

from __future__ import annotations

import logging
import math
from typing import Dict, NamedTuple

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, HybridBlock

from mxtrain.data.tokens import TokenData, open_tokens
from mxtrain.errors import UserError
from mxtrain.models import zoo
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
