"""numpy arrays as data."""

import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxtrain.data import parts
from mxtrain.data.settings import DataConfig
from mxtrain.data.sources import open_data
from mxtrain.errors import UserError

RNG = np.random.RandomState(0)
X = RNG.randint(0, 256, (20, 6, 5)).astype("uint8")
Y = np.arange(20) % 2 * 3  # labels 0 and 3


def npz(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


def refused(text, data, **settings):
    with pytest.raises(UserError, match=text) as error:
        open_data(DataConfig(data=str(data), **settings))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("names", [("x", "y"), ("images", "labels"), ("data", "targets"), ("X", "Y"),
                                   ("x_train", "y_train"), ("train_images", "train_labels"), ("xtrain", "ytrain")])
def test_an_archive_with_one_part_is_split(tmp_path, names):
    data = open_data(DataConfig(data=npz(tmp_path / "a.npz", **dict(zip(names, (X, Y))))))
    assert data.name == "arrays" and data.classes == ["0", "3"] and data.shape == (6, 5, 1)
    assert (len(data.train), len(data.val)) == (18, 2)
    rows = {(x.tobytes(), int(y)) for part in (data.train, data.val) for x, y in (part[0, i] for i in range(len(part)))}
    assert rows == {(x.tobytes(), int(y) // 3) for x, y in zip(X, Y)}


def test_an_archive_as_keras_has_it(tmp_path):
    data = open_data(DataConfig(data=npz(tmp_path / "mnist.npz", x_train=X, y_train=Y, x_test=X[:4], y_test=Y[:4])))
    assert (len(data.train), len(data.val)) == (20, 4)
    x, y = data.val.rows(np.array([1, 3]))
    assert np.array_equal(x[..., 0], X[[1, 3]]) and y.tolist() == [1, 1] and y.dtype == np.int32
    note = open_data(DataConfig(data=str(tmp_path / "mnist.npz"), val=npz(tmp_path / "v.npz", x=X[:3], y=Y[:3])))
    assert len(note.val) == 3 and any("not used, because of --val" in text for text in note.notes)
    assert not any("not used:" in text for text in data.notes)
    more = npz(tmp_path / "more.npz", x_train=X, y_train=Y, x_val=X[:4], y_val=Y[:4], x_test=X[:2], names=Y[:1])
    assert f"{more}: not used: 'x_test', 'names'" in open_data(DataConfig(data=more)).notes


def test_colors_and_labels_in_a_column(tmp_path):
    x = RNG.randint(0, 256, (8, 4, 4, 3)).astype("uint8")
    data = open_data(DataConfig(data=npz(tmp_path / "a.npz", x=x, y=np.array([[0.0], [1.0]] * 4)), val_split=0))
    assert data.shape == (4, 4, 3) and np.array_equal(data.train[0, 3][0], x[3]) and data.train[0, 3][1] == 1


def test_files_of_arrays_stay_on_the_disk(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    data = open_data(DataConfig(data=str(tmp_path)))
    assert isinstance(data.train._x, np.memmap) and data.train._x.base is not None
    pair = open_data(DataConfig(data=f"{tmp_path}/x.npy,{tmp_path}/y.npy"))
    archive = open_data(DataConfig(data=npz(tmp_path / "a.npz", x=X, y=Y)))
    assert data.fingerprint == pair.fingerprint == archive.fingerprint
    np.save(tmp_path / "x_test.npy", X[:4])
    np.save(tmp_path / "y_test.npy", Y[:4])
    assert len(open_data(DataConfig(data=str(tmp_path))).val) == 4


def test_the_fingerprint_changes_with_pixels_labels_and_split(tmp_path):
    def prints(x, y, **settings):
        return open_data(DataConfig(data=npz(tmp_path / "a.npz", x=x, y=y), **settings)).fingerprint

    other = X.copy()
    other[5, 0, 0] ^= 1
    found = [prints(X, Y), prints(other, Y), prints(X, Y[::-1]), prints(X, Y, val_split=0.2), prints(X, Y, val_split=0)]
    assert len(set(found)) == 5 and prints(X, Y) == found[0]


def test_large_arrays_are_digested_by_some_images(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_DIGEST_BYTES", 100)

    def prints(x, y):
        return open_data(DataConfig(data=npz(tmp_path / "a.npz", x=x, y=y), val_split=0.2)).fingerprint

    assert prints(X, Y) == prints(X, Y)
    assert len({prints(X, Y), prints(X[:-2], Y[:-2]), prints(X, Y[::-1]), prints(255 - X, Y)}) == 4


@pytest.mark.parametrize("x, y, text", [
    (X.astype("float32"), Y, "array x: has type float32; images must be uint8"),
    (X.reshape(20, 30), Y, r"array x: has shape \(20, 30\); must be \(n, height, width\)"),
    (np.stack([X, X], 3), Y, r"array x: has shape \(20, 6, 5, 2\); .*1 or 3 channels"),
    (X, Y[:-1], r"array y: has shape \(19,\); must be one label for each of the 20 images"),
    (X, np.eye(20), r"array y: has shape \(20, 20\)"),
    (X, np.where(Y, 1.5, 0), "array y: label 1.5 of image 1; labels must be whole"),
    (X, -Y, "array y: label -3 of image 1"),
    (X, np.where(Y, np.nan, 0), "array y: label nan of image 1"),
    (X, Y.astype("str"), "array y: has type <U21; labels must be whole numbers"),
    (X[:0], Y[:0], "holds no training samples"),
    (X, Y * 0, "only one class"),
])
def test_what_arrays_must_be(tmp_path, x, y, text):
    refused(text, npz(tmp_path / "a.npz", x=x, y=y))


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK no archive")
    refused("a.npz: cannot be read as numpy arrays", tmp_path / "a.npz")
    content = open(npz(tmp_path / "b.npz", x=X, y=Y), "rb").read()
    (tmp_path / "b.npz").write_bytes(content[: len(content) // 2])
    refused("b.npz: cannot be read", tmp_path / "b.npz")
    damaged = bytearray(content)
    damaged[300] ^= 255
    (tmp_path / "c.npz").write_bytes(damaged)
    refused("c.npz, array x: cannot be read", tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", x=np.array([None] * 3), y=np.arange(3))
    refused("d.npz, array x: cannot be read", tmp_path / "d.npz")
    np.save(tmp_path / "x.npy", X)
    refused("x.npy: one array alone; give the images and the labels", tmp_path / "x.npy")
    refused("gone.npy: cannot be read as numpy arrays: No such file", f"{tmp_path}/x.npy,{tmp_path}/gone.npy")
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes().replace(b"}", b"{"))
    refused("x.npy: cannot be read as numpy arrays: ", f"{tmp_path}/x.npy,{tmp_path}/x.npy")
    refused("must hold x and y, .* it holds 'a', 'b'", npz(tmp_path / "e.npz", a=X, b=Y))
    refused("holds a validation part and no training part", npz(tmp_path / "f.npz", x_test=X, y_test=Y))


def test_validation_arrays(tmp_path):
    train = npz(tmp_path / "a.npz", x=X, y=Y)
    assert len(open_data(DataConfig(data=train, val=npz(tmp_path / "b.npz", x=X[1:2], y=Y[1:2]))).val) == 1
    val = npz(tmp_path / "c.npz", x=X[:2], y=np.array([0, 7]))
    refused("label 7 does not occur in .*a.npz, array y", train, val=val)
    val = npz(tmp_path / "d.npz", x=X[:2, :5], y=Y[:2])
    refused("validation images are 5x5x1, training images 6x5x1", train, val=val)
    refused("holds no validation samples", train, val=npz(tmp_path / "e.npz", x=X[:0], y=Y[:0]))
    (tmp_path / "folder").mkdir()
    refused("--val .*: is a folder of images, but --data", train, val=str(tmp_path / "folder"))
    (tmp_path / "a.lst").write_text("")
    refused("--val .*lst: is a list of images, but --data .*npz is numpy arrays", train, val=str(tmp_path / "a.lst"))
    rows = np.flatnonzero(Y == Y[0])
    few = open_data(DataConfig(data=train, val=npz(tmp_path / "g.npz", x=X[rows], y=Y[rows])))
    assert sum("g.npz: no validation images of class" in note for note in few.notes) == 1
