"""export.py: a trained network as files for MXNet or ONNX Runtime, checked in a fresh process."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, List, Tuple

from mxtrain import cli, config
from mxtrain.errors import TrainingError, UserError
from mxtrain.inference import description, program
from mxtrain.inference.settings import ExportConfig, RunConfig

if TYPE_CHECKING:  # it imports mxnet
    from mxtrain.inference.load import Trained

_log = logging.getLogger("mxtrain")

_SECTIONS = {"run": RunConfig, "export": ExportConfig}
TOLERANCE = {"symbol": 1e-5, "onnx": 1e-4}
"""Largest difference that passes, as a share of the largest output: another runtime adds in another order."""

_SAMPLES = 5
_SECONDS_FOR_CHECK = 600
_ONNX = "pip install 'onnx>=1.14.1,<1.17' 'onnxruntime>=1.17,<1.20'"


def main(argv: List[str]) -> int:
    """Exports as the command line says; returns the exit code."""
    parser = config.parser("export.py", "Export a trained network, and check that it does the same elsewhere.")
    settings = program.parse(parser, _SECTIONS, argv)
    description.refuse_language(settings.run.run)
    out, kind = settings.export.out, settings.export.format
    missing = [name for name in ("onnx", "onnxruntime") if importlib.util.find_spec(name) is None]
    if kind == "onnx" and missing:
        raise UserError(f"--format onnx: {' and '.join(missing)} not installed: {_ONNX}")

    import mxnet as mx

    from mxtrain.inference.load import load

    run = load(settings.run, [mx.cpu()])  # its results are those that the check compares with
    files, difference = export(run, Path(out), kind)
    _log.info("checked in a fresh process with %d inputs: the outputs differ by up to %.1e of the largest",
              _SAMPLES, difference)
    if settings.json:
        cli.print_json({**run.origin(), "format": kind, "files": files, "difference": difference,
                        "tolerance": TOLERANCE[kind]})
    else:
        print("\n".join(files))
    return 0


def export(run: Trained, out: Path, kind: str) -> Tuple[List[str], float]:
    """Writes and checks the files -> (their names, the difference that the check found).

    Raises UserError when the network cannot be exported or the files not be written, and TrainingError when
    the check fails; then nothing is left or replaced.
    """
    from mxtrain.inference import graph

    traced = graph.trace(run)
    x, expected = graph.samples(run, _SAMPLES)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None
    try:
        if kind == "onnx":
            graph.write_onnx(traced, x.shape[1:], folder / f"{out.name}.onnx")
        else:
            graph.write_symbol(traced, folder / out.name)
        _write_descriptions(run, folder / out.name)
        difference = _check(folder, folder / out.name, kind, x, expected)
        files = []
        for file in sorted(folder.iterdir()):
            os.replace(file, out.parent / file.name)
            files.append(str(out.parent / file.name))
        return files, difference
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_descriptions(run: Trained, prefix: Path) -> None:
    """What one must know to use the network: PREFIX-classes.txt, and all of it in PREFIX-input.json."""
    from mxtrain.train.folder import write_classes

    write_classes(prefix.parent, run.classes)
    os.replace(prefix.parent / "classes.txt", f"{prefix}-classes.txt")
    about = _about_texts(run) if run.kind == "text" else _about_images(run)
    Path(f"{prefix}-input.json").write_text(json.dumps({
        **about, "output": f"scores by class, ({run.kind}s, classes); their softmax are probabilities",
        "classes": run.classes, "model": run.settings.model.model,
    }, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _about_images(run: Trained) -> dict:
    height, width, channels = run.input.shape
    return {
        "input": {"name": "data", "type": "float32", "shape": [None, run.input.channels, height, width],
                  "axes": ["image", "channel (RGB where there are 3)", "row", "column"],
                  "values": "(pixel / peak - mean) / std, by channel"},
        "peak": run.input.peak, "mean": list(run.input.mean), "std": list(run.input.std),
        "image": {"height": height, "width": width, "channels": channels, "resize": run.input.resize,
                  "preparation": "scale the shorter side to resize (where it is given; else to the height), cut "
                                 "out the center; repeat the channel where the input has more than the image"}}


def _about_texts(run: Trained) -> dict:
    from mxtrain.data.bags import WORD

    how = run.input.features
    return {
        "input": {"name": "data", "type": "float32", "shape": [None, how.max_tokens],
                  "axes": ["text", "feature"], "values": "ids from 1 to buckets, then 0"},
        **how._asdict(),
        "text": {"preparation": "normalize to NFKC and lower-case; take all matches of the regular expression words; "
                                "join each run of 1, then of 2, ... up to ngrams neighbours by one space; the id of a "
                                "run is 1 + crc32(its UTF-8) mod buckets; the first max_tokens count",
                 "words": WORD.pattern}}


def _check(folder: Path, prefix: Path, kind: str, x, expected) -> float:
    """Runs the exported network in a fresh process; returns the difference."""
    import numpy as np

    inputs, outputs = folder / ".inputs.npy", folder / ".outputs.npy"
    np.save(inputs, x)
    places = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-m", "mxtrain.inference.check", kind, str(prefix), str(inputs), str(outputs)]
    try:
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, timeout=_SECONDS_FOR_CHECK, text=True, errors="replace")
    except subprocess.TimeoutExpired:
        raise TrainingError(f"the exported network gave no output within {_SECONDS_FOR_CHECK} s; nothing is "
                            "kept") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise TrainingError(f"the exported network cannot be run ({last}); nothing is kept")
    found = np.load(outputs)
    for file in (inputs, outputs):
        file.unlink()
    if found.shape != expected.shape:
        raise TrainingError(f"the exported network gives {found.shape}, the trained one {expected.shape}; "
                            "nothing is kept")
    difference = float(np.abs(found - expected).max() / (np.abs(expected).max() or 1.0))
    if not difference <= TOLERANCE[kind]:
        raise TrainingError(f"the exported network differs from the trained one by {difference:.1e} of the "
                            f"largest output ({TOLERANCE[kind]:.0e} is allowed); nothing is kept")
    return difference
