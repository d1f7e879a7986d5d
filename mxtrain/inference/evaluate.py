"""evaluate.py: loss, top-1 and top-5 of a trained network, by class and as a confusion matrix on request; of a language
model loss and perplexity."""

from __future__ import annotations

import csv
import math
from typing import TYPE_CHECKING, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence

import numpy as np

from mxtrain import cli, config
from mxtrain.devices import DeviceConfig
from mxtrain.errors import TrainingError, UserError
from mxtrain.inference import program
from mxtrain.inference.settings import BatchConfig, EvaluateConfig, RunConfig

if TYPE_CHECKING:  # they import mxnet
    from mxtrain.data.loader import Batch
    from mxtrain.inference.load import Trained
    from mxtrain.inference.samples import Samples

_SECTIONS = {"run": RunConfig, "evaluate": EvaluateConfig, "batches": BatchConfig, "devices": DeviceConfig}


class Evaluation(NamedTuple):
    """What was found out over all samples."""

    samples: int
    skipped: int
    """Samples that could not be read."""
    means: Dict[str, float]
    """loss, accuracy, where there are 5 classes top5, and of texts f1; of language loss and perplexity, per token."""
    confusion: Optional[np.ndarray]
    """How often which class was predicted: (true, predicted) int64; None of language."""
    tokens: Optional[int]
    """Of language: tokens of the samples."""


def main(argv: List[str]) -> int:
    """Evaluates as the command line says; returns the exit code."""
    parser = config.parser("evaluate.py", "Evaluate a trained network, by default on its run's own data.")
    settings = program.parse(parser, _SECTIONS, argv)
    contexts = program.open_contexts(settings.devices)

    from mxtrain.inference.load import load

    run = load(settings.run, contexts)
    samples = _samples(settings.evaluate, run)
    on_bad = settings.evaluate.on_bad_sample or run.settings.data.on_bad_sample
    result = evaluate(run, samples, contexts, settings.batches, on_bad)
    classes = _by_class(run, result.confusion) if settings.evaluate.per_class else None
    if settings.evaluate.confusion:
        with program.replacing(settings.evaluate.confusion) as file:
            _write_confusion(file, run.classes, result.confusion)
    if settings.json:
        files = {"confusion": settings.evaluate.confusion} if settings.evaluate.confusion else {}
        cli.print_json({**run.origin(), "data": samples.name, "samples": result.samples,
                        **({"skipped": result.skipped} if result.skipped else {}),
                        **({"tokens": result.tokens} if result.tokens else {}), **result.means,
                        **({"classes": classes} if classes else {}), **files})
    else:
        _print(result, classes)
    return 0


def evaluate(run: Trained, samples: Samples, contexts: Sequence, batches: BatchConfig,
             on_bad: str = "stop") -> Evaluation:
    """Evaluates a network; neither the size of the batches nor the number of contexts changes the result.

    on_bad: "stop" raises BadSample for a sample that cannot be read, "skip" leaves it out.
    """
    from mxtrain.data.loader import Loader
    from mxtrain.parallel.inference import Inference
    from mxtrain.parallel.program import compile_chain
    from mxtrain.train.evaluate import evaluate as over

    head, scores = _head(run)
    inference = Inference(compile_chain([run.net], head), contexts, True, run.preprocess())
    loader = Loader(samples.dataset, batches.batch_size, shuffle="none", workers=batches.workers, on_bad=on_bad)
    try:
        totals = over(inference, _as_outputs(loader.batches(0), samples.outputs), head.names, scores and scores.see)
    finally:
        loader.close()
    means = _values(run, totals.means(), scores)
    if not all(map(math.isfinite, means.values())):
        raise TrainingError(f"{run.checkpoint}: the loss over {totals.samples} samples is {means['loss']}")
    return Evaluation(totals.samples, totals.skipped, means, scores and scores.confusion,
                      totals.samples * run.input.context if run.kind == "lm" else None)


