"""Writes a record file by threads, in a fixed order, so that a run that ended anywhere can be gone on with.

What is written goes to hidden names beside the output, .NAME.rec.part and .NAME.rec.plan, and gets its own names
when all of it is on the disk. The plan says what is being written: only the same is gone on with.
"""

from __future__ import annotations

import collections
import errno
import fcntl
import hashlib
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from tqdm import tqdm

from mxtrain import files
from mxtrain.data.record_files import FORMAT, Head, Paths, RecordFile, index_text, pack, read_about
from mxtrain.errors import BadSample, TrainingError, UserError

_log = logging.getLogger("mxtrain")

# What the user can only mend by another --out; everything else is the machine's failure.
_NO_PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR,
             errno.ENAMETOOLONG}


class Item(NamedTuple):
    """One image: its file, what the list of names calls it, its size in bytes, and its label."""

    path: str
    name: str
    size: int
    label: int


class Job(NamedTuple):
    """A record file to write."""

    paths: Paths
    items: List[Item]
    classes: Optional[List[str]]
    """Names by label, None where the labels are the names."""
    encode: Callable[[str], bytes]
    """Path of an image -> what its record holds; raises BadSample."""
    how: dict
    """What `encode` does, in words and numbers: with the items, it decides the bytes of the file."""
    skip: bool
    """Whether images that cannot be read are left out; otherwise they end the writing."""


def write(job: Job, workers: Optional[int]) -> dict:
    """Writes a record file and what belongs beside it -> its path `rec`, and `records`, `bytes`, `sha256`, `skipped`.

    UserError for an image that cannot be read, unless such are skipped, and for a place that cannot be written to;
    TrainingError when the disk is full or fails.
    """
    paths, recipe = job.paths, _recipe(job)
    partial, plan = _hidden(paths.rec, "part"), _hidden(paths.rec, "plan")
    with _one_line(paths.rec):
        os.makedirs(os.path.dirname(paths.rec) or ".", exist_ok=True)
        with open(partial, "ab+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{paths.rec}: another make_records.py is writing it") from None
            heads = _resume(partial, job) if _content_of(plan) == recipe else []
            file.truncate(heads[-1].end if heads else 0)
            _replace(plan, recipe)
            digest = hashlib.sha256()
            if heads:
                _log.info("%s: goes on after %d of %d images", paths.rec, heads[-1].number + 1, len(job.items))
                file.seek(0)
                for block in iter(lambda: file.read(1 << 20), b""):
                    digest.update(block)
            numbers, starts, size = _append(file, digest, heads, job, workers)
            file.flush()
            os.fsync(file.fileno())
            about = _about(job, recipe, len(numbers), size, digest.hexdigest())
            _write_beside(job, numbers, starts, about)
            os.replace(partial, paths.rec)  # last: with it, the file is complete
            os.unlink(plan)
            files.flush(os.path.dirname(paths.rec) or ".")
    return _summary(job, about)


def written(job: Job) -> Optional[dict]:
    """What `write` would return, when the file is there already, complete and made in the same way; else None."""
    if not os.path.isfile(job.paths.rec):
        return None
    about, _ = read_about(job.paths, os.path.getsize(job.paths.rec))
    if about is None or about.get("recipe") != _sha256(_recipe(job)):
        return None
    return _summary(job, about) if job.skip or about["records"] == len(job.items) else None


def begun(paths: Paths) -> bool:
    """Whether a run that ended early was writing this file."""
    return os.path.exists(_hidden(paths.rec, "plan"))


def _append(
    file, digest, heads: List[Head], job: Job, workers: Optional[int]
) -> Tuple[List[int], List[int], int]:
    """Writes the records behind `heads` -> numbers and first bytes of all records, and the size of the file."""
    numbers, starts = [head.number for head in heads], [head.start for head in heads]
    size = heads[-1].end if heads else 0
    left = range(numbers[-1] + 1 if numbers else 0, len(job.items))
    name = os.path.basename(job.paths.rec)
    with tqdm(total=len(job.items), initial=left.start, unit="img", disable=None, desc=name) as bar:
        for number, record in zip(left, _in_order(lambda number: _record(job, number), left, workers)):
            bar.update()
            if isinstance(record, BadSample):
                if not job.skip:
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
        os.unlink(_hidden(job.paths.rec, "plan"))
        raise UserError(f"{job.paths.rec}: none of {len(job.items)} images can be read")
    return numbers, starts, size


def _record(job: Job, number: int) -> Union[bytes, BadSample]:
    """The record of an image as it stands in the file, or why there is none."""
    item = job.items[number]
    try:
        return pack(item.label, number, job.encode(item.path))
    except BadSample as error:
        return error


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


def _resume(partial: str, job: Job) -> List[Head]:
    """The records that an earlier run of the same command left, up to the first that is not as it should be."""
    file = RecordFile(partial)
    heads: List[Head] = []
    try:
        for head in file.heads():
            expected = heads[-1].number + 1 if heads else 0
            if not expected <= head.number < len(job.items) or head.label != job.items[head.number].label:
                break
            if head.number > expected and not job.skip:  # a gap is an image that was skipped
                break
            heads.append(head)
    except UserError:  # cut in a record, or damaged behind it
        pass
    # After a power failure, the last blocks may be those that never reached the disk.
    while heads and _record(job, heads[-1].number) != file.read(heads[-1].start, heads[-1].end):
        heads.pop()
    return heads


def _recipe(job: Job) -> str:
    """What decides the bytes of a record file."""
    digest = hashlib.sha256()
    for item in job.items:
        digest.update(f"{item.label}\t{item.size}\t{item.name}\n".encode("utf-8", "surrogateescape"))
    return json.dumps({"format": FORMAT, "images": digest.hexdigest(), "classes": job.classes, **job.how})


def _about(job: Job, recipe: str, records: int, size: int, sha256: str) -> dict:
    """What the sidecar says, but for the checksums of the small files."""
    return {"format": FORMAT, "records": records, "bytes": size, "sha256": sha256, "recipe": _sha256(recipe), **job.how}


def _summary(job: Job, about: dict) -> dict:
    return {"rec": job.paths.rec, **{key: about[key] for key in ("records", "bytes", "sha256")},
            "skipped": len(job.items) - about["records"]}


def _write_beside(job: Job, numbers: Sequence[int], starts: Sequence[int], about: dict) -> None:
    paths = job.paths
    _replace(paths.idx, index_text(numbers, starts))
    _replace(paths.lst, "".join(f"{n}\t{job.items[n].label}\t{job.items[n].name}\n" for n in numbers))
    if job.classes is not None:
        _replace(paths.classes, "".join(f"{name}\n" for name in job.classes))
    elif os.path.exists(paths.classes):  # of a file that is overwritten
        os.unlink(paths.classes)
    sums = {"idx_sha256": files.sha256(paths.idx), "lst_sha256": files.sha256(paths.lst)}
    _replace(paths.json, json.dumps({**about, **sums}, indent=1) + "\n")


@contextmanager
def _one_line(path: str):
    """Failures of the disk, and places where nobody can write, in one line."""
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


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hidden(path: str, ending: str) -> str:
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{ending}")
