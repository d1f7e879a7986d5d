"""Entries D20, D22 and D23 of the field reports: what lies in people's folders, in every form of the same data."""

import os
from pathlib import Path

import cv2
import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxtrain.data import images
from mxtrain.data.loader import Loader
from mxtrain.data.make_records import RecordsConfig, make_records
from mxtrain.data.settings import DataConfig
from mxtrain.data.sources import open_data
from mxtrain.errors import UserError
from mxtrain.inference.export import main as export
from mxtrain.train.main import main as train
from trainings import QUIET, make_parts, noise

NAMES = ["-dash", "#hash", "a b", "Ünïcode", "漢字"]


def as_list(folder, path):
    rows = [f"{file.relative_to(path.parent)},{file.parent.name}\n" for file in sorted(Path(folder).glob("*/*.png"))]
    path.write_text("path,label\n" + "".join(rows), encoding="utf-8")
    return str(path)


def as_records(folder, path):
    make_records(RecordsConfig(data=str(folder), out=str(path)))
    return str(path)


FORMS = {"folder": lambda folder, path: str(folder), "list": as_list, "records": as_records}


def configs(root, form):
    """The parts train and val of a folder in one of the forms."""
    ending = ".csv" if form == "list" else ""
    train_path, val_path = (FORMS[form](root / part, root / f"{form}-{part}{ending}") for part in ("train", "val"))
    return DataConfig(data=train_path, val=val_path, image_size=8)


def test_foreign_entries_are_no_classes_and_names_survive_training_and_export(tmp_path, caplog):
    caplog.set_level("INFO", "mxtrain")
    make_parts(tmp_path, {"f": {name: 4 for name in NAMES}})
    root = tmp_path / "f"
    for folder in (root, root / "a b"):
        for name in (".DS_Store", "Thumbs.db", "desktop.ini", "notes.txt", "a.jpg~"):
            (folder / name).write_bytes(b"no image")
        (folder / "._a.jpg").write_bytes(bytes(4096))  # AppleDouble
        noise(folder / ".ipynb_checkpoints" / "a-checkpoint.jpg")
        noise(folder / "__MACOSX" / "b.jpg")
    noise(root / "#hash" / "nested" / "c.png", 99)
    os.symlink(root / "#hash" / "0.png", root / "#hash" / "link.png")
    os.symlink(root / "gone.png", root / "#hash" / "broken.png")
    run = tmp_path / "run"
    flags = ["--image-size", "8", "--model", "mlp", "--epochs", "1", *QUIET]
    assert train(["--data", str(root), "--out", str(run), *flags]) == 0
    assert (run / "classes.txt").read_text(encoding="utf-8").splitlines() == sorted(NAMES)
    text = caplog.text
    assert "skipped 17 entries: 1 broken links, 6 hidden, 2 left by the system, 8 not images" in text
    assert "1 images lie deeper" in text and "16 training and 6 validation" in text
    assert export(["--run", str(run), "--out", str(tmp_path / "net")]) == 0
    assert (tmp_path / "net-classes.txt").read_text(encoding="utf-8").splitlines() == sorted(NAMES)


@pytest.mark.parametrize("form", ["folder", "records"])
def test_all_modes_and_sizes_are_mixed_in_a_batch(tmp_path, form):
    pillow = pytest.importorskip("PIL.Image")
    root = tmp_path / "train"
    source = pillow.fromarray(np.random.RandomState(0).randint(0, 256, (30, 40, 3)).astype("uint8"))
    for mode, ending in (("L", "png"), ("LA", "png"), ("RGBA", "png"), ("P", "png"), ("1", "png"), ("CMYK", "jpg")):
        (root / "modes").mkdir(parents=True, exist_ok=True)
        source.convert(mode).save(root / "modes" / f"{mode}.{ending}")
    noise(root / "modes" / "16bit.png", shape=(1, 1, 3))
    assert cv2.imwrite(str(root / "modes" / "16bit.png"), np.full((20, 20), 2**15, "uint16"))
    for height, width in ((1, 1), (3, 500), (1, 2000), (3000, 4000)):
        noise(root / "sizes" / f"{height}x{width}.png", shape=(height, width, 1))
    paths = sorted((root / "modes").glob("*")) + sorted((root / "sizes").glob("*"))
    config = DataConfig(data=FORMS[form](root, tmp_path / "r"), val_split=0, image_size=224)
    loader = Loader(open_data(config).train, 11, workers=2)
    ((x, y),) = loader.batches(0)
    loader.close()
    assert x.shape == (11, 224, 224, 3) and sorted(y.tolist()) == [0] * 7 + [1] * 4
    # Evaluation's pixels are those of the file, in either form.
    plain = open_data(DataConfig(data=config.data, val_split=0, image_size=224, augment="none")).train
    for i, path in enumerate(paths):
        assert np.array_equal(plain[0, i][0], images.eval_transform(images.load(str(path)), 256, 224)), path


@pytest.mark.parametrize("form", FORMS)
def test_validation_has_the_classes_of_the_training_by_name(tmp_path, form):
    data = open_data(configs(make_parts(tmp_path, {"train": {"1": 3, "2": 3, "10": 3}, "val": {"1": 1, "10": 2}}), form))
    assert data.classes == ["1", "10", "2"]  # as text, whatever the form
    assert [int(data.val[0, i][1]) for i in range(3)] == [0, 1, 1]
    text = "\n".join(data.notes)
    assert "sorted as text, not as numbers" in text and "no validation images of class '2'" in text


@pytest.mark.parametrize("form", FORMS)
def test_a_class_that_training_does_not_have_is_refused(tmp_path, form):
    config = configs(make_parts(tmp_path, {"train": {"1": 3, "2": 3}, "val": {"1": 1, "2": 1, "3": 1}}), form)
    with pytest.raises(UserError, match="class '3' has no training images; the classes are '1', '2'"):
        open_data(config)


@pytest.mark.parametrize("form", ["folder", "records"])
def test_empty_class_folders_are_no_classes(tmp_path, form):
    data = open_data(configs(make_parts(tmp_path, {"train": {"a": 2, "b": 0, "c": 2}, "val": {"a": 1, "c": 0}}), form))
    assert data.classes == ["a", "c"] and len(data.val) == 1
    if form == "folder":
        assert "train: no images in 'b'" in "\n".join(data.notes)


@pytest.mark.parametrize("form", FORMS)
def test_one_class_is_refused(tmp_path, form):
    config = configs(make_parts(tmp_path, {"train": {"a": 2}, "val": {"a": 1}}), form)
    with pytest.raises(UserError, match="only one class, 'a'"):
        open_data(config)


@pytest.mark.parametrize("form", FORMS)
def test_names_that_differ_in_case_are_two_classes(tmp_path, form):
    data = open_data(configs(make_parts(tmp_path, {"train": {"Cat": 2, "cat": 2}, "val": {"cat": 1}}), form))
    assert data.classes == ["Cat", "cat"] and int(data.val[0, 0][1]) == 1
    assert "differ only in case are kept apart: 'Cat', 'cat'" in "\n".join(data.notes)


@pytest.mark.parametrize("program", ["train", "make_records"])
def test_images_straight_in_the_root_are_refused(tmp_path, program):
    noise(tmp_path / "f" / "a.png")
    with pytest.raises(UserError, match="1 images lie in it directly: put each into a folder named after its class"):
        if program == "train":
            open_data(DataConfig(data=str(tmp_path / "f")))
        else:
            as_records(tmp_path / "f", tmp_path / "r")
