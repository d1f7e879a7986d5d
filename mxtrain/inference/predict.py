"""predict.py: the likeliest classes of images in files, or of texts."""

from __future__ import annotations

import csv
import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Dict, Iterator, List, NamedTuple, Optional, Sequence, TextIO, Tuple, Union

import numpy as np

from mxtrain import cli, config
from mxtrain.data.table import EXTENSIONS
from mxtrain.devices import DeviceConfig
from mxtrain.errors import TrainingError, UserError
from mxtrain.inference import description, program
from mxtrain.inference.settings import BatchConfig, PredictConfig, RunConfig
from mxtrain.train import checkpoint

if TYPE_CHECKING:  # it imports mxnet
    from mxtrain.inference.load import Trained

_log = logging.getLogger("mxtrain")

_SECTIONS = {"run": RunConfig, "predict": PredictConfig, "batches": BatchConfig, "devices": DeviceConfig}
_COLUMNS = ("rank", "class", "probability")


class Prediction(NamedTuple):
    """Classes and probabilities of one image or text, the likeliest first."""

    source: Dict[str, Union[str, int]]
    """Where it comes from: {"file": path}, or {"row": number, "text": text}."""
    classes: List[str]
    probabilities: List[float]


def main(argv: List[str]) -> int:
    """Predicts as the command line says; returns the exit code, 1 when a file could not be read."""
    parser = config.parser("predict.py", "Predict the classes of images or texts with a trained network.")
    parser.add_argument("files", nargs="*", type=str, help="Images, and folders of images at any depth; or one table "
                                                           "of texts.")
    settings = program.parse(parser, _SECTIONS, argv)
    description.refuse_language(settings.run.run)
    given, kind = settings.given.get("files") or [], _kind(settings.run)
    _check_given(given, settings.predict, kind)
    found = find_files(given) if kind == "image" else []
    contexts = program.open_contexts(settings.devices)

    from mxtrain.inference.load import load

    run = load(settings.run, contexts)
    failed: Dict[str, str] = {}
    if kind == "text":
        from mxtrain.inference.texts import find_texts

        found = find_texts(given[0] if given else None, settings.predict, run)
    predictions = predict(run, found, contexts, settings.batches, settings.predict.top, failed)
    listed = _deliver(predictions, settings.predict.out, settings.json)
    if settings.json:
        cli.print_json({**run.origin(), "files" if kind == "image" else "texts": len(found), **listed,
                        "failed": [{"file": name, "error": text} for name, text in failed.items()]})
    if failed:
        _log.error("%d of %d files could not be read", len(failed), len(found))
    return 1 if failed else 0


def _kind(run: RunConfig) -> str:
    """What a run was trained on: image or text."""
    return description.read(checkpoint.find(run.run)[0]).kind


def _check_given(given: Sequence[str], settings: PredictConfig, kind: str) -> None:
    """Raises UserError when nothing is given, too much, or what the run was not trained on."""
    if kind == "image":
        for flag, value in (("--text", settings.text), ("--text-column", settings.text_column),
                            ("--encoding", settings.encoding)):
            if value:
                raise UserError(f"{flag}: the run was trained on images; name images, or folders that hold some")
        if not given:
            raise UserError("no file is given: name images, or folders that hold some")
    elif settings.text and (given or settings.text_column or settings.encoding):
        raise UserError("--text: the texts are given, so that a table, --text-column and --encoding have no effect")
    elif not given and not settings.text:
        raise UserError("no text is given: give --text, or a table of texts")
    elif given and (len(given) > 1 or not given[0].lower().endswith(EXTENSIONS)):
        raise UserError(f"{', '.join(given[:3])}: the run was trained on texts; give one table "
                        f"({', '.join(EXTENSIONS)}) or --text")


def find_files(given: Sequence[str]) -> List[str]:
    """The files named, and the images in the folders named. Raises UserError for what does not exist, and when
    there is none."""
    from mxtrain.data import folder

    files: List[str] = []
    for path in given:
        if os.path.isdir(path):
            found, skipped = folder.images_in(path)
            if skipped:
                reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
                _log.info("%s: skipped %d entries: %s", path, sum(skipped.values()), reasons)
            files += [image.path for image in found]
        elif os.path.exists(path):
            files.append(path)
        else:
            raise UserError(f"{path}: no such file or folder")
    if not files:
        raise UserError(f"{', '.join(given)}: no images; looked for the endings {' '.join(folder.EXTENSIONS)}")
    return files


def predict(run: Trained, given: Sequence, contexts: Sequence, batches: BatchConfig, top: int,
            failed: Dict[str, str]) -> Iterator[Prediction]:
    """The predictions for image files or, for a run trained on texts, inference.texts.Text; in their order.

    What cannot be read is left out, logged, and put into `failed`: file -> reason.
    """
    from mxtrain.data.loader import Loader
    from mxtrain.parallel.inference import Inference
    from mxtrain.parallel.program import compile_chain
    from mxtrain.tasks.heads import Probabilities

    inference = Inference(compile_chain([run.net, Probabilities()]), contexts, False, run.preprocess())
    dataset = _dataset(given, run)
    loader = Loader(dataset, batches.batch_size, shuffle="none", workers=batches.workers)
    try:
        for x, numbers in loader.batches(0):
            rows = np.concatenate([output.asnumpy() for output in inference.evaluate([x])])
            if not np.isfinite(rows).all():
                raise TrainingError(f"{run.checkpoint}: the network's output is not finite")
            for number, probabilities in zip(numbers.tolist(), rows):
                if number in dataset.failed:
                    failed[dataset.source(number)["file"]] = dataset.failed[number]
                    _log.error("%s", dataset.failed[number])
                else:
                    yield Prediction(dataset.source(number), *_likeliest(probabilities, run.classes, top))
    finally:
        loader.close()


def _dataset(given: Sequence, run: Trained):
    if run.kind == "text":
        from mxtrain.inference.texts import Texts

        return Texts(given, run.input.features)
    from mxtrain.inference.files import Files

    return Files(given, run.input)


def _likeliest(probabilities: np.ndarray, classes: List[str], top: int) -> Tuple[List[str], List[float]]:
    """Of classes that are equally likely the first counts first, as in evaluation."""
    order = np.argsort(-probabilities, kind="stable")[:top]
    return [classes[i] for i in order], probabilities[order].tolist()


def _deliver(predictions: Iterator[Prediction], out: Optional[str], as_json: bool) -> dict:
    """Writes the predictions to where they are wanted; returns what --json tells about them."""
    if out is not None:
        with program.replacing(out) as file:
            if out.lower().endswith(".json"):
                json.dump(_plain(predictions), file, indent=1, allow_nan=False)
            else:
                _write_csv(file, predictions)
        return {"out": out}
    if as_json:
        return {"predictions": _plain(predictions)}
    _write_csv(sys.stdout, predictions)
    return {}


def _write_csv(file: TextIO, predictions: Iterator[Prediction]) -> None:
    if hasattr(file, "reconfigure"):  # names of files need not be valid text; they come out as they went in
        file.reconfigure(errors="surrogateescape")
    writer = csv.writer(file, lineterminator="\n")
    for count, one in enumerate(predictions):
        if not count:
            writer.writerow([*one.source, *_COLUMNS])
        for rank, (name, probability) in enumerate(zip(one.classes, one.probabilities), 1):
            writer.writerow([*one.source.values(), rank, name, f"{probability:.6g}"])


def _plain(predictions: Iterator[Prediction]) -> List[dict]:
    return [{**one.source, "classes": [{"class": name, "probability": probability}
                                           for name, probability in zip(one.classes, one.probabilities)]}
            for one in predictions]
