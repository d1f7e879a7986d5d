"""mxtrain.fit: train.py's loop for networks, data and losses of one's own."""

from __future__ import annotations

import dataclasses
import random
import zlib
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

import mxnet as mx
import numpy as np
from mxnet import gluon

from mxtrain import compat, config
from mxtrain.callbacks.base import Callback
from mxtrain.data.loader import Loader
from mxtrain.data.text_settings import TextConfig
from mxtrain.errors import UserError
from mxtrain.models.experts_settings import ExpertsConfig
from mxtrain.models.gpt_settings import GPTConfig
from mxtrain.parallel.communicator import ALONE, connect
from mxtrain.parallel.settings import refuse_without_effect
from mxtrain.parallel.world import world
from mxtrain.seeds import mix
from mxtrain.tasks.heads import is_class_loss
from mxtrain.train import folder, session
from mxtrain.train.setup import part_for, set_up

_OWN = {"gpus", "cpus", "threads", "task", "data", "val", "val_split", "image_size", "resize", "augment",
        "color_jitter", "hue", "lighting", "rand_augment", "random_erasing",
        "model", "pretrained", "pretrained_root", "init_from", "freeze", "zero_gamma", "label_smoothing", "progress",
        "label_column", *(field.name for section in (TextConfig, GPTConfig, ExpertsConfig)
                          for field in dataclasses.fields(section))}


class Result(NamedTuple):
    """What `fit` returns; the trained weights are in the network."""

    rows: List[dict]
    """The rows of metrics.csv that this call has made: per epoch one for training and one for validation."""
    best: Optional[float]
    """Best value of what was monitored (validation accuracy or loss; training where there is no validation)."""
    best_epoch: Optional[int]
    folder: Optional[str]
    """The run folder, when one was asked for."""


