import os
import pickle

import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxtrain.data import cifar
from mxtrain.errors import UserError

NAMES = ["cat", "dog", "ship"]


def batch(n, seed):
    """n random images as CIFAR lays them out, (n, 3072) in planes, and labels 0..2."""
    planes = np.random.default_rng(seed).integers(0, 256, (n, 3072), dtype=np.uint8)
    return planes, [number % 3 for number in range(n)]


def write_cifar10(folder, protocol=2, keys=str.encode):
    """The Python version -> planes and labels of the training files."""
    parts = [batch(4, seed) for seed in range(6)]
    for name, (planes, labels) in zip([f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"], parts):
        (folder / name).write_bytes(pickle.dumps({keys("data"): planes, keys("labels"): labels}, protocol))
    (folder / "batches.meta").write_bytes(
        pickle.dumps({keys("label_names"): [keys(n) for n in NAMES]}, protocol)
    )
    return np.concatenate([p for p, _ in parts[:5]]), sum([labels for _, labels in parts[:5]], [])


def by_hand(planes):
    """(n, 3072) -> (n, 32, 32, 3), by the format's description: 1024 red, 1024 green, 1024 blue values."""
    return np.stack([planes[:, 0:1024], planes[:, 1024:2048], planes[:, 2048:]], axis=2).reshape(
        -1, 32, 32, 3
    )


@pytest.mark.parametrize("protocol, keys", [(2, str.encode), (4, str.encode), (5, str), (2, str)])
def test_the_python_version(tmp_path, protocol, keys):
    planes, labels = write_cifar10(tmp_path, protocol, keys)
    layout = cifar.find(str(tmp_path))
    (x, y), test, names, notes = cifar.read(str(tmp_path), layout)
    assert layout.name == "cifar10" and names == NAMES and notes == []
    assert np.array_equal(x, by_hand(planes)) and np.array_equal(y, labels)
    assert len(test[0]) == 4


def test_the_binary_version(tmp_path):
    planes, labels = batch(4, 0)
    content = np.concatenate([np.array(labels, np.uint8)[:, np.newaxis], planes], axis=1).tobytes()
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(content)
    (tmp_path / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    (x, y), test, names, _ = cifar.read(str(tmp_path), cifar.find(str(tmp_path)))
    assert np.array_equal(x[16:], by_hand(planes)) and y.tolist() == labels * 5
    assert test is None and names == NAMES


def test_cifar100_uses_the_fine_labels(tmp_path):
    planes, fine = batch(4, 0)
    coarse = np.full((4, 1), 9, np.uint8)
    fine_column = np.array(fine, np.uint8)[:, np.newaxis]
    (tmp_path / "train.bin").write_bytes(np.concatenate([coarse, fine_column, planes], axis=1).tobytes())
    (tmp_path / "fine_label_names.txt").write_text("\n".join(NAMES))
    layout = cifar.find(str(tmp_path))
    (x, y), _, _, _ = cifar.read(str(tmp_path), layout)
    assert layout.name == "cifar100" and y.tolist() == fine and np.array_equal(x, by_hand(planes))


def test_missing_batches_are_said(tmp_path):
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_3").unlink()
    (x, _), _, _, notes = cifar.read(str(tmp_path), cifar.find(str(tmp_path)))
    assert len(x) == 16 and "4 of 5" in notes[0]


class Evil:
    def __reduce__(self):
        return os.mkdir, (Evil.target,)


def test_a_pickle_runs_no_code(tmp_path):
    write_cifar10(tmp_path)
    Evil.target = str(tmp_path / "made by a pickle")
    (tmp_path / "data_batch_2").write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(UserError, match="data_batch_2.*mkdir"):
        cifar.read(str(tmp_path), cifar.find(str(tmp_path)))
    assert not os.path.exists(Evil.target)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        pickle.dumps([1]),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}),
        pickle.dumps({b"data": np.zeros((1, 3072)), b"labels": [1]}),
        pickle.dumps({b"labels": [1]}),
    ],
)
def test_damaged_files_are_named(tmp_path, content):
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_2").write_bytes(content)
    with pytest.raises(UserError, match="data_batch_2"):
        cifar.read(str(tmp_path), cifar.find(str(tmp_path)))


def test_a_binary_file_cut_short_is_named(tmp_path):
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(3073 + 5))
    (tmp_path / "batches.meta.txt").write_text("a\nb\n")
    with pytest.raises(UserError, match="data_batch_1.bin.*3078"):
        cifar.read(str(tmp_path), cifar.find(str(tmp_path)))


def test_other_folders_are_not_cifar(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "meta").write_text("")
    assert cifar.find(str(tmp_path)) is None
