import gzip
import struct

import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxtrain.data import idx
from mxtrain.errors import UserError


def encode(array):
    """An idx file of unsigned bytes, written by its definition."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_pair(folder, role, n, size=(5, 4), suffix="", dot="-", seed=0):
    """Random images and the labels 0, 1, 2, 0, ... under MNIST's names -> both."""
    images = np.random.default_rng(seed).integers(0, 256, (n, *size), dtype=np.uint8)
    labels = (np.arange(n) % 3).astype(np.uint8)
    for kind, array, axes in (("images", images, len(size) + 1), ("labels", labels, 1)):
        content = encode(array)
        name = f"{role}-{kind}{dot}idx{axes}-ubyte{suffix}"
        (folder / name).write_bytes(gzip.compress(content) if suffix == ".gz" else content)
    return images, labels


@pytest.mark.parametrize("suffix, dot", [("", "-"), (".gz", "-"), ("", ".")])
def test_pairs_are_found_and_read(tmp_path, suffix, dot):
    images, labels = write_pair(tmp_path, "train", 7, suffix=suffix, dot=dot)
    write_pair(tmp_path, "t10k", 3, suffix=suffix, dot=dot)
    pairs = idx.find(str(tmp_path))
    assert set(pairs) == {"train", "test"}
    read_images, read_labels = idx.read_pair(*pairs["train"])
    assert np.array_equal(read_images, images[..., np.newaxis]) and np.array_equal(read_labels, labels)


def test_colored_images_keep_their_axis(tmp_path):
    images, _ = write_pair(tmp_path, "train", 2, size=(5, 4, 3))
    assert np.array_equal(idx.read_pair(*idx.find(str(tmp_path))["train"])[0], images)


def test_other_files_are_not_pairs(tmp_path):
    (tmp_path / "train-images.txt").write_text("x")
    assert idx.find(str(tmp_path)) == {}


def test_a_plain_file_beside_its_archive_is_one_part(tmp_path):
    write_pair(tmp_path, "train", 4)
    write_pair(tmp_path, "train", 4, suffix=".gz")
    assert not any(path.endswith(".gz") for path in idx.find(str(tmp_path))["train"])


def test_two_sets_in_a_folder_are_refused(tmp_path):
    write_pair(tmp_path, "emnist-letters-train", 4)
    write_pair(tmp_path, "emnist-digits-train", 4)
    with pytest.raises(UserError, match="more than one train part: emnist-digits-.* and emnist-letters-"):
        idx.find(str(tmp_path))


def test_missing_labels_are_named(tmp_path):
    write_pair(tmp_path, "train", 4)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match="train-labels-idx1-ubyte"):
        idx.find(str(tmp_path))


def test_counts_that_differ_are_refused(tmp_path):
    write_pair(tmp_path, "train", 4)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(encode(np.zeros(3, np.uint8)))
    with pytest.raises(UserError, match="4 images.* 3 labels"):
        idx.read_pair(*idx.find(str(tmp_path))["train"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: content[:9],
        lambda content: b"",
        lambda content: b"\0\0\x0d\x01" + content[4:],  # floats
        lambda content: b"<html>" + content,
    ],
)
def test_damaged_files_are_named(tmp_path, damage):
    path = tmp_path / "a-idx2-ubyte"
    path.write_bytes(damage(encode(np.ones((4, 3), np.uint8))))
    with pytest.raises(UserError, match="a-idx2-ubyte"):
        idx.read(str(path))


@pytest.mark.parametrize("cut", [0, 5, 40, -4])
def test_damaged_archives_are_named(tmp_path, cut):
    path = tmp_path / "a-idx2-ubyte.gz"
    path.write_bytes(
        gzip.compress(encode(np.random.default_rng(0).integers(0, 256, (9, 9), dtype=np.uint8)))[:cut]
    )
    with pytest.raises(UserError, match="a-idx2-ubyte.gz"):
        idx.read(str(path))
