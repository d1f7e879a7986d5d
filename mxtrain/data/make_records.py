"""make_records.py: a folder or a list of images becomes record files.

The records of a part are in the order of the folder's dataset, by class and name, so that training from them
sees the same samples at the same places. What is written goes to hidden names beside the output, and gets its
own names when all is complete; the same command goes on with what a killed one left.
"""

from __future__ import annotations

import collections
import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterable, Iterator, List, Literal, NamedTuple, Optional, Sequence, Tuple, Union
from typing import get_args

import numpy as np
from tqdm import tqdm

from mxtrain import cli, config
from mxtrain.data.record_files import FORMAT, Head, Paths, RecordFile, checksum, index_text, pack, paths_of
from mxtrain.data.settings import DataConfig
from mxtrain.errors import BadSample, TrainingError, UserError

_log = logging.getLogger("mxtrain")

# What the user can only mend by another --out; everything else is the machine's failure.
_NO_PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR,
             errno.ENAMETOOLONG}

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
    quality: int = 95
    """Of --encoding jpeg, from 1 to 100."""
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
        if not 1 <= self.quality <= 100:
            raise UserError(f"--quality {self.quality}: must be from 1 to 100")
        if self.on_bad_sample not in ("stop", "skip"):
            raise UserError(f"--on-bad-sample {self.on_bad_sample}: must be stop or skip")
        self.encoding = self.encoding or ("as-is" if self.resize is None else "jpeg")


class _Item(NamedTuple):
    """One image: its file, what the list of names calls it, its size in bytes, and its label."""

    path: str
    name: str
    size: int
    label: int


class _Job(NamedTuple):
    """A record file to write. classes: names by label, None where the labels are the names."""

    paths: Paths
    items: List[_Item]
    classes: Optional[List[str]]


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
    jobs, notes = _jobs(settings)
    for job in jobs:
        _check_free(job.paths, settings)
        for item in job.items:
            if "\n" in item.name:
                raise UserError(f"{item.path!r}: the name holds a line break, which a list of names cannot")
    for note in notes:
        _log.info("%s", note)
    return [_write(job, settings) for job in jobs]


def _jobs(settings: RecordsConfig) -> Tuple[List[_Job], List[str]]:
    """What to write, and notes."""
    from mxtrain.data import folder, listing  # they import mxnet and cv2, which --help need not wait for

    source, out = os.path.expanduser(settings.data), os.path.expanduser(settings.out)
    into_folder = out.endswith("/") or os.path.isdir(out)
    single = paths_of(os.path.join(out, "train") if into_folder else out)
    if listing.find(source):
        fields = ("data", "data_root", "image_column", "label_column")
        found = listing.read(source, DataConfig(**{name: getattr(settings, name) for name in fields}))
        items = [_Item(image.path, image.name, image.size, found.numbers[name])
                 for name, images in found.part.images.items() for image in images]
        items.sort(key=lambda item: item.label)
        classes = found.names or sorted(found.numbers, key=found.numbers.get)
        numbered = all(str(number) == name for name, number in found.numbers.items())
        return [_Job(single, items, None if numbered else classes)], found.notes
    if not os.path.isdir(source):
        fault = "is neither a folder nor a list (.lst, .csv, .tsv)" if os.path.exists(source) else "does not exist"
        raise UserError(f"--data {settings.data}: {fault}")
    train_root, val_root, notes = folder.parts(source)
    train = folder.scan(train_root)
    classes = list(train.images)
    notes += train.notes() + folder.class_notes(classes)
    if val_root is None:
        return [_Job(single, _folder_items(train, classes), classes)], notes
    val = folder.scan(val_root)
    notes += val.notes() + folder.check_val_classes(val, classes)
    return [_Job(paths_of(os.path.join(out, name)), _folder_items(part, classes), classes)
            for name, part in (("train", train), ("val", val))], notes


def _check_free(paths: Paths, settings: RecordsConfig) -> None:
    """UserError when a file is there that would be replaced: a list of the same name may be the user's own."""
    there = [path for path in paths if os.path.exists(path)]
    source = [path for path in there if os.path.samefile(path, os.path.expanduser(settings.data))]
    if source:
        raise UserError(f"--out {settings.out}: {source[0]} is the source; choose another name")
    # What a run left that was killed at its very end is there too, and this one goes on with it.
    if there and not settings.overwrite and not os.path.exists(_hidden(paths.rec, "plan")):
        raise UserError(f"--out {settings.out}: {there[0]} is there already; --overwrite replaces it")


def _folder_items(part, classes: List[str]) -> List[_Item]:
    return [_Item(image.path, f"{name}/{image.name}", image.size, label)
            for label, name in enumerate(classes) for image in part.images.get(name, [])]


def _write(job: _Job, settings: RecordsConfig) -> dict:
    """Writes one record file and what belongs beside it."""
    paths = job.paths
    partial, plan = _hidden(paths.rec, "part"), _hidden(paths.rec, "plan")
    with _writing(paths.rec):
        os.makedirs(os.path.dirname(paths.rec) or ".", exist_ok=True)
        with open(partial, "ab+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{paths.rec}: another make_records.py is writing it") from None
            recipe = _recipe(job, settings)
            heads = _resume(partial, job, settings) if _content_of(plan) == recipe else []
            file.truncate(heads[-1].end if heads else 0)
            _replace(plan, recipe)
            digest = hashlib.sha256()
            if heads:
                _log.info("%s: goes on after %d of %d images", paths.rec, heads[-1].number + 1, len(job.items))
                file.seek(0)
                for block in iter(lambda: file.read(1 << 20), b""):
                    digest.update(block)
            numbers, starts, size = _append(file, digest, heads, job, settings)
            file.flush()
            os.fsync(file.fileno())
            _finish(job, settings, numbers, starts, size, digest.hexdigest())
            os.replace(partial, paths.rec)  # last: with it, the file is complete
            os.unlink(plan)
            _sync_folder(paths.rec)
    return {"rec": paths.rec, "records": len(numbers), "bytes": size, "sha256": digest.hexdigest(),
            "skipped": len(job.items) - len(numbers)}


