#!/usr/bin/env python3
"""Images per second, from JPEG files to a float batch on the context, of mxtrain and of other ways to load them.

    python scripts/bench/data.py                     # 512 JPEGs, made from scikit-learn's two photographs
    python scripts/bench/data.py --rounds 9 --json
    python scripts/bench/data.py --training          # also ResNet-18 from the folder and from memory; takes minutes

All read the same 512 pictures of 500x375, cut out a random part, scale it to 224x224, mirror half of them and
normalize, with the same number of threads; all are asked until their float batch is there (`wait_to_read`).
`decode` is cv2.imdecode alone in as many threads, which is the limit of whoever decodes every picture whole.
They take turns; a turn is three passes over the pictures, after one that is not counted. Ratios are medians over
the rounds of the ratio within a round, since a busy machine slows a whole round.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mxtrain  # noqa: E402, F401  (before mxnet)

SIZE, BATCH, COUNT, PASSES = 224, 32, 512, 3
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RATIOS = {"folder/ImageRecordIter": ("folder", "ImageRecordIter"), "folder/decode": ("folder", "decode"),
          "folder/DataLoader": ("folder", "DataLoader"), "folder/DataLoader threads": ("folder", "DataLoader threads"),
          "records/folder": ("records", "folder"), "records 256/folder": ("records 256", "folder"),
          "records raw/folder": ("records raw", "folder")}


def main() -> None:
    options = _options()
    logging.getLogger("mxtrain").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as place:
        make_pictures(Path(place), options.count)
        found = measure(Path(place), options)
        first = {name: first_batch(Path(place), options, name) for name in ("folder", "DataLoader")}
        memory = {kind: worker_memory(Path(place), kind) for kind in ("thread", "process")}
        training = train(Path(place), options) if options.training else {}
    output = {"images_per_second": {name: statistics.median(rates) for name, rates in found.items()},
              "seconds_to_first_batch": first, "megabytes_per_worker": memory, "sampler": sampler(),
              **({"training_images_per_second": training} if training else {})}
    output["ratios"] = {name: statistics.median(x / y for x, y in zip(found[a], found[b]))
                        for name, (a, b) in RATIOS.items() if a in found and b in found}
    if options.json:
        print(json.dumps(output))
        return
    for title, values in output.items():
        print(title.replace("_", " "))
        for name, value in values.items():
            spread = f"   ({min(found[name]):.4g} .. {max(found[name]):.4g})" if title == "images_per_second" else ""
            print(f"  {name:36}{value:10.4g}{spread}")


def _options():
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="(default: one per core)")
    parser.add_argument("--count", type=int, default=COUNT, help="pictures")
    parser.add_argument("--only", nargs="+", choices=COMPETITORS, default=list(COMPETITORS), help="who runs")
    parser.add_argument("--training", action="store_true", help="ResNet-18 end to end, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def make_pictures(place: Path, count: int) -> None:
    """place/images/train/CLASS/NUMBER.jpg, and record files of them: as they are, 256 pixels small, raw."""
    import cv2
    import numpy as np
    from sklearn.datasets import load_sample_images

    photographs = [cv2.resize(image, (500, 375), interpolation=cv2.INTER_AREA)[:, :, ::-1]
                   for image in load_sample_images().images]
    for number in range(count):
        picture = np.roll(photographs[number % 2], number, axis=1)
        folder = place / "images" / "train" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f"{number:04d}.jpg"), picture, [cv2.IMWRITE_JPEG_QUALITY, 95])
    for name, flags in (("records", []), ("small", ["--resize", "256"]), ("raw", ["--encoding", "raw"])):
        program = [sys.executable, str(ROOT / "scripts" / "make_records.py"), "--data", str(place / "images" / "train"),
                   "--out", str(place / name), *flags]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def measure(place: Path, options) -> dict:
    """Images per second of each competitor in each round."""
    found = {name: [] for name in options.only}
    with contextlib.ExitStack() as stack:
        turns = {name: COMPETITORS[name](place, options.threads, stack) for name in options.only}
        for number in range(-1, options.rounds):
            first = number % len(turns)  # nobody should always follow the same one
            for name in [*options.only[first:], *options.only[:first]]:
                began = time.perf_counter()
                images = sum(turns[name](last) for last in [False] * (PASSES - 1) + [True])
                if number >= 0:
                    found[name].append(images / (time.perf_counter() - began))
    return found


def decode(place, threads, stack):
    """cv2.imdecode of every picture, and nothing else."""
    import cv2
    import numpy as np

    cv2.setNumThreads(0)
    encoded = [np.frombuffer(path.read_bytes(), np.uint8) for path in sorted(place.glob("images/train/*/*.jpg"))]
    pool = stack.enter_context(ThreadPoolExecutor(threads))

    def some(first):
        for content in encoded[first::threads]:
            cv2.imdecode(content, cv2.IMREAD_COLOR)

    def turn(last):
        list(pool.map(some, range(threads)))
        return len(encoded)

    return turn


def mxtrains(path):
    """mxtrain's loader and normalization, from what lies at `path`."""
    def competitor(place, threads, stack):
        from mxtrain.data.loader import Loader
        from mxtrain.data.settings import DataConfig
        from mxtrain.data.sources import open_data

        data = open_data(DataConfig(data=str(place / path), val_split=0.0))
        loader = Loader(data.train, BATCH, workers=threads)
        stack.callback(loader.close)
        to_float = _to_float(data)
        epochs = itertools.count()

        def turn(last):
            images, epoch = 0, next(epochs)
            for x, y in loader.batches(epoch):
                to_float(x).wait_to_read()
                images += len(y)
                if images == len(data.train) and not last:  # as in training; nothing is left over for the next turn
                    loader.prefetch(epoch + 1)
            return images

        return turn

    return competitor