def fit(net: gluon.Block, train_data: Any, val_data: Any = None, *, loss: Optional[gluon.Block] = None,
        optimizer: str = "sgd", ctx: Optional[Sequence[mx.Context]] = None, kvstore: Optional[str] = "auto",
        batch_size: Optional[int] = None, epochs: int = 1, callbacks: Sequence[Callback] = (), **settings) -> Result:
    """Trains a Gluon network over one or more contexts, with train.py's loop, laws and settings.

    net: any Block; parameters that are not initialized yet get Xavier's initialization.
    train_data, val_data: a gluon Dataset of (input, ..., label), batched and shuffled here by `batch_size` and `seed`;
        or anything with a length that gives batches (input, ..., label), such as a gluon DataLoader: these are the
        global batches, the same in all processes, and a resume within an epoch passes over those that were done.
        (numpy's global generator, by which gluon shuffles, is seeded for each epoch.)
    loss: gives one value per sample; by default cross-entropy with class numbers. A loss of one's own gets all that
        the network returns, gluon's losses its first output.
    ctx: contexts, such as [mx.gpu(0), mx.gpu(1)]; default: cpu(0). Under horovodrun or launch.py, those of this
        process.
    kvstore: none, local, device or nccl; horovod, dist_sync, dist_device_sync or dist_async where there are several
        processes; auto is horovod under horovodrun, else device.
    settings: other fields of train.py's help: lr=0.1, schedule="cosine", clip_norm=1.0, exact=True, patience=3,
        out="runs/x" (without it nothing is written), resume="runs/x", ... `workers` read a Dataset ahead, as forked
        processes (as threads where it has a true attribute `threads`); by default none does. What a sample draws from
        `random` and `np.random` belongs to (seed, epoch, sample), but for threads, which share these generators; what
        it draws from MXNet's generator depends on the workers.

    Raises UserError for what cannot be, and TrainingError when training diverges.
    """
    for name in sorted(_OWN & set(settings)):
        raise UserError(f"fit({name}=...): this is a setting of train.py; fit is given the objects themselves")
    settings = {name: value.item() if isinstance(value, np.generic) else value for name, value in settings.items()}
    kvstore = None if kvstore == "auto" else kvstore or "none"
    given = {**settings, "optimizer": optimizer, "kvstore": kvstore, "epochs": epochs}
    if not isinstance(train_data, gluon.data.Dataset):
        batch_size = _size_of_batches(train_data, batch_size)
        if "last_batch" in settings:
            raise UserError("last_batch: has no effect on train_data that are batches already")
    if batch_size is not None:
        given["batch_size"] = batch_size
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UserError(f"callbacks: {callback!r} is not an object of a class derived from "
                            "mxtrain.callbacks.base.Callback")
    contexts = _contexts(ctx)
    config.checked(given)  # its own mistakes first, before other processes are waited for
    around = world(kvstore)
    communicator = connect(around, contexts)
    parts, place = session.configure(config.checked(given), communicator)

    def check() -> None:
        if parts.parallel.trace and not (parts.train.out or place):
            raise UserError("trace: is written to the run folder, and there is none; give out, too")
        refuse_without_effect(parts.parallel, around, len(contexts))
        _check_threads(parts.devices.threads, contexts)

    communicator.together(check)
    if parts.parallel.exact:
        compat.set_exact()
        communicator.together(communicator.check_exact)
    parts.devices.threads = compat.threads()
    loss = loss or gluon.loss.SoftmaxCrossEntropyLoss()
    part = part_for(parts, len(contexts), communicator)
    among = part, communicator
    train_batches = _batches(train_data, "train_data", parts, parts.data.shuffle, parts.data.last_batch, *among)
    val_batches = None if val_data is None else _batches(val_data, "val_data", parts, "none", "keep", *among)

    def check_output(output):
        if is_class_loss(loss):
            for batches in (train_batches, val_batches):
                if batches is not None:
                    batches.classes = output.shape[loss._axis]

    rows = _Rows()
    modes = {parameter: parameter.grad_req for parameter in net.collect_params().values()}
    try:
        sizes = [batch_size, *(len(data) for data in (train_data, val_data) if data is not None)]
        communicator.check_same(sizes, lambda expected: (
            f"train_data, val_data: batch size and lengths are {sizes} for rank {communicator.rank} and {expected} for "
            f"rank 0; {_ALIKE}"))
        sample = communicator.together(lambda: _sample(train_data, parts))
        if communicator.size > 1:
            again = communicator.together(lambda: _sample(train_data, parts))
            communicator.check_same(_digests(sample, again), lambda _: (
                f"train_data: begin with other samples for rank {communicator.rank} than for rank 0; {_ALIKE}"))
        run = set_up(net, loss, parts, contexts, communicator, train_batches, val_batches, sample,
                     check_output=check_output)
        path = session.carry_out(run, parts, place, lambda: parts.train.out and folder.make(parts.train.out, "fit"),
                                 [rows, *(callbacks if communicator.rank == 0 else ())])
        run.layout.bring_home()
    finally:
        for batches in (train_batches, val_batches):
            if batches is not None:
                batches.close()
        for parameter, mode in modes.items():
            parameter.grad_req = "null"  # gives up the arrays of this training, and gets new ones with the old mode
            parameter.grad_req = mode
    communicator.rest()
    return Result(rows.rows, run.monitor.best, run.monitor.best_epoch, path and str(path))


_ALIKE = "all processes are given the same data, of which each takes a part"


class _Rows(Callback):
    """Collects the rows of all epochs."""

    def __init__(self):
        self.rows: List[dict] = []

    def epoch(self, rows: List[dict]) -> None:
        self.rows.extend(rows)


