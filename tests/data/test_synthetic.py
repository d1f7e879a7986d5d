"""Made-up images."""

import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxtrain.data.settings import DataConfig
from mxtrain.data.sources import open_data
from mxtrain.errors import UserError


def test_the_default():
    data = open_data(DataConfig(data="synthetic"))
    assert data.name == "synthetic" and data.shape == (224, 224, 3) and len(data.classes) == 10
    assert (len(data.train), len(data.val)) == (900, 100)
    x, y = data.train[0, 3]
    assert x.shape == (224, 224, 3) and x.dtype == np.uint8 and y.dtype == np.int32


@pytest.mark.parametrize("spec, count, shape, classes", [("30", 30, (224, 224, 3), 10), ("30,4x6x1", 30, (4, 6, 1), 10),
                                                        ("30,4x6x3,5", 30, (4, 6, 3), 5)])
def test_what_the_word_says(spec, count, shape, classes):
    data = open_data(DataConfig(data=f"synthetic:{spec}", val_split=0))
    assert (len(data.train), data.shape, len(data.classes)) == (count, shape, classes)


def test_images_are_functions_of_their_number():
    one, two = (open_data(DataConfig(data="synthetic:40,8x9x3,4"), seed=seed) for seed in (0, 1))
    assert one.fingerprint == two.fingerprint
    for i in (0, 7, 30):
        assert np.array_equal(one.train[0, i][0], two.train[5, i][0])
    longer = open_data(DataConfig(data="synthetic:80,8x9x3,4", val_split=0))
    whole = open_data(DataConfig(data="synthetic:40,8x9x3,4", val_split=0))
    assert all(np.array_equal(longer.train[0, i][0], whole.train[0, i][0]) for i in range(40))
    assert len({whole.train[0, i][0].tobytes() for i in range(40)}) == 40
    assert longer.fingerprint != whole.fingerprint != one.fingerprint


@pytest.mark.parametrize("channels, classes", [(3, 10), (3, 300), (1, 10)])
def test_classes_differ_in_their_mean_color(channels, classes):
    data = open_data(DataConfig(data=f"synthetic:{4 * classes},16x16x{channels},{classes}", val_split=0))
    samples = [data.train[0, i] for i in range(4 * classes)]
    means = np.array([x.reshape(-1, channels).mean(0) for x, _ in samples])
    labels = np.array([y for _, y in samples])
    centers = np.array([means[labels == c].mean(0) for c in range(classes)])
    nearest = np.abs(means[:, None] - centers).sum(2).argmin(1)
    assert np.array_equal(nearest, labels) and np.bincount(labels).tolist() == [4] * classes


@pytest.mark.parametrize(
    "spec", ["", "x", "0", "9", "30,4x6", "30,4x6x2", "30,0x6x3", "30,4x6x3,1", "30,4x6x3,31", "30,,5", "-3",
             "100000001", "30,99999x99999x3"]
)
def test_what_the_word_cannot_say(spec):
    with pytest.raises(UserError, match=f"--data synthetic:{spec}: (must be|needs|at most)"):
        open_data(DataConfig(data=f"synthetic:{spec}"))


def test_classes_too_small_to_be_held_out_are_named():
    notes = open_data(DataConfig(data="synthetic:29,4x6x1,3")).notes  # ten, ten and nine
    assert any("synthetic:29,4x6x1,3: no validation images of class '2'" in note for note in notes)
    assert not any("no validation" in note for note in open_data(DataConfig(data="synthetic:30,4x6x1,3")).notes)


def test_they_take_no_validation_folder(tmp_path):
    with pytest.raises(UserError, match="--val .*synthetic"):
        open_data(DataConfig(data="synthetic", val=str(tmp_path)))
