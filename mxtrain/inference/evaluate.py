"""evaluate.py: loss, top-1 and top-5 of a trained network, by class and as a confusion matrix on request."""

from __future__ import annotations

import csv
import math
from typing import TYPE_CHECKING, Dict, List, NamedTuple, Sequence

import numpy as np

from mxtrain import cli, config
from mxtrain.devices import DeviceConfig
from mxtrain.errors import TrainingError
from mxtrain.inference import program
from mxtrain.inference.settings import BatchConfig, EvaluateConfig, RunConfig

if TYPE_CHECKING:  # they import mxnet
    from mxtrain.inference.load import Trained
    from mxtrain.inference.samples import Samples

_SECTIONS = {"run": RunConfig, "evaluate": EvaluateConfig, "batches": BatchConfig, "devices": DeviceConfig}


class Evaluation(NamedTuple):
    """What was found out over all samples."""

    samples: int
    means: Dict[str, float]
    """loss, accuracy and, where there are 5 classes, top5."""
    confusion: np.ndarray
    """How often which class was predicted: (true, predicted) int64."""


def main(argv: List[str]) -> int:
    """Evaluates as the command line says; returns the exit code."""
    parser = config.parser("evaluate.py", "Evaluate a trained network, by default on its run's own data.")
    settings = program.parse(parser, _SECTIONS, argv)
    contexts = program.open_contexts(settings.devices)

    from mxtrain.inference.load import load
    from mxtrain.inference.samples import open_samples

    run = load(settings.run, contexts)
    samples = open_samples(settings.evaluate.data, run)
    result = evaluate(run, samples, contexts, settings.batches)
    classes = _by_class(run.classes, result.confusion) if settings.evaluate.per_class else None
    if settings.evaluate.confusion:
        with program.replacing(settings.evaluate.confusion) as file:
            _write_confusion(file, run.classes, result.confusion)
    if settings.json:
        files = {"confusion": settings.evaluate.confusion} if settings.evaluate.confusion else {}
        cli.print_json({**run.origin(), "data": samples.name, "samples": result.samples, **result.means,
                        **({"classes": classes} if classes else {}), **files})
    else:
        _print(result, classes)
    return 0


def evaluate(run: Trained, samples: Samples, contexts: Sequence, batches: BatchConfig) -> Evaluation:
    """Evaluates a network; neither the size of the batches nor the number of contexts changes the result."""
    from mxnet.gluon.loss import SoftmaxCrossEntropyLoss

    from mxtrain.data.loader import Loader
    from mxtrain.parallel.inference import Inference
    from mxtrain.parallel.program import compile_chain
    from mxtrain.tasks.heads import ClassEvaluation
    from mxtrain.tasks.image import preprocess
    from mxtrain.train.evaluate import evaluate as over

    head = ClassEvaluation(SoftmaxCrossEntropyLoss(), len(run.classes))
    inference = Inference(compile_chain([preprocess(run.pixels), run.net], head), contexts)
    confusion = np.zeros((len(run.classes), len(run.classes)), np.int64)

    def count(label, values):
        np.add.at(confusion, (label, values[:, -1].astype(np.int64)), 1)

    loader = Loader(samples.dataset, batches.batch_size, shuffle=False, workers=batches.workers)
    try:
        totals = over(inference, ((x, samples.outputs[y]) for x, y in loader.batches(0)), head.names, count)
    finally:
        loader.close()
    means = totals.means()
    if not math.isfinite(means["loss"]):
        raise TrainingError(f"{run.checkpoint}: the loss over {totals.samples} samples is {means['loss']}")
    return Evaluation(totals.samples, means, confusion)


def _by_class(classes: List[str], confusion: np.ndarray) -> List[dict]:
    samples, correct = confusion.sum(axis=1).tolist(), confusion.diagonal().tolist()
    return [{"class": name, "samples": n, "correct": k, "accuracy": k / n if n else None}
            for name, n, k in zip(classes, samples, correct)]


def _write_confusion(file, classes: List[str], confusion: np.ndarray) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["true \\ predicted", *classes])
    writer.writerows([name, *row] for name, row in zip(classes, confusion.tolist()))


def _print(result: Evaluation, classes) -> None:
    values = ", ".join(f"{name} {value:.4f}" for name, value in result.means.items())
    print(f"{result.samples} samples: {values}")
    if classes:
        width = max(len("class"), *(len(row["class"]) for row in classes))
        print(f"{'class':{width}}  samples  correct  accuracy")
        for row in classes:
            share = "-" if row["accuracy"] is None else f"{row['accuracy']:.4f}"
            print(f"{row['class']:{width}}  {row['samples']:7}  {row['correct']:7}  {share:>8}")
