"""What the tests of train.py have in common."""

import csv
import gc
import sys
from pathlib import Path

import numpy as np
import pytest

import mxtrain
from mxtrain import cli
from mxtrain.train import checkpoint
from mxtrain.train.main import main

MEASURED = {"seconds", "samples_per_second", "wait_share"}

SCRIPT = Path(mxtrain.__file__).parent.parent / "scripts" / "train.py"
QUIET = ["--no-plots", "--no-tensorboard", "--no-progress"]
MLP = ["--model", "mlp", "--batch-size", "256", "--epochs", "1", *QUIET]
"""Six updates of the digits task in a moment."""


def train_program(monkeypatch, capsys):
    """A fixture: runs train.py with some arguments, in this process; returns (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
        capsys.readouterr()
        handlers = list(cli._log.handlers)
        gc.freeze()  # gluon's DataLoader collects garbage when it is made, which takes long over all of MXNet
        try:
            with pytest.raises(SystemExit) as ended:
                cli.run("train.py", main)
        finally:
            gc.unfreeze()
            cli._log.handlers[:] = handlers
        return (ended.value.code, *capsys.readouterr())

    return run


def arrays(run, name="latest"):
    """The arrays of one of a run folder's checkpoints."""
    folder = checkpoint.Folder(Path(run) / "checkpoints", reads_only=True)
    return checkpoint.read(folder.path / (folder.pointed(name) or name)).arrays


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert np.array_equal(one[name], other[name]), name


def assert_close(one, other):
    """Law 1's bound for float32 sums in another order: 1e-5 of a tensor's largest value."""
    assert one.keys() == other.keys()
    for name in one:
        assert np.abs(one[name] - other[name]).max() <= 1e-5 * np.abs(one[name]).max(), name


def metrics(run):
    with open(Path(run) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def rows(run):
    """The metrics without times, which no two runs have in common."""
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in metrics(run)]


def one_line(stderr):
    """The error that a program ended with; everything before it is log lines, nothing is a traceback."""
    assert "Traceback" not in stderr
    errors = [line for line in stderr.splitlines() if line.startswith("train.py: error: ")]
    assert errors == stderr.splitlines()[-1:]
    return errors[0]


def idx_folder(folder, train_count, val_count, classes=3, side=6):
    """Writes MNIST's kind of files; the classes can be told apart. Returns the folder."""
    folder.mkdir()
    random = np.random.RandomState(0)
    for part, count in (("train", train_count), ("t10k", val_count)):
        y = (np.arange(count) % classes).astype("uint8")
        x = (random.randint(0, 60, (count, side, side)) + 80 * y[:, None, None]).astype("uint8")
        for kind, array in (("images-idx3", x), ("labels-idx1", y)):
            head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            (folder / f"{part}-{kind}-ubyte").write_bytes(head + array.tobytes())
    return folder


def image_folder(folder, count, side=20, classes=("cat", "dog", "a bird")):
    """Writes small pictures of noise, in turn for each class. Returns the folder."""
    import cv2

    random = np.random.RandomState(1)
    for number in range(count):
        path = folder / classes[number % len(classes)] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), random.randint(0, 255, (side + number % 7, 2 * side, 3)).astype("uint8"))
    return folder


def noise(path, seed=0, shape=(20, 24, 3)):
    """Writes an image of random pixels. Returns its path."""
    import cv2

    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), np.random.RandomState(seed).randint(0, 256, shape).astype("uint8"))
    return path


def make_parts(root, parts):
    """root/PART/CLASS/I.png for each part's {class: count}; a count of 0 is an empty folder."""
    for part, classes in parts.items():
        for name, count in classes.items():
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                noise(root / part / name / f"{i}.png", 17 * i + sum(map(ord, part + name)))
    return root


def at_call(number, function, action):
    """The function, with an action just before its call of this number."""
    calls = []

    def wrapped(*arguments, **named):
        calls.append(None)
        if len(calls) == number:
            action()
        return function(*arguments, **named)

    return wrapped
