import os
import pickle
import shutil

import cv2
import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxtrain.data import images
from mxtrain.data.loader import Loader
from mxtrain.data.settings import DataConfig
from mxtrain.data.sources import open_data
from mxtrain.errors import UserError

SHARED = os.path.join(os.path.dirname(__file__), "..", "..", "..", "shared", "data")


def write_image(path, value, height=40, width=30):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(value).integers(0, 256, (height, width, 3), dtype=np.uint8)
    assert cv2.imwrite(str(path), pixels)


def make_folder(root, classes=("ant", "bee"), count=6):
    for number, name in enumerate(classes):
        for i in range(count):
            write_image(root / name / f"{i}.png", 100 * number + i)
    return str(root)


def write_idx(folder, role, x, y):
    folder.mkdir(exist_ok=True)
    for name, array in ((f"images-idx{x.ndim}", x), ("labels-idx1", y)):
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        (folder / f"{role}-{name}-ubyte").write_bytes(header + array.astype(np.uint8).tobytes())


def make_idx(folder, role="train", labels=(0, 1, 2) * 10, size=(6, 6)):
    labels = np.array(labels)
    write_idx(folder, role, np.random.default_rng(len(labels)).integers(0, 256, (len(labels), *size)), labels)
    return str(folder)


def sample_set(dataset):
    """Every (image, label) of a dataset, to compare without order."""
    return {(image.tobytes(), int(y)) for image, y in (dataset[0, i] for i in range(len(dataset)))}


def refused(config, text):
    with pytest.raises(UserError, match=text) as error:
        open_data(config)
    assert "\n" not in str(error.value)


def test_digits():
    data = open_data(DataConfig(), seed=1)
    assert data.name == "digits" and data.shape == (8, 8, 1) and data.classes == list("0123456789")
    assert len(data.train) + len(data.val) == 1797 and len(data.val) == pytest.approx(0.2 * 1797, rel=0.02)
    x, y = data.train[3, 5]
    assert x.shape == (8, 8, 1) and x.dtype == np.uint8 and y.dtype == np.int32
    assert (
        max(image.max() for image, _ in (data.train[0, i] for i in range(len(data.train)))) == data.peak == 16
    )
    # Each class gives a fifth of its samples, rounded down or up.
    held = np.bincount([data.val[0, i][1] for i in range(len(data.val))])
    kept = np.bincount([data.train[0, i][1] for i in range(len(data.train))])
    assert np.abs(held - (held + kept) / 5).max() < 1


def test_the_split_and_the_fingerprint_do_not_depend_on_the_seed():
    one, two = open_data(DataConfig(), seed=1), open_data(DataConfig(), seed=2)
    assert sample_set(one.val) == sample_set(two.val) and one.fingerprint == two.fingerprint
    assert open_data(DataConfig(val_split=0.3)).fingerprint != one.fingerprint


def test_digits_take_a_share_but_no_folder(tmp_path):
    assert len(open_data(DataConfig(val_split=0.5)).val) == pytest.approx(900, abs=10)
    assert open_data(DataConfig(val_split=0)).val is None
    refused(DataConfig(val=str(tmp_path)), "--val .*digits")
    refused(DataConfig(val_split=0.0001), "--val-split 0.0001")


def test_idx_with_a_test_part(tmp_path):
    root = make_idx(tmp_path)
    make_idx(tmp_path, "t10k", (2, 0))
    data = open_data(DataConfig(data=root))
    assert data.name == "idx" and data.shape == (6, 6, 1) and data.classes == ["0", "1", "2"]
    assert len(data.train) == 30 and [int(data.val[0, i][1]) for i in range(2)] == [2, 0]
    assert "--val-split 0.2 has no effect" in open_data(DataConfig(data=root, val_split=0.2)).notes[-1]


def test_idx_with_one_part_is_split(tmp_path):
    data = open_data(DataConfig(data=make_idx(tmp_path, "t10k")))
    assert (len(data.train), len(data.val)) == (27, 3) and "test part only" in data.notes[1]
    assert not sample_set(data.train) & sample_set(data.val)