class _Checked:
    """Batches whose class numbers are checked: MXNet's loss takes the nearest class for one that does not exist."""

    classes: Optional[int] = None

    def __init__(self, batches, count: int, name: str, loader: Optional[Loader] = None, communicator=ALONE):
        self._batches, self._count, self._name, self._loader = batches, count, name, loader
        self._communicator = communicator

    def __len__(self) -> int:
        return self._count

    def batches(self, epoch: int, start: int = 0):
        alike = self._loader is not None or self._communicator.size == 1  # surely
        digest = 0
        for number, batch in enumerate(self._batches(epoch, start), start + 1):
            whole = isinstance(batch, (list, tuple)) and len(batch) > 1
            if not whole or len({len(array) for array in batch}) != 1:
                raise UserError(f"{self._name}, batch {number}: must be (input, ..., label) of equal lengths")
            if self.classes is not None:
                self._check_labels(batch[-1], number)
            if not alike:
                digest = zlib.crc32(np.ascontiguousarray(_plain(batch[-1])), digest)
            yield batch if self._loader else tuple(x if isinstance(x, mx.nd.NDArray) else _plain(x) for x in batch)
        if not alike:
            self._communicator.check_same(digest, lambda _: (
                f"{self._name}: had other labels in epoch {epoch + 1} for rank {self._communicator.rank} than for "
                f"rank 0; {_ALIKE}"))

    def prefetch(self, epoch: int) -> None:
        """Has workers begin with an epoch."""
        if self._loader is not None:
            self._loader.prefetch(epoch)

    def ready(self) -> bool:
        """Whether the next batch is there."""
        return self._loader is not None and self._loader.ready()

    def advice(self) -> str:
        """What may make it faster."""
        if self._loader is None:
            return f"{self._name} does not keep up; more workers in it may help"
        return self._loader.advice().replace("--workers ", "workers=")

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()

    def _check_labels(self, label, number: int) -> None:
        values = label.asnumpy() if isinstance(label, mx.nd.NDArray) else np.asarray(label)
        wrong = values[(values < 0) | (values >= self.classes) | (values != np.floor(values))]
        if wrong.size:
            raise UserError(f"{self._name}, batch {number}: label {wrong[0]}; the network has {self.classes} outputs, "
                            f"so labels are whole numbers from 0 to {self.classes - 1}")


def _sample(data, parts) -> list:
    """(*inputs, label) of a row or two of the training data."""
    if isinstance(data, gluon.data.Dataset):
        loader = Loader(_keyed(data, parts.train.seed), 2, shuffle="none", on_bad=parts.data.on_bad_sample)
        batches = _Checked(loader.batches, len(loader), "train_data", loader).batches(0)
    else:
        np.random.seed(mix(parts.train.seed, 2, 0))
        batches = data
    sample = next(([x[:2] for x in batch] for batch in batches if len(batch[-1])), None)
    if sample is None:
        raise UserError("train_data: all of its batches are empty")
    return sample


def _digests(sample: list, again: list) -> list:
    """What is compared between processes of two readings of a sample: the inputs where they are not drawn anew."""
    *inputs, label = map(_plain, sample)
    fixed = all(np.array_equal(x, _plain(y)) for x, y in zip(inputs, again))
    return [[zlib.crc32(np.ascontiguousarray(x)) for x in (*(inputs if fixed else ()), label)],
            [[x.dtype.name, *x.shape[1:]] for x in (*inputs, label)]]


def _batches(data, name: str, parts, shuffle: str, last_batch: str, part: Callable, communicator) -> _Checked:
    train, reading = parts.train, parts.data
    if isinstance(data, gluon.data.Dataset):
        loader = Loader(_keyed(data, train.seed), train.batch_size, train.seed, shuffle, last_batch,
                        reading.workers or 0, reading.worker_kind, reading.on_bad_sample, reading.shuffle_block,
                        reading.shuffle_window, part)
        return _Checked(loader.batches, len(loader), name, loader)
    if reading.workers:
        raise UserError(f"workers={reading.workers}: has no effect on {name} that are batches already")
    _check_length(data, name)

    def batches(epoch, start):
        # gluon's samplers shuffle by this generator: seeded so, an epoch has the same order after a resume.
        np.random.seed(mix(train.seed, 2, epoch))
        for number, batch in enumerate(data):
            if number >= start:
                yield batch

    return _Checked(batches, len(data), name, communicator=communicator)


