"""The residuals of 2-bit gradients on their way into a checkpoint and back, among processes that are threads."""

import itertools

import mxnet as mx
import numpy as np
import pytest

from mxtrain.parallel import compression
from mxtrain.parallel.compression import TwoBits
from mxtrain.train import residuals
from ranks import among

SHAPES = {"a": (7,), "b": (3, 1, 5), "c": (1,), "d": (4, 2)}


@pytest.fixture
def small_groups(monkeypatch):
    """The first of two groups holds a and b."""
    monkeypatch.setattr(compression, "_GROUP", 20)


def compressing(communicator, threshold=0.5):
    gradients = {name: mx.nd.zeros(shape) for name, shape in SHAPES.items()}
    communicator.compression = TwoBits(gradients, communicator.size, threshold)
    return communicator


def parts_of(communicator):
    return {name: part.asnumpy() for group in communicator.compression.groups for name, part in group.parts.items()}


def test_residuals_are_gathered_and_given_back(small_groups, caplog):
    def function(communicator):
        for number, group in enumerate(compressing(communicator).compression.groups, 1):
            for part in group.parts.values():
                part[:] = number * (communicator.rank + 0.125)
        saved = residuals.gather(communicator)
        for group in communicator.compression.groups:
            group.residual[:] = 9
        residuals.scatter(communicator, saved)
        return saved, parts_of(communicator)

    results = among(3, function)
    saved = results[0][0]
    assert list(saved) == [f"{rank}/{name}" for rank in range(3) for name in SHAPES]
    assert results[1][0] == results[2][0] == {}
    for rank, name in itertools.product(range(3), SHAPES):
        expected = np.full(SHAPES[name], (1 if name in "ab" else 2) * (rank + 0.125), "float32")
        for array in (saved[f"{rank}/{name}"], results[rank][1][name]):
            assert array.dtype == np.float32
            np.testing.assert_array_equal(array, expected)
    assert caplog.text == ""


@pytest.mark.parametrize("size", [1, 2, 4])
def test_residuals_of_another_number_of_processes_are_added(size, caplog):
    caplog.set_level("INFO", "mxtrain")
    saved = {f"{rank}/{name}": np.full(shape, rank + 1, "float32")
             for rank in range(3) for name, shape in SHAPES.items()}

    def function(communicator):
        residuals.scatter(compressing(communicator), saved if communicator.rank == 0 else {})
        return list(parts_of(communicator).values())

    first, *others = among(size, function)
    assert all((part == 6).all() for part in first) and not any(part.any() for parts in others for part in parts)
    assert caplog.text.count(f"in 3 processes are added up in rank 0 of {size}") == 1


def test_residuals_that_are_no_longer_wanted(caplog):
    caplog.set_level("INFO", "mxtrain")
    assert among(2, lambda c: residuals.scatter(c, {"0/a": np.ones(3)} if c.rank == 0 else {})) == [None, None]
    assert caplog.text.count("what was not sent yet of the gradients, are dropped") == 1
    assert among(2, residuals.gather) == [{}, {}]
    assert among(2, lambda c: residuals.scatter(compressing(c), {})) == [None, None]  # a run that had none


def test_a_threshold_that_nothing_reaches_is_said(caplog):
    def function(communicator):
        residuals.gather(compressing(communicator, threshold=1e9))  # before the first update
        said = caplog.text
        communicator.total(np.zeros(1))
        communicator.compression.pack([mx.nd.ones(shape) for shape in SHAPES.values()])
        residuals.gather(communicator)
        return said

    assert among(2, function) == ["", ""]
    assert caplog.text.count("--compression-threshold 1e+09: no gradient has reached it yet") == 1
