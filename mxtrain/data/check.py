"""check_data.py and train.py --check-data: every sample is read once, and what a training would get is told.

Of each sample only some numbers are kept: 16 bytes of a digest, its size and its format.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from tqdm import tqdm

from mxtrain import cli, config
from mxtrain.data.settings import DataConfig
from mxtrain.data.text_settings import TextConfig
from mxtrain.errors import BadSample, UserError
from mxtrain.train.settings import TrainConfig

_FIELDS = {
    TrainConfig: {"task"},
    DataConfig: {"data", "val", "val_split", "data_root", "image_column", "label_column", "image_size", "workers"},
    TextConfig: {"text_column", "encoding"},
}
"""The settings of a training that decide which samples there are."""

_SHOWN = 20  # bad samples, and groups of equal ones, that the text names; JSON names all
_BATCH = 64

_FORMATS = ("", "BMP", "JPEG", "JPEG grey", "JPEG CMYK", "PNG", "PNG grey", "PNG palette", "PNG grey with alpha",
            "PNG with alpha", "PNM", "TIFF", "WebP", "array", "other")
_PNG_COLORS = {0: "PNG grey", 2: "PNG", 3: "PNG palette", 4: "PNG grey with alpha", 6: "PNG with alpha"}
_STARTS = {b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"P5": "PNM", b"P6": "PNM", b"\x93NUMPY": "array"}


class Readings(NamedTuple):
    """What was found out of the n samples of a part, in their order; zeros for those that cannot be read."""

    digests: np.ndarray
    """(n, 16) uint8; equal for equal samples."""
    sizes: np.ndarray
    """(n, 2) int32: height and width of images; number of features of texts, and 1."""
    formats: np.ndarray
    """(n,) uint8, places in _FORMATS."""
    bad: Dict[int, str]
    """Samples that cannot be read, and why."""


class Part(NamedTuple):
    """The training or the validation samples."""

    name: str
    dataset: Any
    read: Readings

    @property
    def readable(self) -> np.ndarray:
        """(n,) bool."""
        return np.isin(np.arange(len(self.dataset)), list(self.read.bad), invert=True)


def main(argv: List[str]) -> int:
    """Checks what the command line names; returns the exit code, 1 when a sample cannot be read."""
    from mxtrain.tasks import kind

    parser = config.parser("check_data.py", "Read all training and validation samples once, and tell what they are.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object and nothing else.")
    for section, names in _FIELDS.items():
        config.add_fields(parser, section, names)
    given: Dict[str, Any] = vars(parser.parse_args(argv, defaults=False))
    as_json = bool(given.pop("json", False))
    settings = config.build(given)
    settings.train.task = kind.resolve(settings)
    return check(settings, as_json)


def check(settings: SimpleNamespace, as_json: bool) -> int:
    """Reads the data of a training's settings, whose task has been resolved, and prints the report.

    Returns the exit code: 0, or 1 when a sample cannot be read. UserError for data that train.py would refuse.
    """
    if settings.train.task == "lm":
        raise UserError(f"--data {settings.data.data}: is a text for --task lm, any of which will do; images and "
                        "labelled texts are checked")
    data = _open(settings)
    began = time.perf_counter()
    parts = [Part(name, dataset, read(dataset, settings.data.workers, name)) for name, dataset in _datasets(data)]
    result = {**report(data, parts), "seconds": round(time.perf_counter() - began, 3)}
    if as_json:
        cli.print_json(result)
    else:
        print("\n".join(lines(result)))
    return 1 if result["bad"] else 0


def read(dataset, workers: Optional[int], name: str) -> Readings:
    """Reads all samples, by threads. name: of the part, for the progress bar."""
    from mxtrain.data.loader import Loader  # it imports mxnet

    samples = _Samples(dataset)
    loader = Loader(samples, _BATCH, shuffle="none", workers=workers)
    batches = []
    try:
        with tqdm(total=len(dataset), unit="sample", desc=name, disable=None) as bar:
            for batch in loader.batches(0):
                batches.append(batch)
                bar.update(len(batch[0]))
    finally:
        loader.close()
    return Readings(*(np.concatenate(column) for column in zip(*batches)), samples.failed)


class _Samples:
    """A dataset as the numbers that are kept of each sample; what cannot be read is in `failed`, with the reason."""

    threads = True

    def __init__(self, dataset):
        self._dataset = dataset
        self.failed: Dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: Tuple[int, int]) -> Tuple[np.ndarray, np.ndarray, np.uint8]:
        try:
            content, size, kind = _sample(self._dataset, key[1])
        except BadSample as error:
            self.failed[key[1]] = str(error)
            return np.zeros(16, np.uint8), np.zeros(2, np.int32), np.uint8(0)
        digest = hashlib.sha256(content).digest()[:16]
        return np.frombuffer(digest, np.uint8), np.array(size, np.int32), np.uint8(_FORMATS.index(kind))

    def describe(self, index: int) -> str:
        return _describe(self._dataset, index)


def _sample(dataset, index: int) -> Tuple[Any, Tuple[int, int], str]:
    """What identifies a sample, its size, and its format where it is stored as an encoded image."""
    if hasattr(dataset, "encoded"):
        from mxtrain.data import images

        encoded = dataset.encoded(index)
        return encoded, images.pixels(dataset.picture(encoded, index)).shape[:2], format_of(encoded)
    x, _ = dataset[0, index]
    if x.ndim == 1:  # the ids of a text, and zeros
        count = int(np.count_nonzero(x))
        return np.ascontiguousarray(x[:count]), (count, 1), ""
    return np.ascontiguousarray(x), x.shape[:2], ""


def format_of(encoded: bytes) -> str:
    """Format and kind of colors of an encoded image, by its first bytes."""
    if encoded.startswith(b"\x89PNG") and len(encoded) > 25:
        return _PNG_COLORS.get(encoded[25], "PNG") if encoded[24] <= 8 else "PNG"
    if encoded.startswith(b"\xff\xd8"):
        return {1: "JPEG grey", 4: "JPEG CMYK"}.get(_jpeg_components(encoded), "JPEG")
    if encoded[:4] == b"RIFF" and encoded[8:12] == b"WEBP":
        return "WebP"
    return next((name for start, name in _STARTS.items() if encoded.startswith(start)), "other")


def _jpeg_components(encoded: bytes) -> int:
    """Number of colors of a JPEG, 0 where its frame is not found."""
    at = 2
    while at + 10 <= len(encoded) and encoded[at] == 0xFF:
        kind = encoded[at + 1]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # a frame's header
            return encoded[at + 9]
        at += 1 if kind == 0xFF else 2 + int.from_bytes(encoded[at + 2:at + 4], "big")
    return 0


def report(data, parts: Sequence[Part]) -> dict:
    """All that is told, as JSON."""
    sized = np.concatenate([part.read.sizes[part.readable] for part in parts])
    things = {"texts": _texts(sized)} if hasattr(data, "columns") else {"images": _images(data, parts, sized)}
    counts = {part.name: np.bincount(part.dataset.y, minlength=len(data.classes)).tolist() for part in parts}
    return {
        "data": data.name,
        "notes": list(data.notes),
        "samples": {name: sum(count) for name, count in counts.items()},
        "classes": [{"class": name, **{part: count[label] for part, count in counts.items()}}
                    for label, name in enumerate(data.classes)],
        **things,
        "duplicates": {"same": _sameness(data, parts), **_duplicates(parts, data.classes)},
        "bad": [{"part": part.name, "sample": _describe(part.dataset, index), "error": part.read.bad[index]}
                for part in parts for index in sorted(part.read.bad)],
    }


def _open(settings: SimpleNamespace):
    """The run's data. Imports mxnet."""
    if settings.train.task == "text":
        from mxtrain.data.text import open_texts

        return open_texts(settings.data, settings.text)
    from mxtrain.data.sources import open_data

    return open_data(settings.data, settings.train.seed)


