"""check_data.py and train.py --check-data: what they find in data whose faults are known."""

import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from mxtrain.data import check
from mxtrain.data.make_records import RecordsConfig, make_records
from mxtrain.errors import UserError
from mxtrain.train.main import main as train

SCRIPTS = Path(check.__file__).parents[2] / "scripts"


def picture(path, seed, shape=(20, 30, 3)):
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), np.random.RandomState(seed).randint(0, 256, shape).astype("uint8"))
    return path


def copy(path, other):
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_bytes(path.read_bytes())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """train: cat 4, dog 3, owl 1; val: cat 2, dog 2, and none of owl.

    One repetition in train, one image of train in val, one with two labels, three that cannot be read.
    """
    root = tmp_path_factory.mktemp("check") / "f"
    first = picture(root / "train" / "cat" / "0.png", 0)
    copy(first, root / "train" / "cat" / "again.png")
    copy(first, root / "val" / "cat" / "leak.png")
    picture(root / "train" / "cat" / "1.jpg", 1, (40, 10, 3))
    picture(root / "train" / "dog" / "2.jpg", 2, (10, 10))
    copy(root / "train" / "dog" / "2.jpg", root / "train" / "owl" / "both.jpg")
    copy(root / "train" / "cat" / "1.jpg", root / "train" / "cat" / "half.jpg")
    for half in (root / "train" / "cat" / "half.jpg", picture(root / "val" / "dog" / "half.png", 3)):
        half.write_bytes(half.read_bytes()[:half.stat().st_size // 2])
    (root / "val" / "dog" / "random.jpg").write_bytes(np.random.RandomState(0).bytes(500))
    picture(root / "train" / "dog" / "4.png", 4, (8, 9, 4))
    picture(root / "train" / "dog" / "5.bmp", 5)
    picture(root / "val" / "cat" / "6.webp", 6)
    (root / "train" / "cat" / "notes.txt").write_text("no image")
    (root / "train" / ".hidden").mkdir()
    return root


def report(capsys, *arguments, main=check.main):
    """Exit code and JSON."""
    capsys.readouterr()
    code = main(["--json", *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)


def names(samples):
    return [Path(name.split()[-1]).name for name in samples]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_folder_with_all_faults(folder, capsys, workers):
    code, found = report(capsys, "--data", folder, "--image-size", 16, "--workers", workers)
    assert code == 1
    assert found["data"] == "folder" and found["samples"] == {"train": 8, "val": 4}
    assert found["classes"] == [{"class": "cat", "train": 4, "val": 2}, {"class": "dog", "train": 3, "val": 2},
                                {"class": "owl", "train": 1, "val": 0}]
    # Readable, by area: 8x9, 10x10 twice, 40x10, and 20x30 five times.
    assert found["images"] == {
        "size": {"smallest": [8, 9], "median": [20, 30], "largest": [20, 30]}, "sizes": 4, "image_size": [16, 16],
        "smaller": 4, "formats": {"BMP": 1, "JPEG": 1, "JPEG grey": 2, "PNG": 3, "PNG with alpha": 1, "WebP": 1}}
    same = found["duplicates"]
    assert (same["same"], same["train"], same["val"], same["val_in_train"], same["several_labels"]) == (
        "bytes", 2, 0, 1, 1)
    assert [(names(group["train"]), names(group["val"]), group["labels"]) for group in same["groups"]] == [
        (["0.png", "again.png"], ["leak.png"], ["cat"]), (["2.jpg", "both.jpg"], [], ["dog", "owl"])]
    assert [(bad["part"], *names([bad["sample"]])) for bad in found["bad"]] == [
        ("train", "half.jpg"), ("val", "half.png"), ("val", "random.jpg")]
    assert all(str(folder) in bad["error"] and "broken" in bad["error"] for bad in found["bad"])
    assert any("skipped 2 entries: 1 hidden, 1 not images" in note for note in found["notes"])


def test_the_report_for_people(folder, capsys):
    assert check.main(["--data", str(folder), "--image-size", "16"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert ["owl", "1", "0", "no", "validation", "samples"] in map(str.split, lines)
    assert ["all", "8", "4"] in map(str.split, lines)
    assert "4 images are smaller than 16x16, to which they will be scaled up" in lines
    assert "images that repeat another (bytes are the same): 2 in train, 0 in val; 1 in val are in train too" in lines
    leak, labels = (next(line for line in lines if name in line and line.startswith("  ")) for name in ("leak", "both"))
    assert leak == "  " + " = ".join(f"image {folder}/{name}" for name in (
        "train/cat/0.png", "train/cat/again.png", "val/cat/leak.png"))
    assert labels.startswith("  with the labels 'dog', 'owl': ")
    assert any(line.startswith("3 samples cannot be read") for line in lines)
    assert sum("half.jpg (" in line for line in lines) == 1


def test_good_data(capsys):
    code, found = report(capsys)
    assert code == 0 and found["data"] == "digits" and found["samples"] == {"train": 1442, "val": 355}
    assert found["bad"] == [] and found["duplicates"]["same"] == "pixels" and found["images"]["sizes"] == 1
    assert check.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "sizes: all 8x8" in lines and "all samples can be read" in lines


def test_equal_pixels_in_arrays(tmp_path, capsys):
    x = np.random.RandomState(0).randint(0, 256, (12, 5, 4)).astype("uint8")
    x[7] = x[2]
    np.savez(tmp_path / "a.npz", x_train=x[:8], y_train=np.arange(8) % 2, x_test=np.concatenate([x[8:], x[3:4]]),
             y_test=np.array([0, 1, 0, 1, 0]))
    _, found = report(capsys, "--data", tmp_path / "a.npz")
    groups = found["duplicates"]["groups"]
    assert groups == [{"train": ["image 2", "image 7"], "val": [], "labels": ["0", "1"]},
                      {"train": ["image 3"], "val": ["image 4"], "labels": ["0", "1"]}]


@pytest.mark.parametrize("encoding", ["as-is", "raw"])
def test_records(folder, tmp_path, capsys, encoding):
    out = tmp_path / "r"
    make_records(RecordsConfig(data=str(folder / "train"), out=str(out), encoding=encoding, on_bad_sample="skip"))
    code, found = report(capsys, "--data", f"{out}.rec", "--val-split", 0)
    assert code == 0 and found["samples"] == {"train": 7} and found["duplicates"]["train"] == 2
    assert found["images"]["sizes"] == 4
    assert all(f"{out}.rec, record" in name for group in found["duplicates"]["groups"] for name in group["train"])
    content = bytearray(Path(f"{out}.rec").read_bytes())
    at = bytes(content).index(b"\x93NUMPY" if encoding == "raw" else b"\x89PNG")
    content[at + 8:at + 40] = bytes(32)
    Path(f"{out}.rec").write_bytes(content)
    code, found = report(capsys, "--data", f"{out}.rec", "--val-split", 0)
    assert code == 1 and len(found["bad"]) == 1


def test_a_table_of_texts(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("text,label\nbuy now,spam\nhello you there,ham\nBuy  NOW,ham\n,ham\n,spam\n")
    (tmp_path / "v.csv").write_text("text,label\nhello you there,ham\nnew,ham\n")
    code, found = report(capsys, "--data", tmp_path / "t.csv", "--val", tmp_path / "v.csv")
    assert code == 0 and found["samples"] == {"train": 5, "val": 2}
    assert found["classes"] == [{"class": "ham", "train": 3, "val": 2}, {"class": "spam", "train": 2, "val": 0}]
    # Words and pairs of words: 3, 5, 3, 0, 0, 5, 1.
    assert found["texts"] == {"empty": 2, "features": {"smallest": 0, "median": 3, "largest": 5}}
    same = found["duplicates"]
    assert (same["same"], same["train"], same["val_in_train"], same["several_labels"]) == ("words", 1, 1, 1)
    assert same["groups"][0] == {"train": [f"{tmp_path}/t.csv, line 2", f"{tmp_path}/t.csv, line 4"], "val": [],
                                 "labels": ["ham", "spam"]}
    assert check.main(["--data", str(tmp_path / "t.csv")]) == 0
    assert "2 texts have no words" in capsys.readouterr().out


def test_all_samples_bad(tmp_path, capsys):
    for name in "ab":
        for number in range(30):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{number}.png").write_bytes(b"broken")
    code, found = report(capsys, "--data", tmp_path, "--val-split", 0)
    assert code == 1 and len(found["bad"]) == 60 and found["images"]["size"] is None
    assert found["duplicates"]["groups"] == []
    assert check.main(["--data", str(tmp_path), "--val-split", "0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("broken" in line for line in lines) == 20 and "  and 40 more (--json names all)" in lines


def test_the_same_by_train(folder, tmp_path, capsys, monkeypatch):
    """With the flags of a training, which have no effect here, and without one."""
    monkeypatch.chdir(tmp_path)
    code, found = report(capsys, "--check-data", "--data", folder, "--image-size", 16, "--augment", "flip",
                         "--model", "mlp", "--out", "run", main=train)
    other = report(capsys, "--data", folder, "--image-size", 16)
    del found["seconds"], other[1]["seconds"]
    found["notes"][0] = found["notes"][0].replace("augmentation flip", "augmentation crop")
    assert (code, found) == other and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments, words", [
    (["--data", "nowhere"], "--data nowhere: does not exist"),
    (["--epochs", "3"], "--epochs: no such setting"),
    (["--text-column", "mail"], "--text-column mail: has no effect on images"),
    (["--workers", "-1"], "--workers -1: must be at least 0"),
])
def test_mistakes_are_one_line(arguments, words):
    with pytest.raises(UserError, match=words):
        check.main(arguments)


def test_the_script(folder):
    """A process: help without mxnet, the codes of the shell, and a report without anything on stderr."""
    def script(*arguments):
        return subprocess.run([sys.executable, SCRIPTS / "check_data.py", *map(str, arguments)], timeout=120,
                              capture_output=True, text=True)

    found = script("--data", folder, "--image-size", 16)
    # libpng says of its own what is cut short; nothing else is said.
    assert found.returncode == 1 and "Traceback" not in found.stderr and "error: " not in found.stderr.replace(
        "libpng error: ", "")
    assert "3 samples cannot be read" in found.stdout
    wrong = script("--data", folder / "none")
    assert wrong.returncode == 2 and wrong.stdout == "" and len(wrong.stderr.splitlines()) == 1


@pytest.mark.parametrize("ending, shape, name", [
    (".png", (4, 4, 3), "PNG"), (".png", (4, 4), "PNG grey"), (".png", (4, 4, 4), "PNG with alpha"),
    (".jpg", (4, 4, 3), "JPEG"), (".jpg", (4, 4), "JPEG grey"), (".bmp", (4, 4, 3), "BMP"), (".tif", (4, 4, 3), "TIFF"),
    (".webp", (4, 4, 3), "WebP"), (".ppm", (4, 4, 3), "PNM"),
])
def test_formats(ending, shape, name):
    assert check.format_of(cv2.imencode(ending, np.zeros(shape, "uint8"))[1].tobytes()) == name


def test_formats_of_nothing():
    for start in (b"", b"\xff\xd8", b"\xff\xd8\xff", b"\x89PNG", b"RIFF"):
        assert check.format_of(start) in ("other", "JPEG")