def test_idx_labels_with_gaps_become_classes_by_name(tmp_path):
    make_idx(tmp_path, labels=(5, 9, 200) * 4)
    data = open_data(DataConfig(data=make_idx(tmp_path, "t10k", (200, 5))))
    assert data.classes == ["5", "9", "200"] and [int(data.val[0, i][1]) for i in range(2)] == [2, 0]
    refused(DataConfig(data=make_idx(tmp_path, "t10k", (7,))), "label 7 .*train-labels")


def test_idx_with_a_validation_folder(tmp_path):
    root, val = make_idx(tmp_path / "a"), make_idx(tmp_path / "b", "train", (1, 1))
    assert len(open_data(DataConfig(data=root, val=val)).val) == 2
    refused(DataConfig(data=root, val=make_folder(tmp_path / "c")), "--val .*no idx files")
    refused(DataConfig(data=root, val=make_idx(tmp_path / "d", size=(7, 7))), "7x7x1, training images 6x6x1")
    refused(DataConfig(data=root, val=make_idx(tmp_path / "e", labels=())), "no validation samples")
    refused(DataConfig(data=make_idx(tmp_path / "f", labels=())), "no training samples")


def test_cifar_below_the_folder_that_was_named(tmp_path):
    place = tmp_path / "cifar-10-batches-py"
    place.mkdir()
    x = np.random.default_rng(0).integers(0, 256, (40, 3072), dtype=np.uint8)
    (place / "data_batch_1").write_bytes(pickle.dumps({"data": x, "labels": [0, 1] * 20}))
    (place / "batches.meta").write_bytes(pickle.dumps({"label_names": ["cat", "dog"]}))
    data = open_data(DataConfig(data=str(tmp_path)))
    assert data.name == "cifar10" and data.classes == ["cat", "dog"] and data.shape == (32, 32, 3)
    assert (len(data.train), len(data.val)) == (36, 4) and "augmentation shift-flip" in data.notes[0]
    (place / "batches.meta").write_bytes(pickle.dumps({"label_names": ["cat"]}))
    refused(DataConfig(data=str(tmp_path)), "label 1 has no name")


def test_a_folder_with_parts_maps_validation_by_name(tmp_path):
    make_folder(tmp_path / "train", ("1", "2", "10"), count=2)
    make_folder(tmp_path / "val", ("2", "10"), count=1)
    (tmp_path / "val" / "1").mkdir()
    data = open_data(DataConfig(data=str(tmp_path), image_size=8))
    assert data.classes == ["1", "10", "2"] and data.shape == (8, 8, 3) and len(data.train) == 6
    labels = {
        os.path.basename(os.path.dirname(p)): y for p, y in zip(data.val.dataset.paths, data.val.dataset.y)
    }
    assert labels == {"10": 1, "2": 2}
    text = "\n".join(data.notes)
    assert (
        "no validation images of class '1'" in text
        and "no images in '1'" in text
        and "sorted as text" in text
    )


def test_validation_by_the_training_images_is_said(tmp_path):
    root = make_folder(tmp_path / "a")
    data = open_data(DataConfig(data=root, val=root + "/"))
    assert any(note.endswith("is --data itself") for note in data.notes) and len(data.val) == len(data.train)
    data = open_data(DataConfig(data=root, val=make_folder(tmp_path / "b")))
    assert not any("itself" in note for note in data.notes)


def test_a_folder_with_an_unknown_validation_class_is_refused(tmp_path):
    root = make_folder(tmp_path / "train")
    refused(DataConfig(data=root, val=make_folder(tmp_path / "val", ("ant", "wasp"))), "'wasp'")


def test_a_folder_is_split_and_delivered(tmp_path):
    data = open_data(DataConfig(data=make_folder(tmp_path, count=20), image_size=16, augment="none"))
    assert len(data.train) + len(data.val) == 40 and 2 <= len(data.val) < 12
    path, label = data.val.dataset.paths[0], data.val.dataset.y[0]
    x, y = data.val[7, 0]
    assert y == label and np.array_equal(x, images.eval_transform(images.load(path), 18, 16))
    assert not set(data.train.dataset.paths) & set(data.val.dataset.paths)