def _datasets(data) -> Iterator[Tuple[str, Any]]:
    """The parts by name, with their samples as they are stored."""
    for name, dataset in (("train", data.train), ("val", data.val)):
        if dataset is not None:
            yield name, getattr(dataset, "dataset", dataset)


def _describe(dataset, index: int) -> str:
    describe = getattr(dataset, "describe", None)
    return describe(index) if describe else f"sample {index}"


def _sameness(data, parts: Sequence[Part]) -> str:
    """What equal samples have in common."""
    if hasattr(data, "columns"):
        return "words"
    return "bytes" if all(hasattr(part.dataset, "encoded") for part in parts) else "pixels"


def _texts(sizes: np.ndarray) -> dict:
    features = np.sort(sizes[:, 0])
    return {"empty": int((features == 0).sum()), "features": _spread(features.tolist())}


def _images(data, parts: Sequence[Part], sizes: np.ndarray) -> dict:
    by_area = sizes[np.argsort(sizes[:, 0].astype(np.int64) * sizes[:, 1], kind="stable")].tolist()
    formats = Counter(_FORMATS[kind] for part in parts for kind in part.read.formats[part.readable].tolist())
    scaled = data.resize is not None
    return {"size": _spread(by_area), "sizes": len(np.unique(sizes, axis=0)), "image_size": list(data.shape[:2]),
            "smaller": int((sizes < data.shape[:2]).any(axis=1).sum()) if scaled else 0,
            "formats": {name: count for name, count in sorted(formats.items()) if name}}


