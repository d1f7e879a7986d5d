import gc
import logging
import sys
import threading

import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxnet import gluon
from mxtrain.data.datasets import ArrayDataset
from mxtrain.data.loader import Loader
from mxtrain.errors import UserError


class Numbers(gluon.data.Dataset):
    """Sample i of epoch e is the image [i, e] with label i; no `rows`, so it is read sample by sample."""

    def __init__(self, length, broken=None):
        self.length = length
        self.broken = broken
        self.threads = set()

    def __len__(self):
        return self.length

    def __getitem__(self, key):
        epoch, index = key
        if index == self.broken:
            raise UserError(f"image {index}.jpg is broken")
        self.threads.add(threading.current_thread().name)
        return np.array([index, epoch], np.uint8), np.int32(index)


def in_memory(length):
    return ArrayDataset(
        np.arange(length * 4, dtype=np.uint8).reshape(length, 2, 2, 1), np.arange(length, dtype=np.int32)
    )


def everything(loader, epoch, start=0):
    return [(x.tolist(), y.tolist()) for x, y in loader.batches(epoch, start)]


def test_memory_and_files_give_the_same_batches():
    data = in_memory(11)
    whole = Loader(data, 4, seed=2)
    single = Loader(gluon.data.SimpleDataset(range(11)), 4, seed=2)  # for its sampler: keys are not read
    assert len(whole) == len(single) == 3 and whole.samples == 11
    for batch, (x, y) in enumerate(whole.batches(5)):
        samples = [data[5, index] for index in single.sampler.indices(5, batch)]
        assert np.array_equal(x, np.stack([image for image, _ in samples]))
        assert np.array_equal(y, [label for _, label in samples])
        assert x.dtype == np.uint8 and y.dtype == np.int32


@pytest.mark.parametrize("workers, thread_pool", [(1, True), (3, True), (2, False)])
def test_workers_change_nothing(workers, thread_pool):
    alone = Loader(Numbers(23), 4, seed=7)
    helped = Loader(Numbers(23), 4, seed=7, workers=workers, thread_pool=thread_pool)
    try:
        assert everything(helped, 0) == everything(alone, 0)
        assert everything(helped, 3, start=2) == everything(alone, 3, start=2) == everything(alone, 3)[2:]
    finally:
        helped.close()


def test_workers_do_the_reading():
    data = Numbers(23)
    loader = Loader(data, 4, workers=2)
    everything(loader, 0)
    loader.close()
    assert threading.current_thread().name not in data.threads


def test_the_short_last_batch_is_delivered_short():
    assert [len(y) for _, y in Loader(Numbers(9), 4).batches(0)] == [4, 4, 1]
    assert [len(y) for _, y in Loader(in_memory(9), 4).batches(0)] == [4, 4, 1]


def test_the_end_of_an_epoch_has_no_batches():
    assert everything(Loader(Numbers(8), 4), 0, start=2) == []
    assert everything(Loader(in_memory(8), 4), 0, start=2) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_an_abandoned_epoch_leaves_no_trace(workers):
    loader = Loader(Numbers(40), 4, seed=1, workers=workers)
    abandoned = loader.batches(0)
    next(abandoned)
    assert everything(loader, 1) == everything(Loader(Numbers(40), 4, seed=1), 1)
    loader.close()


@pytest.mark.parametrize("make", [Numbers, in_memory])
def test_plain_iteration_is_a_new_epoch_each_time(make):
    loader = Loader(make(30), 8, seed=4)
    for epoch in range(2):
        assert [(x.tolist(), y.tolist()) for x, y in loader] == everything(Loader(make(30), 8, seed=4), epoch)


def test_what_is_dropped_is_said(caplog):
    caplog.set_level(logging.INFO, "mxtrain")
    loader = Loader(in_memory(11), 4, last_batch="drop")
    assert [len(y) for _, y in loader.batches(0)] == [4, 4]
    assert "3 of 11 samples" in caplog.text


@pytest.mark.parametrize("workers, thread_pool", [(0, True), (2, True), (2, False)])
def test_an_error_in_a_sample_reaches_the_training(workers, thread_pool):
    loader = Loader(Numbers(12, broken=5), 4, workers=workers, thread_pool=thread_pool)
    with pytest.raises(UserError, match="5.jpg"):
        everything(loader, 0)


def test_a_loader_that_cannot_be_made_leaves_nothing_behind(monkeypatch):
    failures = []
    monkeypatch.setattr(sys, "unraisablehook", failures.append)
    with pytest.raises(UserError, match="--batch-size"):
        Loader(in_memory(4), 0)
    gc.collect()  # gluon's __del__ runs on what __init__ left
    assert not failures