def _keyed(data: gluon.data.Dataset, seed: int) -> gluon.data.Dataset:
    """A user's dataset, for keys (epoch, index)."""
    return _InMemory(data) if type(data) is gluon.data.ArrayDataset else _ByIndex(data, seed)


def _check_length(data, name: str) -> None:
    if not hasattr(data, "__len__"):
        raise UserError(f"{name}: needs a length (the number of batches of an epoch)")
    if not len(data):
        raise UserError(f"{name}: has no batches")


def _size_of_batches(data, given: Optional[int]) -> int:
    """Rows of a global batch, for data that are batches already."""
    _check_length(data, "train_data")
    rows = len(next(iter(data))[-1])
    # A single batch may be a short last one.
    if given is not None and given != rows and (len(data) > 1 or given < rows):
        raise UserError(f"batch_size={given}: train_data gives batches of {rows}; leave batch_size out")
    return given or rows


class _InMemory(gluon.data.Dataset):
    """The arrays of an ArrayDataset, batched by indexing them."""

    def __init__(self, dataset: gluon.data.ArrayDataset):
        self._arrays = [_plain(array) for array in dataset._data]

    def __len__(self):
        return len(self._arrays[0])

    def rows(self, indices):
        return tuple(array[indices] for array in self._arrays)


class _ByIndex(gluon.data.Dataset):
    """A user's dataset behind the loader's keys (epoch, index); its arrays become numpy arrays.

    The global generators of Python and numpy are seeded for each sample, so that what a sample draws depends neither
    on the workers nor on what was read before. (Not MXNet's, which would take longer than most samples.)
    """

    def __init__(self, dataset, seed: int):
        self._dataset, self._seed = dataset, seed
        self.threads = getattr(dataset, "threads", False)

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, key):
        seed = mix(self._seed, 3, *key)
        random.seed(seed)
        np.random.seed(seed)
        sample = self._dataset[int(key[1])]
        if not isinstance(sample, (tuple, list)):
            raise UserError(f"sample {key[1]} is {type(sample).__name__}: must be (input, ..., label)")
        return tuple(_plain(item) for item in sample)


# What MXNet has no arrays of, or nothing that computes with them.
_NEAREST = {"float64": "float32", "bool": "uint8", "int16": "int32", "uint16": "int32", "uint32": "int64",
            "uint64": "int64"}


def _plain(item) -> np.ndarray:
    """A numpy array of a type that MXNet computes with. Raises UserError for what is no number."""
    array = item.asnumpy() if isinstance(item, mx.nd.NDArray) else np.asarray(item)
    if array.dtype.kind not in "biuf":
        raise UserError(f"data of type {array.dtype}: inputs and labels must be numbers")
    return array.astype(_NEAREST.get(array.dtype.name, array.dtype), copy=False)


def _check_threads(saved: Optional[int], contexts: List[mx.Context]) -> None:
    """saved: of the run that is resumed, None for a new one."""
    if saved not in (None, compat.threads()) and contexts[0].device_type == "cpu":
        raise UserError(f"resume: the run was started with {saved} threads per CPU context, MXNet was loaded with "
                        f"{compat.threads()}: set OMP_NUM_THREADS={saved} before it is imported")


def _contexts(ctx) -> List[mx.Context]:
    contexts = [ctx] if isinstance(ctx, mx.Context) else [mx.cpu(0)] if ctx is None else list(ctx)
    if not contexts or not all(isinstance(one, mx.Context) for one in contexts):
        raise UserError(f"ctx={ctx!r}: must be contexts, such as [mx.cpu(0), mx.cpu(1)]")
    for one in contexts:
        if contexts.count(one) > 1:
            raise UserError(f"ctx: {one} is named twice")
        if one.device_type == "gpu" and one.device_id >= mx.context.num_gpus():
            raise UserError(f"ctx: {one} does not exist; {mx.context.num_gpus()} GPUs are visible")
    compat.check_contexts_safe(sum(one.device_type == "cpu" for one in contexts))
    return contexts
