"""What follows a network in training and in evaluation: the loss and the values that are counted.

A training head gives the loss of each sample, to start backward from, and a report with one row per sample. An
evaluation head gives one array with one row per sample. The columns' names are in `names`.
"""

from __future__ import annotations

from typing import Optional

from mxnet import gluon
from mxnet.gluon import Block, HybridBlock


def first(output):
    """The main output of a network that has several (GoogLeNet's and Inception's auxiliary heads follow it)."""
    return output[0] if isinstance(output, (list, tuple)) else output


class LabelSmoothing(HybridBlock):
    """Cross-entropy with a target that gives `share` of its weight to all classes evenly (Szegedy et al. 2016).

    (rows, classes), (rows,) -> (rows,)
    """

    def __init__(self, share: float):
        super().__init__(prefix="")
        self._share = share

    def hybrid_forward(self, F, output, label):
        log_p = F.log_softmax(output)
        true = F.pick(log_p, label, axis=1)
        return -(1 - self._share) * true - self._share * F.mean(log_p, axis=1)


class LossHead(HybridBlock):
    """Any loss with one value per sample; the report is the loss.

    Gluon's own losses get the main output, and the label as float32, since theirs must be of one type; a loss of
    one's own gets whatever the network returns and the label as it is.
    """

    names = ("loss",)

    def __init__(self, loss: Block):
        super().__init__(prefix="")
        self.loss = loss
        self._gluons = type(loss).__module__.startswith("mxnet.")

    def hybrid_forward(self, F, output, label):
        loss = self._loss(F, output, label)
        return loss, F.expand_dims(loss, axis=1)

    def _loss(self, F, output, label):
        if self._gluons:
            return self.loss(first(output), F.cast(label, "float32"))
        return self.loss(output, label)


class LossEvaluation(LossHead):
    """The same without backward."""

    def hybrid_forward(self, F, output, label):
        return F.expand_dims(self._loss(F, output, label), axis=1)


class ClassHead(HybridBlock):
    """A loss over classes; the report adds whether the likeliest class is the true one (1 or 0)."""

    names = ("loss", "accuracy")

    def __init__(self, loss: Block):
        super().__init__(prefix="")
        self.loss = loss

    def hybrid_forward(self, F, output, label):
        output, label = first(output), F.reshape(label, shape=(-1,))  # a column of labels will do, too
        loss = self.loss(output, label)
        hit = F.argmax(output, axis=1) == F.cast(label, "float32")
        return loss, F.stack(loss, hit, axis=1)


class ClassEvaluation(HybridBlock):
    """Loss, top-1, top-5 where there are at least 5 classes, and last the predicted class.

    A class counts before another when its score is larger or, the scores being equal, its number is smaller.
    """

    def __init__(self, loss: Block, classes: int):
        super().__init__(prefix="")
        self.loss, self._classes = loss, classes
        self.names = ("loss", "accuracy", "top5") if classes >= 5 else ("loss", "accuracy")

    def hybrid_forward(self, F, output, label):
        output = first(output)
        label = F.cast(F.reshape(label, shape=(-1,)), "float32")
        predicted = F.argmax(output, axis=1)
        columns = [self.loss(output, label), predicted == label]
        if "top5" in self.names:
            score = F.pick(output, label, axis=1, keepdims=True)
            before = F.broadcast_lesser(F.arange(self._classes).reshape((1, -1)), F.expand_dims(label, axis=1))
            ahead = F.broadcast_greater(output, score) + F.broadcast_equal(output, score) * before
            columns.append(F.sum(ahead, axis=1) < 5)
        return F.stack(*columns, predicted, axis=1)


class Probabilities(HybridBlock):
    """(rows, classes) scores -> probabilities, for predictions."""

    def __init__(self):
        super().__init__(prefix="")

    def hybrid_forward(self, F, output):
        return F.softmax(first(output))


def heads_for(loss: Block, classes: Optional[int], evaluation_loss: Block = None):
    """(training head, evaluation head) for a loss; one over class numbers also counts hits.

    classes: how many scores the network gives for a sample; None where it gives no plain list of them.
    evaluation_loss: where it is another than the loss (label smoothing is for training only).
    """
    evaluation_loss = evaluation_loss or loss
    if classes is not None and is_class_loss(evaluation_loss):
        return ClassHead(loss), ClassEvaluation(evaluation_loss, classes)
    return LossHead(loss), LossEvaluation(evaluation_loss)


def is_class_loss(loss: Block) -> bool:
    """Whether a loss compares scores, which have the classes along loss._axis, with class numbers."""
    return isinstance(loss, gluon.loss.SoftmaxCrossEntropyLoss) and loss._sparse_label