def _head(run: Trained) -> tuple:
    """(what follows the network, what counts classes or None)."""
    from mxnet.gluon.loss import SoftmaxCrossEntropyLoss

    from mxtrain.tasks.heads import ClassEvaluation, LossEvaluation
    from mxtrain.tasks.language import TokenLoss
    from mxtrain.tasks.scores import F1

    if run.kind == "lm":
        return LossEvaluation(TokenLoss()), None
    positive = run.input.positive if run.kind == "text" else None
    return (ClassEvaluation(SoftmaxCrossEntropyLoss(), len(run.classes)),
            F1(len(run.classes), None if positive is None else run.classes.index(positive)))


def _values(run: Trained, means: Dict[str, float], scores) -> Dict[str, float]:
    from mxtrain.tasks.language import with_perplexity

    if run.kind == "lm":
        return with_perplexity(means)
    return {**means, **(scores.values() if run.kind == "text" else {})}


def _as_outputs(batches: Iterable[Batch], outputs: np.ndarray) -> Iterator[Batch]:
    """The batches with the network's numbers of the classes."""
    from mxtrain.data.loader import Batch

    for batch in batches:
        x, y = batch
        mapped = Batch((x, outputs[y]), batch.size)
        mapped.positions, mapped.bad = batch.positions, batch.bad
        yield mapped


def _samples(settings: EvaluateConfig, run: Trained) -> Samples:
    if run.kind == "lm":
        from mxtrain.inference.language import open_language_samples

        return open_language_samples(settings, run)
    if run.kind == "text":
        from mxtrain.inference.texts import open_text_samples

        for flag, name in (("--data-root", settings.data_root), ("--image-column", settings.image_column),
                           ("--on-bad-sample", settings.on_bad_sample)):
            if name is not None:
                raise UserError(f"{flag} {name}: the run was trained on texts")
        return open_text_samples(settings, run)
    from mxtrain.inference.samples import open_samples

    for flag, name in (("--text-column", settings.text_column), ("--encoding", settings.encoding)):
        if name is not None:
            raise UserError(f"{flag} {name}: the run was trained on images")
    return open_samples(settings.data, run, data_root=settings.data_root, image_column=settings.image_column,
                        label_column=settings.label_column)


def _by_class(run: Trained, confusion: np.ndarray) -> List[dict]:
    from mxtrain.tasks.scores import by_class

    samples, correct = confusion.sum(axis=1).tolist(), confusion.diagonal().tolist()
    rows = [{"class": name, "samples": n, "correct": k, "accuracy": k / n if n else None}
            for name, n, k in zip(run.classes, samples, correct)]
    if run.kind == "text":
        for name, values in by_class(confusion).items():
            for row, value in zip(rows, values.tolist()):
                row[name] = value
    return rows


def _write_confusion(file, classes: List[str], confusion: np.ndarray) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["true \\ predicted", *classes])
    writer.writerows([name, *row] for name, row in zip(classes, confusion.tolist()))


def _print(result: Evaluation, classes) -> None:
    values = ", ".join(f"{name} {value:.4f}" for name, value in result.means.items())
    tokens = f" ({result.tokens:,} tokens)" if result.tokens else ""
    print(f"{result.samples} samples{tokens}: {values}" + (f"; {result.skipped} left out" if result.skipped else ""))
    if classes:
        width = max(len("class"), *(len(row["class"]) for row in classes))
        shares = [name for name in classes[0] if name not in ("class", "samples", "correct")]
        print("  ".join([f"{'class':{width}}", "samples", "correct", *(f"{name:>6}" for name in shares)]))
        for row in classes:
            values = ("-" if row[name] is None else f"{row[name]:.4f}" for name in shares)
            print("  ".join([f"{row['class']:{width}}", f"{row['samples']:7}", f"{row['correct']:7}",
                             *(f"{value:>{max(6, len(name))}}" for name, value in zip(shares, values))]))