def test_the_default_for_photographs(tmp_path):
    data = open_data(DataConfig(data=make_folder(tmp_path)))
    assert data.shape == (224, 224, 3) and "augmentation crop" in data.notes[0]
    image, _ = data.val[0, 0]
    assert np.array_equal(image, images.eval_transform(images.load(data.val.dataset.paths[0]), 256, 224))


def test_the_fingerprint_of_a_folder(tmp_path):
    root = make_folder(tmp_path / "a")
    before = open_data(DataConfig(data=root)).fingerprint
    shutil.copytree(root, tmp_path / "b")
    assert open_data(DataConfig(data=str(tmp_path / "b"))).fingerprint == before
    write_image(tmp_path / "a" / "ant" / "new.png", 1)
    added = open_data(DataConfig(data=root)).fingerprint
    os.rename(tmp_path / "b" / "ant", tmp_path / "b" / "anT")
    assert len({before, added, open_data(DataConfig(data=str(tmp_path / "b"))).fingerprint}) == 3


@pytest.mark.parametrize("augment", ["flip", "shift", "shift-flip", "crop"])
def test_augmentation_changes_training_only(tmp_path, augment):
    root = make_folder(tmp_path)

    def images_of(dataset, epoch):
        return [dataset[epoch, i][0].tobytes() for i in range(len(dataset))]

    config = DataConfig(data=root, image_size=16, augment=augment)
    data, other = open_data(config, seed=0), open_data(config, seed=1)
    assert images_of(data.train, 1) == images_of(open_data(config, seed=0).train, 1)
    # Ten flips that all agree have a chance of 1e-3, but the seeds are fixed: it passes always or never.
    assert images_of(data.train, 1) != images_of(data.train, 2)
    assert images_of(data.train, 1) != images_of(other.train, 1)
    assert images_of(data.val, 1) == images_of(data.val, 2) == images_of(other.val, 1)


def test_workers_deliver_the_same_augmented_batches(tmp_path):
    data = open_data(DataConfig(data=make_folder(tmp_path), image_size=16), seed=3)
    alone, helped = Loader(data.train, 4, seed=3), Loader(data.train, 4, seed=3, workers=2)
    for (x, y), (helped_x, helped_y) in zip(alone.batches(2), helped.batches(2)):
        assert np.array_equal(x, helped_x) and np.array_equal(y, helped_y)
    helped.close()


def test_a_broken_image_is_named_by_training(tmp_path):
    root = make_folder(tmp_path)
    (tmp_path / "ant" / "bad.jpg").write_bytes(b"no image")
    data = open_data(DataConfig(data=root, val_split=0, image_size=8))
    with pytest.raises(UserError, match="bad.jpg"):
        list(Loader(data.train, 4).batches(0))


def test_what_is_no_data_is_refused(tmp_path):
    (tmp_path / "file.doc").write_text("a,b")
    (tmp_path / "empty").mkdir()
    refused(
        DataConfig(data=str(tmp_path / "gone")), "--data .*gone: does not exist; expected the words digits"
    )
    refused(DataConfig(data=str(tmp_path / "file.doc")), "no kind of file that is known")
    refused(DataConfig(data=str(tmp_path / "empty")), "no images in class folders")
    refused(DataConfig(data=make_folder(tmp_path / "one", ("ant",))), "only one class, 'ant'")
    refused(DataConfig(data=make_folder(tmp_path / "few", count=1)), "--val-split 0")
    root = make_folder(tmp_path / "ok")
    refused(DataConfig(data=root, val=str(tmp_path / "gone")), "--val .*gone")
    assert open_data(DataConfig(data=root, val_split=0)).val is None


@pytest.mark.skipif(not os.path.isdir(SHARED), reason="../shared/data is absent")
def test_mnist():
    data = open_data(DataConfig(data=SHARED))
    assert data.shape == (28, 28, 1) and data.classes == list("0123456789")
    assert len(data.train) + len(data.val) == 10000 and abs(len(data.val) - 1000) < 10
    x, y = next(Loader(data.train, 64).batches(0))
    assert x.shape == (64, 28, 28, 1) and x.max() == 255 and set(y.tolist()) <= set(range(10))