def _append(file, digest, heads: List[Head], job: _Job, settings: RecordsConfig) -> Tuple[List[int], List[int], int]:
    """Writes the records behind `heads` -> numbers and first bytes of all records, and the size of the file."""
    numbers, starts = [head.number for head in heads], [head.start for head in heads]
    size = heads[-1].end if heads else 0
    first = numbers[-1] + 1 if numbers else 0
    name = os.path.basename(job.paths.rec)
    with tqdm(total=len(job.items), initial=first, unit="img", disable=None, desc=name) as bar:
        work = _in_order(lambda number: _record(job, number, settings), range(first, len(job.items)), settings.workers)
        for number, record in zip(range(first, len(job.items)), work):
            bar.update()
            if isinstance(record, BadSample):
                if settings.on_bad_sample == "stop":
                    raise UserError(f"{record} (--on-bad-sample skip leaves such images out)")
                _log.warning("skipped: %s", record)
                continue
            file.write(record)
            digest.update(record)
            numbers.append(number)
            starts.append(size)
            size += len(record)
    if not numbers:
        os.unlink(file.name)
        raise UserError(f"--data {settings.data}: none of {len(job.items)} images can be read")
    return numbers, starts, size


def _record(job: _Job, number: int, settings: RecordsConfig) -> Union[bytes, BadSample]:
    """The record of an image as it stands in the file, or the BadSample that says why there is none."""
    item = job.items[number]
    try:
        return pack(item.label, number, encode(item.path, settings))
    except BadSample as error:
        return error


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


def _in_order(function: Callable[[int], Any], arguments: Iterable[int], workers: Optional[int]) -> Iterator[Any]:
    """function(argument) for each, in order, by threads that run a little ahead."""
    workers = workers or len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(workers)
    waiting: collections.deque = collections.deque()
    try:
        for argument in arguments:
            waiting.append(pool.submit(function, argument))
            if len(waiting) >= 4 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        pool.shutdown()


def _resume(partial: str, job: _Job, settings: RecordsConfig) -> List[Head]:
    """The records that an earlier run of the same command left, up to the first that is not as it should be."""
    file = RecordFile(partial)
    heads: List[Head] = []
    try:
        for head in file.heads():
            expected = heads[-1].number + 1 if heads else 0
            # A gap is an image that was skipped.
            if not expected <= head.number < len(job.items) or head.label != job.items[head.number].label:
                break
            if head.number > expected and settings.on_bad_sample == "stop":
                break
            heads.append(head)
    except UserError:  # cut in a record, or damaged behind it
        pass
    # After a power failure, the last blocks may be those that never reached the disk.
    while heads and _record(job, heads[-1].number, settings) != file.read(heads[-1].start, heads[-1].end):
        heads.pop()
    return heads


def _recipe(job: _Job, settings: RecordsConfig) -> str:
    """What decides the bytes of a record file; the rest of an earlier run is used only when it is the same."""
    import cv2

    digest = hashlib.sha256()
    for item in job.items:
        digest.update(f"{item.label}\t{item.size}\t{item.name}\n".encode("utf-8", "surrogateescape"))
    how = [settings.encoding, settings.resize, settings.quality, cv2.__version__]
    return json.dumps({"format": FORMAT, "images": digest.hexdigest(), "how": how})


def _finish(job: _Job, settings: RecordsConfig, numbers: Sequence[int], starts: Sequence[int], size: int, sha256: str):
    """Writes the files beside the record file."""
    paths = job.paths
    _replace(paths.idx, index_text(numbers, starts))
    _replace(paths.lst, "".join(f"{n}\t{job.items[n].label}\t{job.items[n].name}\n" for n in numbers))
    if job.classes is not None:
        _replace(paths.classes, "".join(f"{name}\n" for name in job.classes))
    elif os.path.exists(paths.classes):  # of a file that is overwritten
        os.unlink(paths.classes)
    about = {"format": FORMAT, "records": len(numbers), "bytes": size, "sha256": sha256,
             "idx_sha256": checksum(paths.idx), "lst_sha256": checksum(paths.lst),
             "encoding": settings.encoding, "resize": settings.resize,
             "quality": settings.quality if settings.encoding == "jpeg" else None}
    _replace(paths.json, json.dumps(about, indent=1) + "\n")


@contextmanager
def _writing(path: str):
    """Turns failures of the disk, and places where nobody can write, into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_PLACE:
            raise UserError(f"--out: {error.filename or path}: cannot be written: {error.strerror}") from error
        raise TrainingError(f"{error.filename or path}: cannot be written: {error.strerror or error}; the same command "
                            "goes on with what is there") from error


def _replace(path: str, text: str) -> None:
    """Writes a small file so that it is there whole or not at all."""
    temporary = _hidden(path, "new")
    with open(temporary, "w", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _content_of(path: str) -> Optional[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return None


def _hidden(path: str, ending: str) -> str:
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{ending}")


def _sync_folder(path: str) -> None:
    descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