def _spread(values: list) -> Optional[dict]:
    """Of sorted values; None without any."""
    if not values:
        return None
    return {"smallest": values[0], "median": values[(len(values) - 1) // 2], "largest": values[-1]}


def _duplicates(parts: Sequence[Part], classes: Sequence[str]) -> dict:
    """Counts of samples that repeat another, and the groups of equal ones with the names of all."""
    groups = [_group(members, parts, classes) for members in _equal(parts)]
    extra = {part.name: sum(max(0, len(group[part.name]) - 1) for group in groups) for part in parts}
    between = sum(len(group["val"]) for group in groups if group["train"] and group["val"]) if len(parts) > 1 else 0
    return {**extra, "val_in_train": between, "several_labels": sum(len(group["labels"]) > 1 for group in groups),
            "groups": groups}


def _equal(parts: Sequence[Part]) -> Iterable[np.ndarray]:
    """Groups of equal samples: (k, 2) numbers of part and sample. Bad ones, and texts without words, equal none."""
    used = [np.flatnonzero(part.readable & (part.read.sizes[:, 0] > 0)) for part in parts]
    where = np.concatenate([np.stack([np.full(len(rows), number), rows], axis=1) for number, rows in enumerate(used)])
    digests = np.concatenate([part.read.digests[rows] for part, rows in zip(parts, used)])
    keys = np.ascontiguousarray(digests).view("V16").ravel() if len(digests) else np.zeros(0, "V16")
    _, number, counts = np.unique(keys, return_inverse=True, return_counts=True)
    rows = np.flatnonzero(counts[number.ravel()] > 1)
    order = rows[np.argsort(number.ravel()[rows], kind="stable")]
    groups = np.split(where[order], np.flatnonzero(np.diff(number.ravel()[order])) + 1) if len(order) else []
    return sorted(groups, key=lambda group: tuple(group[0]))


def _group(members: np.ndarray, parts: Sequence[Part], classes: Sequence[str]) -> dict:
    names = {part.name: [_describe(part.dataset, row) for number, row in members.tolist() if parts[number] is part]
             for part in parts}
    labels = {int(parts[number].dataset.y[row]) for number, row in members.tolist()}
    return {**names, "labels": [classes[label] for label in sorted(labels)]}


# The report as text


def lines(result: dict) -> List[str]:
    """The report for people."""
    found = [*result["notes"], "", *_class_lines(result), ""]
    found += _text_lines(result["texts"]) if "texts" in result else _image_lines(result["images"])
    found += _duplicate_lines(result["duplicates"], "texts" if "texts" in result else "images")
    found += _bad_lines(result)
    count = sum(result["samples"].values())
    return [*found, f"{count} samples in {result['seconds']:.1f} s"]


def _class_lines(result: dict) -> List[str]:
    parts = list(result["samples"])
    width = max(map(len, ["class", "all", *(row["class"] for row in result["classes"])]))
    rows = [*result["classes"], {"class": "all", **result["samples"]}]
    return [f"{'class':{width}}" + "".join(f"{name:>10}" for name in parts),
            *(f"{row['class']:{width}}" + "".join(f"{row[name]:10}" for name in parts)
              + ("  no validation samples" if row.get("val") == 0 else "") for row in rows)]


def _image_lines(images: dict) -> List[str]:
    found = []
    if images["sizes"] == 1:
        found.append("sizes: all {}x{}".format(*images["size"]["median"]))
    elif images["sizes"]:
        spread = ", ".join(f"{name} {height}x{width}" for name, (height, width) in images["size"].items())
        found.append(f"sizes (height x width, by area): {spread}; {images['sizes']} different")
    if images["smaller"]:
        height, width = images["image_size"]
        found.append(f"{images['smaller']} images are smaller than {height}x{width}, to which they will be scaled up")
    if images["formats"]:
        found.append("formats: " + ", ".join(f"{name} {count}" for name, count in images["formats"].items()))
    return found


def _text_lines(texts: dict) -> List[str]:
    spread = ", ".join(f"{name} {count}" for name, count in (texts["features"] or {}).items())
    return [f"features of a text (words, pairs ... that are used): {spread}; {texts['empty']} texts have no words"]


def _duplicate_lines(found: dict, things: str) -> List[str]:
    counts = ", ".join(f"{found[name]} in {name}" for name in ("train", "val") if name in found)
    text = f"{things} that repeat another ({found['same']} are the same): {counts}"
    if "val" in found:
        text += f"; {found['val_in_train']} in val are in train too"
    shown = [f"  {_named(group['train'])} = {_named(group['val'])}" for group in found["groups"]
             if group["train"] and group.get("val")]
    shown += [f"  with the labels {', '.join(map(repr, group['labels']))}: "
              + _named(group["train"] + group.get("val", []))
              for group in found["groups"] if len(group["labels"]) > 1]
    return [text, *_some(shown)]


def _named(names: List[str]) -> str:
    return " = ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _bad_lines(result: dict) -> List[str]:
    bad = result["bad"]
    if not bad:
        return ["all samples can be read"]
    what = "training stops at them; --on-bad-sample skip leaves them out"
    return [f"{len(bad)} samples cannot be read ({what}):", *_some([f"  {sample['error']}" for sample in bad])]


def _some(shown: List[str]) -> List[str]:
    return shown[:_SHOWN] + ([f"  and {len(shown) - _SHOWN} more (--json names all)"] if len(shown) > _SHOWN else [])