def _to_float(data):
    import mxnet as mx

    from mxtrain.parallel.layout import input_to
    from mxtrain.tasks.pixels import pixels_for, preprocess

    block = preprocess(pixels_for(data, "resnet18_v1", False))
    return lambda x: input_to(x, 0, len(x), mx.cpu(), block)


def _gluon_loader(place, **arguments):
    """gluon's own loader of the folder, with its own transforms."""
    from mxnet.gluon.data import DataLoader
    from mxnet.gluon.data.vision import ImageFolderDataset, transforms

    change = transforms.Compose([transforms.RandomResizedCrop(SIZE), transforms.RandomFlipLeftRight(),
                                 transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    dataset = ImageFolderDataset(str(place / "images" / "train")).transform_first(change)
    return DataLoader(dataset, BATCH, shuffle=True, **arguments)


def _gluon(place, **arguments):
    loader = _gluon_loader(place, **arguments)

    def turn(last):
        images = 0
        for x, y in loader:
            x.wait_to_read()
            images += len(y)
        return images

    return turn


def data_loader(place, threads, stack):
    """gluon's DataLoader, which reads when it is asked."""
    return _gluon(place)


def data_loader_processes(place, threads, stack):
    """gluon's DataLoader with worker processes."""
    return _gluon(place, num_workers=threads)


def data_loader_threads(place, threads, stack):
    """gluon's DataLoader with a pool of threads."""
    return _gluon(place, num_workers=threads, thread_pool=True)


def image_record_iter(place, threads, stack):
    """MXNet's iterator in C++, from record files."""
    import mxnet as mx

    scaled = {f"mean_{c}": 255 * m for c, m in zip("rgb", MEAN)}
    scaled.update({f"std_{c}": 255 * s for c, s in zip("rgb", STD)})
    batches = mx.io.ImageRecordIter(
        path_imgrec=str(place / "records.rec"), path_imgidx=str(place / "records.idx"), data_shape=(3, SIZE, SIZE),
        batch_size=BATCH, shuffle=True, random_resized_crop=True, min_random_area=0.08, max_random_area=1.0,
        min_aspect_ratio=0.75, max_aspect_ratio=4 / 3, rand_mirror=True, preprocess_threads=threads, round_batch=True,
        verbose=False, **scaled)

    def turn(last):
        images = 0
        batches.reset()
        for batch in batches:
            batch.data[0].wait_to_read()
            images += len(batch.label[0])
        return images

    return turn


COMPETITORS = {"decode": decode, "folder": mxtrains("images"), "records": mxtrains("records"),
               "records 256": mxtrains("small"), "records raw": mxtrains("raw"), "DataLoader": data_loader,
               "DataLoader processes": data_loader_processes, "DataLoader threads": data_loader_threads,
               "ImageRecordIter": image_record_iter}


def first_batch(place, options, name) -> float:
    """Seconds from a loader that is made to its first batch."""
    with contextlib.ExitStack() as stack:
        began = time.perf_counter()
        if name == "folder":
            from mxtrain.data.loader import Loader
            from mxtrain.data.settings import DataConfig
            from mxtrain.data.sources import open_data

            data = open_data(DataConfig(data=str(place / "images"), val_split=0.0))
            loader = Loader(data.train, BATCH, workers=options.threads)
            stack.callback(loader.close)
            _to_float(data)(next(loader.batches(0))[0]).wait_to_read()
        else:
            x, _ = next(iter(_gluon_loader(place, num_workers=options.threads)))
            x.wait_to_read()
        return time.perf_counter() - began


def worker_memory(place, kind) -> float:
    """Megabytes that each of four workers adds: to the process, or of its own (not shared with its parent)."""
    program = f"""
import sys, os, gc, multiprocessing
sys.path.insert(0, {str(ROOT)!r})
import mxtrain
from mxtrain.data.loader import Loader
from mxtrain.data.settings import DataConfig
from mxtrain.data.sources import open_data
def megabytes(pid, field):
    with open(f"/proc/{{pid}}/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.split(":")[0] in field) / 1024
data = open_data(DataConfig(data={str(place / "images")!r}, val_split=0.0))
sizes = []
for workers in (1, 5):
    loader = Loader(data.train, {BATCH}, workers=workers, worker_kind={kind!r})
    for x, y in loader.batches(0):
        pass
    children = [child.pid for child in multiprocessing.active_children()]
    sizes.append(sum(megabytes(pid, ("Private_Dirty", "Private_Clean")) for pid in children)
                 or megabytes("self", ("Rss",)))
    loader.close()
print((sizes[1] - sizes[0]) / 4)
"""
    return float(subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout)


def sampler() -> dict:
    """Microseconds to the first batch of an epoch of a billion samples, and bytes in use for it."""
    import tracemalloc

    from mxtrain.data.sampler import BatchSampler

    tracemalloc.start()
    BatchSampler(10**9, BATCH, seed=0).indices(7, 10**6)
    kilobytes = tracemalloc.get_traced_memory()[1] / 1024
    tracemalloc.stop()
    seconds = []
    for epoch in range(200):
        began = time.perf_counter()
        BatchSampler(10**9, BATCH, seed=0).indices(epoch, 10**6)
        seconds.append(time.perf_counter() - began)
    return {"microseconds to a batch of 10^9": 1e6 * statistics.median(seconds), "kilobytes": kilobytes}


def train(place, options) -> dict:
    """Images per second of train.py with ResNet-18, from the folder and from the same pictures in memory, in turns; and
    what metrics.csv says of the time that the first waited for data."""
    import csv

    import numpy as np

    from mxtrain.data.loader import Loader
    from mxtrain.data.settings import DataConfig
    from mxtrain.data.sources import open_data

    data = open_data(DataConfig(data=str(place / "images"), val_split=0.0))
    loader = Loader(data.train, len(data.train))
    x, y = next(loader.batches(0))
    np.savez(place / "memory.npz", x=x, y=y)
    found = {"folder": [], "memory": [], "folder's share of waiting": []}
    for number in range(3):
        for name, path in (("folder", "images"), ("memory", "memory.npz")):
            out = place / f"{name}{number}"
            program = [sys.executable, str(ROOT / "scripts" / "train.py"), "--data", str(place / path),
                       "--out", str(out),
                       "--model", "resnet18_v1", "--batch-size", "64", "--epochs", "2", "--val-split", "0",
                       "--checkpoint-minutes", "60", "--no-plots", "--no-tensorboard", "--no-progress"]
            subprocess.run(program, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            with open(out / "metrics.csv", newline="") as file:
                last = list(csv.DictReader(file))[-1]
            found[name].append(float(last["samples_per_second"]))
            if name == "folder":
                found["folder's share of waiting"].append(float(last["wait_share"]))
    return {**{name: statistics.median(values) for name, values in found.items()},
            "folder/memory": statistics.median(a / b for a, b in zip(found["folder"], found["memory"]))}


if __name__ == "__main__":
    main()
