"""make_records.py: a folder or a list of images becomes record files.

The records of a part are in the order of the folder's dataset, by class and name, so that training from them
sees the same samples at the same places. The same command goes on with what a killed one left.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Dict, List, Literal, Optional, Tuple, get_args

import numpy as np

from mxtrain import cli, config
from mxtrain.data.record_files import Paths, paths_of
from mxtrain.data.record_writer import Item, Job, begun, write, written
from mxtrain.data.settings import DataConfig
from mxtrain.errors import BadSample, UserError

_log = logging.getLogger("mxtrain")

Encoding = Literal["as-is", "jpeg", "raw"]


@dataclass
class RecordsConfig:
    """What is read, what is written, and how."""

    data: Optional[str] = None
    """Folder of images with one folder per class or with train/ and val/ of such folders, or a list of images
    (.lst, .csv or .tsv)."""
    out: Optional[str] = None
    """Beginning of the files' names: flowers gives flowers.rec, flowers.idx ...; of a folder with train/ and val/
    it becomes a folder with train.rec, val.rec ... . The same word then goes to train.py --data."""
    encoding: Optional[Encoding] = None
    """as-is (the files' own bytes), jpeg (encoded anew) or raw (pixels, no decoding in training, 5 to 20 times as
    large); default: as-is, or jpeg with --resize."""
    resize: Optional[int] = None
    """Shorter side in pixels that larger images are scaled down to (default: none)."""
    quality: Optional[int] = None
    """Of --encoding jpeg, from 1 to 100 (default: 95)."""
    data_root: Optional[str] = None
    """Folder that the paths in a list start from (default: the folder of the list)."""
    image_column: Optional[str] = None
    """Column of a table that holds the paths (default: the one called path, file, filename or image)."""
    label_column: Optional[str] = None
    """Column of a table that holds the labels (default: the one called label, class, category or target)."""
    workers: Optional[int] = None
    """Threads that read, decode and encode (default: one for each core); changes nothing but the speed."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """What to do about an image that cannot be read: stop, or leave it out and say so."""
    overwrite: bool = False
    """Replace record files that are there."""

    def __post_init__(self):
        for flag, value in (("--data", self.data), ("--out", self.out)):
            if not value:
                raise UserError(f"{flag} is missing: give a path")
        if self.encoding not in (None, *get_args(Encoding)):
            raise UserError(f"--encoding {self.encoding}: must be one of {', '.join(get_args(Encoding))}")
        if self.encoding == "as-is" and self.resize is not None:
            raise UserError(f"--resize {self.resize}: images are not changed by --encoding as-is; give jpeg or raw")
        for flag, value in (("--resize", self.resize), ("--workers", self.workers)):
            if value is not None and value < 1:
                raise UserError(f"{flag} {value}: must be at least 1")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise UserError(f"--quality {self.quality}: must be from 1 to 100")
        if self.on_bad_sample not in ("stop", "skip"):
            raise UserError(f"--on-bad-sample {self.on_bad_sample}: must be stop or skip")
        self.encoding = self.encoding or ("as-is" if self.resize is None else "jpeg")
        if self.quality is not None and self.encoding != "jpeg":
            raise UserError(f"--quality {self.quality}: has no effect with --encoding {self.encoding}; it is for jpeg")
        self.quality = self.quality or (95 if self.encoding == "jpeg" else None)


def main(argv: List[str]) -> int:
    """Writes what the command line says; returns the exit code."""
    parser = config.parser("make_records.py", "Write a folder or a list of images to record files.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object and nothing else.")
    config.add_fields(parser, RecordsConfig)
    given: Dict[str, Any] = vars(parser.parse_args(argv, defaults=False))
    settings: SimpleNamespace = config.sections_of(given, {"records": RecordsConfig})
    start = time.perf_counter()
    files = make_records(settings.records)
    if given.get("json"):
        cli.print_json({"files": files, "seconds": round(time.perf_counter() - start, 3)})
    else:
        for file in files:
            print(f"{file['rec']}: {file['records']} images, {file['bytes']} bytes, {file['skipped']} skipped")
    return 0


def make_records(settings: RecordsConfig) -> List[dict]:
    """Writes the record files of all parts -> for each its path `rec`, and `records`, `bytes`, `sha256`, `skipped`.

    UserError for what is no source, and for an image that cannot be read unless those are skipped; TrainingError when
    the disk is full or fails.
    """
    parts, notes = _parts(settings)
    how = _how(settings)
    encoder = functools.partial(encode, settings=settings)
    jobs = [Job(*part, encoder, how, settings.on_bad_sample == "skip") for part in parts]
    done = [None if settings.overwrite else written(job) for job in jobs]
    for job, file in zip(jobs, done):
        if file is None:
            _check_free(job.paths, settings)
        for item in job.items:
            if "\n" in item.name:
                raise UserError(f"{item.path!r}: the name holds a line break, which a list of names cannot")
    for note in notes + [f"{file['rec']}: is complete already" for file in done if file]:
        _log.info("%s", note)
    return [file or write(job, settings.workers) for job, file in zip(jobs, done)]


def _parts(settings: RecordsConfig) -> Tuple[List[Tuple[Paths, List[Item], Optional[List[str]]]], List[str]]:
    """Where to write what, with the names of the classes where the labels are not the names; and notes."""
    from mxtrain.data import folder, listing, sources  # they import mxnet and cv2, which --help need not wait for

    source, out = os.path.expanduser(settings.data), os.path.expanduser(settings.out)
    into_folder = out.endswith("/") or os.path.isdir(out)
    single = paths_of(os.path.join(out, "train") if into_folder else out)
    fields = ("data", "data_root", "image_column", "label_column")
    which = DataConfig(**{name: getattr(settings, name) for name in fields})
    if listing.find(source):
        found = listing.read(source, which)
        return [(single, *_of_list(found))], found.notes + sources.unused(which, "list")
    if not os.path.isdir(source):
        fault = "is neither a folder nor a list (.lst, .csv, .tsv)" if os.path.exists(source) else "does not exist"
        raise UserError(f"--data {settings.data}: {fault}")
    if os.path.isdir(out) and os.path.samefile(out, source):
        raise UserError(f"--out {settings.out}: is the source; records there would be taken for it from now on")
    train_root, val_root, notes = folder.parts(source)
    train = folder.scan(train_root)
    classes = list(train.images)
    notes += train.notes() + folder.class_notes(classes) + sources.unused(which, "folder")
    if val_root is None:
        return [(single, _of_folder(train, classes), classes)], notes
    val = folder.scan(val_root)
    notes += val.notes() + folder.check_val_classes(val, classes)
    return [(paths_of(os.path.join(out, name)), _of_folder(part, classes), classes)
            for name, part in (("train", train), ("val", val))], notes


def _of_list(found) -> Tuple[List[Item], Optional[List[str]]]:
    """The images of a listing.Listing by class number, and the names of the classes."""
    items = [Item(image.path, image.name, image.size, found.numbers[name])
             for name, images in found.part.images.items() for image in images]
    items.sort(key=lambda item: item.label)
    if all(str(number) == name for name, number in found.numbers.items()):
        return items, None
    return items, found.names or sorted(found.numbers, key=found.numbers.get)


def _of_folder(part, classes: List[str]) -> List[Item]:
    """The images of a folder.Part in the order of its dataset."""
    return [Item(image.path, f"{name}/{image.name}", image.size, label)
            for label, name in enumerate(classes) for image in part.images.get(name, [])]


def _how(settings: RecordsConfig) -> dict:
    """What decides how an image is encoded; another OpenCV may write another JPEG."""
    import cv2

    return {"encoding": settings.encoding, "resize": settings.resize,
            "quality": settings.quality, "opencv": cv2.__version__}


def _check_free(paths: Paths, settings: RecordsConfig) -> None:
    """UserError when a file is there that would be replaced: a list of the same name may be the user's own."""
    there = [path for path in paths if os.path.exists(path)]
    source = [path for path in there if os.path.samefile(path, os.path.expanduser(settings.data))]
    if source:
        raise UserError(f"--out {settings.out}: {source[0]} is the source; choose another name")
    # What a run left that was killed at its very end is there too, and this one goes on with it.
    if there and not settings.overwrite and not begun(paths):
        raise UserError(f"--out {settings.out}: {there[0]} is there already; --overwrite replaces it")


def encode(path: str, settings: RecordsConfig) -> bytes:
    """What a record holds of an image file. BadSample for one that cannot be read."""
    import cv2

    from mxtrain.data import images

    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise BadSample(f"image {path}: {error.strerror}") from error
    image = images.pixels(images.picture(content, f"image {path}"))  # as in training; also to see that it can be read
    if settings.encoding == "as-is":
        return content
    height, width = image.shape[:2]
    shorter = min(height, width)
    if settings.resize is not None and shorter > settings.resize:
        sides = (max(1, round(side * settings.resize / shorter)) for side in (height, width))
        image = images.scale(image, *sides)
    if settings.encoding == "raw":
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.ascontiguousarray(image), version=(1, 0))
        return buffer.getvalue()
    try:
        _, encoded = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR),
                                  [cv2.IMWRITE_JPEG_QUALITY, settings.quality])
    except cv2.error:
        raise BadSample(f"image {path}: {width}x{height} pixels cannot be encoded as JPEG") from None
    return encoded.tobytes()
