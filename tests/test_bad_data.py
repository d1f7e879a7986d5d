"""Entries D20 to D23 and D25 to D28 of the field reports, end to end: bad input, and workers however they end.

In one process as far as possible; the sources' own tests (tests/data) hold the same for each kind of source.
"""

import csv
import ctypes
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cv2
import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

import mxtrain
from mxtrain.callbacks.base import Callback
from mxtrain.data import images
from mxtrain.inference import evaluate, export, predict
from mxtrain.inference.load import load
from mxtrain.inference.settings import RunConfig
from mxtrain.train import loop
from trainings import (QUIET, SCRIPT, arrays, assert_same_bits, at_call, image_folder, make_parts, metrics, noise, one_line,
                       train_program)

train = pytest.fixture(train_program)

SMALL = ["--image-size", 16, "--model", "mlp", "--batch-size", 8, "--epochs", 2, "--lr", 0.01, *QUIET]
WORKERS = [[0, "auto"], [1, "thread"], [2, "thread"], [4, "thread"], [1, "process"], [2, "process"], [4, "process"]]


def spoil(folder):
    """Half a JPEG, half a PNG and random bytes named .jpg; returns their names."""
    for name in ("half.jpg", "half.png"):
        path = noise(folder / name, 5)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (folder / "random.jpg").write_bytes(np.random.RandomState(0).bytes(400))
    return ["half.jpg", "half.png", "random.jpg"]


def left_out(stderr):
    """The names of the samples of which it is said that they are left out."""
    return sorted(Path(line.split(" (")[0]).name for line in stderr.splitlines() if "left out: image" in line)


def outcome(main, capsys, *arguments):
    """Exit code and JSON of evaluate.py or predict.py."""
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


# D20


NAMES = ["-dash", "#hash", "a b", "Ünïcode", "漢字"]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """All of D20 in one folder: 6 images for each class, and of foreign entries 9 in train and 9 in a class of val."""
    parts = {"train": dict.fromkeys(NAMES, 6), "val": dict.fromkeys(NAMES, 2)}
    root = make_parts(tmp_path_factory.mktemp("d20"), parts)
    for folder in (root / "train", root / "val" / "a b"):
        for name in (".DS_Store", "Thumbs.db", "desktop.ini", "notes.txt", "a.jpg~", "broken.gif"):
            (folder / name).write_bytes(b"no image")
        (folder / "._a.jpg").write_bytes(bytes(4096))  # AppleDouble
        noise(folder / ".ipynb_checkpoints" / "a-checkpoint.jpg", 1)
        noise(folder / "__MACOSX" / "._b.jpg", 1)
    nested = noise(root / "train" / "#hash" / "more" / "deep" / "c.png", 2)
    os.symlink(nested, root / "train" / "#hash" / "link.png")
    os.symlink(root / "gone.png", root / "train" / "#hash" / "broken.png")
    os.symlink(root / "train" / "#hash", root / "train" / "#hash" / "loop")
    return root


def test_a_folder_full_of_everything_trains(everything, train, tmp_path, capsys):
    unreadable = noise(everything / "train" / "a b" / "secret.png", 3)
    unreadable.chmod(0)
    secret = not os.access(unreadable, os.R_OK)  # root reads it all the same, and then it is a sample
    run = tmp_path / "run"
    code, _, stderr = train("--data", everything, *SMALL, "--workers", 2, "--out", run)
    assert code == 0, stderr
    said = [line for line in stderr.splitlines() if ": skipped " in line]
    assert len(said) == 2, stderr
    assert f"/train: skipped {11 + secret} entries: 1 broken links, 3 hidden, 1 left by the system" in said[0]
    assert "1 links to a folder above, 5 not images" in said[0]
    assert "/val: skipped 9 entries: 3 hidden, 1 left by the system, 5 not images" in said[1]
    assert {row["samples"] for row in metrics(run)} == {str(33 - secret), "10"}
    names = sorted(NAMES)
    assert (run / "classes.txt").read_text(encoding="utf-8").splitlines() == names
    assert export.main(["--run", str(run), "--out", str(tmp_path / "net")]) == 0
    assert (tmp_path / "net-classes.txt").read_text(encoding="utf-8").splitlines() == names
    code, found = outcome(predict.main, capsys, everything / "val", "--run", run, "--top", 5)
    assert code == 0 and found["files"] == 10
    assert all(sorted(one["class"] for one in row["classes"]) == names for row in found["predictions"])


# D21


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """Three bad images in train, of 33, and three in val, of 11."""
    root = make_parts(tmp_path_factory.mktemp("d21"), {"train": {"a": 15, "b": 15}, "val": {"a": 4, "b": 4}})
    return root, spoil(root / "train" / "b"), spoil(root / "val" / "a")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("part", ["train", "val"])
def test_a_bad_image_stops_the_training_which_goes_on_without_it(spoiled, train, tmp_path, part, workers):
    root, in_train, in_val = spoiled
    if part == "val":
        data = ["--data", make_parts(tmp_path / "good", {"": {"a": 9, "b": 9}}), "--val", root / "val"]
    else:
        data = ["--data", root]
    flags = [*data, *SMALL, "--workers", workers, "--epochs", 3]
    run = tmp_path / "run"
    code, stdout, stderr = train(*flags, "--out", run)
    message = one_line(stderr)
    assert code == 2 and stdout == ""
    assert any(f"{root / part}" in message and name in message for name in (in_train if part == "train" else in_val))
    assert "--on-bad-sample skip" in message and "; saved after update " in message
    if part == "val":
        assert "; saved after update 3" in message  # all of the first epoch
    code, _, stderr = train("--resume", run, "--on-bad-sample", "skip")
    assert code == 0, stderr
    assert train(*flags, "--on-bad-sample", "skip", "--out", tmp_path / "straight")[0] == 0
    assert_same_bits(arrays(run), arrays(tmp_path / "straight"))


def test_bad_images_are_left_out_the_same_for_all_workers_and_contexts(spoiled, train, tmp_path, capsys):
    root, in_train, in_val = spoiled
    flags = ["--data", root, *SMALL, "--on-bad-sample", "skip", "--exact", "--shards", 4]
    runs = []
    for cpus in (1, 2):
        for count, kind in WORKERS if cpus == 1 else WORKERS[::2]:
            runs.append(tmp_path / f"{cpus}-{count}-{kind}")
            code, _, stderr = train(*flags, "--cpus", cpus, "--workers", count, "--worker-kind", kind, "--out",
                                    runs[-1])
            assert code == 0, stderr
            assert left_out(stderr) == sorted(in_train + in_val)  # each once, not in every epoch
            rows = metrics(runs[-1])
            assert [(row["split"], row["samples"], row["skipped"]) for row in rows] == [
                ("train", "30", "3"), ("val", "8", "3")] * 2
            assert_same_bits(arrays(runs[0]), arrays(runs[-1]))
            assert [row["loss"] for row in rows] == [row["loss"] for row in metrics(runs[0])]
    assert_no_workers()


def test_the_other_programs_and_bad_images(spoiled, train, tmp_path, capsys):
    root, _, in_val = spoiled
    run = tmp_path / "run"
    assert train("--data", root, *SMALL, "--on-bad-sample", "skip", "--out", run)[0] == 0
    code, found = outcome(evaluate.main, capsys, "--run", run, "--checkpoint", "latest")  # as in the training
    assert (code, found["samples"], found["skipped"]) == (0, 8, 3)
    assert found["loss"] == pytest.approx(float(metrics(run)[-1]["loss"]), rel=1e-6)
    with pytest.raises(mxtrain.UserError, match="half.jpg .*--on-bad-sample skip"):
        evaluate.main(["--run", str(run), "--on-bad-sample", "stop"])
    code, found = outcome(predict.main, capsys, root / "val", "--run", run)
    assert code == 1 and len(found["predictions"]) == 8 and found["files"] == 11
    assert sorted(Path(one["file"]).name for one in found["failed"]) == in_val
    assert all(Path(one["file"]).name in one["error"] for one in found["failed"])


def bad_images(root, good, bad):
    """Two classes with good and bad images, shared out evenly."""
    for number in range(good):
        noise(root / "ab"[number % 2] / f"{number}.png", number)
    for number in range(bad):
        path = root / "ab"[number % 2] / f"bad{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"broken")
    return root


def test_one_of_twenty_bad(train, tmp_path):
    data = ["--data", bad_images(tmp_path / "f", 19, 1), "--val-split", 0, *SMALL, "--workers", 2]
    code, _, stderr = train(*data, "--out", tmp_path / "stop")
    assert code == 2 and "f/a/bad0.png (6 bytes)" in one_line(stderr)
    assert train(*data, "--on-bad-sample", "skip", "--out", tmp_path / "skip")[0] == 0
    assert [(row["samples"], row["skipped"], row["update"]) for row in metrics(tmp_path / "skip")] == [
        ("19", "1", "3"), ("19", "1", "6")]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_all_bad(train, tmp_path, policy, workers):
    data = bad_images(tmp_path / "f", 0, 20)
    good = make_parts(tmp_path / "good", {"": {"a": 5, "b": 5}})
    for flags in (["--data", data, "--val-split", 0], ["--data", good, "--val", data]):
        code, _, stderr = train(*flags, *SMALL, "--on-bad-sample", policy, "--workers", workers, "--out",
                                tmp_path / f"run-{len(flags)}-{flags[2]}")
        assert code == 2 and "none of 20 samples can be read; the last: image " in one_line(stderr)


def test_whole_batches_bad(train, tmp_path):
    """A batch of bad samples changes no weight, but counts as an update: all ranks take the same number."""
    data = bad_images(tmp_path / "f", 6, 2)
    flags = ["--data", data, "--val-split", 0, *SMALL, "--batch-size", 1, "--on-bad-sample", "skip", "--workers", 1]
    code, _, stderr = train(*flags, "--out", tmp_path / "run")
    assert code == 0, stderr
    assert [(row["samples"], row["skipped"], row["update"]) for row in metrics(tmp_path / "run")] == [
        ("6", "2", "8"), ("6", "2", "16")]


# D22


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Modes and sizes of all kinds, the same in train and in val."""
    pillow = pytest.importorskip("PIL.Image")
    root = tmp_path_factory.mktemp("d22")
    plain = pillow.fromarray(np.random.RandomState(0).randint(0, 256, (30, 40, 3)).astype("uint8"))
    for part in ("train", "val"):
        modes = root / part / "modes"
        modes.mkdir(parents=True)
        for mode, ending in (("L", "png"), ("LA", "png"), ("RGBA", "png"), ("P", "png"), ("1", "png"), ("CMYK", "jpg"),
                             ("L", "jpg"), ("RGB", "jpg")):
            plain.convert(mode).save(modes / f"{mode}-{ending}.{ending}")
        deep = (np.arange(600).reshape(20, 30) * 100).astype("uint16")
        assert cv2.imwrite(str(modes / "16bit.png"), deep)
        assert cv2.imwrite(str(modes / "16bit-color.png"), np.stack([deep, deep // 2, deep // 3], axis=2))
        turned = pillow.Exif()
        turned[0x0112] = 6
        plain.save(modes / "turned.jpg", exif=turned)
        for height, width in ((1, 1), (3, 500), (1, 2000), (3000, 4000)):
            ramp = np.linspace(0, 255, height * width * 3).reshape(height, width, 3).astype("uint8")
            path = root / part / "sizes" / f"{height}x{width}.{'jpg' if height > 100 else 'png'}"
            path.parent.mkdir(exist_ok=True)
            assert cv2.imwrite(str(path), ramp)
    return root


def test_modes_and_sizes_train_and_all_programs_see_the_same_pixels(mixed, train, tmp_path, capsys):
    run = tmp_path / "run"
    code, _, stderr = train("--data", mixed, *SMALL, "--image-size", 32, "--batch-size", 15, "--model", "lenet",
                            "--workers", 2, "--out", run)
    assert code == 0, stderr
    rows = metrics(run)
    assert [row["samples"] for row in rows] == ["15"] * 4
    # By hand: each file through the transform of evaluation, the network, and a softmax in float64.
    trained = load(RunConfig(run=str(run), checkpoint="latest"), [mx.cpu()])
    files = sorted((mixed / "val").glob("*/*"))
    x = np.stack([images.eval_transform(images.load(str(file)), 37, 32) for file in files])
    scores = trained.net(trained.preprocess()(mx.nd.array(x, dtype="uint8"))).asnumpy().astype("float64")
    by_hand = np.exp(scores - scores.max(axis=1, keepdims=True))
    by_hand /= by_hand.sum(axis=1, keepdims=True)
    labels = np.array([trained.classes.index(file.parent.name) for file in files])
    loss, accuracy = -np.log(by_hand[np.arange(15), labels]).mean(), (by_hand.argmax(axis=1) == labels).mean()
    # Float32 sums of a batch of another size differ in the last digits.
    code, found = outcome(predict.main, capsys, mixed / "val", "--run", run, "--checkpoint", "latest", "--top", 2,
                          "--batch-size", 4)
    assert code == 0
    predicted = {row["file"]: {one["class"]: one["probability"] for one in row["classes"]}
                 for row in found["predictions"]}
    assert sorted(predicted) == [str(file) for file in files]
    for file, expected in zip(files, by_hand):
        assert [predicted[str(file)][name] for name in trained.classes] == pytest.approx(expected, abs=1e-5), file
    code, found = outcome(evaluate.main, capsys, "--run", run, "--checkpoint", "latest", "--batch-size", 7)
    for values in (found, rows[-1]):
        assert float(values["accuracy"]) == pytest.approx(accuracy)
        assert float(values["loss"]) == pytest.approx(loss, rel=1e-5)


# D23


def test_validation_without_a_class_counts_by_name(train, tmp_path, capsys):
    """Classes 1, 10, 2 and 3, in this order; val has no 10, and its 2 is an empty folder."""
    root = make_parts(tmp_path / "f", {"train": {"1": 6, "2": 6, "3": 6, "10": 6, "empty": 0},
                                       "val": {"1": 3, "2": 0, "3": 4}})
    for number, folder in enumerate(sorted((root).glob("*/*"))):  # colors that are learned at once
        for file in folder.iterdir():
            value = {"1": 0, "2": 80, "3": 240, "10": 160}[folder.name]
            assert cv2.imwrite(str(file), np.full((16, 16, 3), value, "uint8"))
    run = tmp_path / "run"
    code, _, stderr = train("--data", root, *SMALL, "--augment", "none", "--epochs", 15, "--out", run)
    assert code == 0, stderr
    assert (run / "classes.txt").read_text().split() == ["1", "10", "2", "3"]
    assert "sorted as text, not as numbers" in stderr and "no images in 'empty'" in stderr
    assert "no validation images of class '10', '2'" in stderr
    code, found = outcome(predict.main, capsys, root / "val", "--run", run, "--checkpoint", "latest")
    right = [row["classes"][0]["class"] == Path(row["file"]).parent.name for row in found["predictions"]]
    assert float(metrics(run)[-1]["accuracy"]) == np.mean(right) == 1.0
    assert evaluate.main(["--run", str(run), "--confusion", str(tmp_path / "c.csv")]) == 0
    with open(tmp_path / "c.csv", newline="") as file:
        table = [row[1:] for row in csv.reader(file)][1:]
    assert np.array(table, int).sum(axis=1).tolist() == [3, 0, 0, 4]


@pytest.mark.parametrize("parts, words", [
    ({"train": {"1": 3, "2": 3}, "val": {"1": 1, "2": 1, "3": 1}}, "class '3' has no training images"),
    ({"train": {"1": 3, "2": 3, "3": 0}, "val": {"1": 1, "3": 1}}, "class '3' has no training images"),
    ({"train": {"only": 3, "empty": 0}, "val": {"only": 1}}, "only one class, 'only'"),
    ({"train": {"a": 0, "b": 0}, "val": {"a": 1, "b": 1}}, "no images in class folders"),
    ({"train": {"a": 2, "b": 2}, "val": {"a": 0, "b": 0}}, "no images in class folders"),
    ({"": {"": 3}}, "3 images lie in it directly"),
    ({"val": {"a": 1, "b": 1}}, "no train folder"),
])
def test_classes_that_do_not_fit_are_refused_in_one_line(train, tmp_path, parts, words):
    root = tmp_path / "f"
    root.mkdir()
    if parts == {"": {"": 3}}:
        for number in range(3):
            noise(root / f"{number}.png", number)
    else:
        make_parts(root, parts)
    code, _, stderr = train("--data", root, *SMALL, "--out", tmp_path / "run")
    assert code == 2 and words in one_line(stderr) and not (tmp_path / "run").exists()


def test_classes_that_differ_in_case(train, tmp_path):
    root = make_parts(tmp_path / "f", {"train": {"Cat": 4, "cat": 4}, "val": {"cat": 2}})
    code, _, stderr = train("--data", root, *SMALL, "--out", tmp_path / "run")
    assert code == 0 and "differ only in case are kept apart: 'Cat', 'cat'" in stderr
    assert (tmp_path / "run" / "classes.txt").read_text().split() == ["Cat", "cat"]


# The laws for workers


def test_workers_change_no_bit(train, tmp_path):
    """Random crops, colors and erasing, on 1 and 2 contexts."""
    data = image_folder(tmp_path / "f", 44, side=24)
    flags = ["--data", data, *SMALL, "--color-jitter", 0.4, "--random-erasing", 0.3, "--exact", "--shards", 4]
    first = None
    for cpus in (1, 2):
        for count, kind in WORKERS:
            run = tmp_path / f"{cpus}-{count}-{kind}"
            code, _, stderr = train(*flags, "--cpus", cpus, "--workers", count, "--worker-kind", kind, "--out", run)
            assert code == 0, stderr
            first = first or run
            assert_same_bits(arrays(first), arrays(run))
    assert_no_workers()
    # And it is not because nothing is random.
    assert train(*flags, "--seed", 1, "--out", tmp_path / "other")[0] == 0
    assert any(not np.array_equal(one, arrays(tmp_path / "other")[name]) for name, one in arrays(first).items())


# D25


def in_small_shm(folder, *command):
    """Runs a command where /dev/shm has 4 MB; the last line of its output lists what lies there at the end."""
    script = ('mount -t tmpfs -o size=4m tmpfs /dev/shm || exit 99; "$@"; code=$?; echo "left: $(ls /dev/shm)"; '
              "exit $code")
    try:
        return subprocess.run(["unshare", "-rm", "sh", "-c", script, "sh", *map(str, command)], cwd=folder,
                              capture_output=True, text=True, timeout=150)
    except FileNotFoundError:
        pytest.skip("there is no unshare(1)")


def test_little_shared_memory_is_enough(tmp_path):
    """Batches of 4.9 MB, three of them at once: workers' memory has no name in /dev/shm, whose size does not matter."""
    probe = in_small_shm(tmp_path, "true")
    if probe.returncode:
        pytest.skip(f"namespaces are not allowed here: {probe.stderr.strip()}")
    (tmp_path / "pooled.py").write_text(
        "from mxnet.gluon import nn\n\n\ndef net(classes):\n    body = nn.HybridSequential()\n"
        "    body.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(classes))\n    return body\n")
    done = in_small_shm(tmp_path, sys.executable, SCRIPT, "--data", "synthetic:320,160x160x3,2", "--batch-size", 64,
                        "--model", "pooled:net", "--epochs", 1, "--workers", 2, "--worker-kind", "process", *QUIET,
                        "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert [row["samples"] for row in metrics(tmp_path / "run")] == ["288", "32"]
    assert done.stdout.splitlines()[-1] == "left: "


# D26


def assert_no_workers():
    """No worker process at once; threads end when they have read what they were reading."""
    assert multiprocessing.active_children() == []
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("mxtrain-") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("where", ["update", "evaluate", "save"])
def test_an_interrupt_leaves_no_worker(train, tmp_path, monkeypatch, where, kind):
    """In epoch 1, in validation, in a checkpoint; and the run goes on."""
    from mxtrain.parallel.layout import Layout

    place, call = {"update": (loop, 2), "evaluate": (Layout, 2), "save": (loop, 2)}[where]
    data = image_folder(tmp_path / "f", 40, side=20)
    flags = ["--data", data, "--val-split", 0.5, *SMALL, "--workers", 2, "--worker-kind", kind, "--out",
             tmp_path / "run"]
    seen = []

    def interrupt():
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("mxtrain-loader")]
        seen.append(len(multiprocessing.active_children()) or len(threads))
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patches:
        patches.setattr(place, where, at_call(call, getattr(place, where), interrupt))
        code, stdout, stderr = train(*flags)
    assert code == 130 and "Traceback" not in stderr and stdout == ""
    assert seen and seen[0] >= 2  # there were workers
    assert_no_workers()
    assert train("--resume", tmp_path / "run")[0] == 0
    assert_no_workers()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_exception_leaves_no_worker(train, tmp_path, monkeypatch, kind):
    def fail():
        raise RuntimeError("of our own")

    data = image_folder(tmp_path / "f", 40, side=20)
    monkeypatch.setattr(loop, "update", at_call(3, loop.update, fail))
    with pytest.raises(RuntimeError, match="of our own"):
        from mxtrain.train.main import main

        main([*map(str, ["--data", data, *SMALL, "--workers", 2, "--worker-kind", kind, "--out", tmp_path / "run"])])
    assert_no_workers()


def children(pid):
    """All processes below one."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def running(session):
    """The processes of a session that are more than an exit code that nobody has asked for."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rsplit(")", 1)[1].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("kind, signals, codes", [
    ("process", [signal.SIGTERM], {143}),
    ("process", [signal.SIGINT, signal.SIGINT], {-signal.SIGINT, 130}),
    pytest.param("thread", [signal.SIGTERM], {143}, marks=pytest.mark.slow),
    pytest.param("thread", [signal.SIGINT, signal.SIGINT], {-signal.SIGINT, 130}, marks=pytest.mark.slow),
    pytest.param("process", [signal.SIGKILL], {-signal.SIGKILL}, marks=pytest.mark.slow),
    pytest.param("process", [], {0}, marks=pytest.mark.slow),
], ids=lambda value: None)
def test_signals_from_outside_leave_nothing(tmp_path, kind, signals, codes):
    """SIGTERM to the main process only, SIGINT twice within a second, and the normal end."""
    data = image_folder(tmp_path / "f", 200, side=40)
    flags = ["--data", data, *SMALL, "--epochs", 500 if signals else 2, "--workers", 2, "--worker-kind", kind, "--out",
             tmp_path / "run"]
    with open(tmp_path / "stderr.txt", "wb") as stderr:
        process = subprocess.Popen([sys.executable, str(SCRIPT), *map(str, flags)], stdout=subprocess.DEVNULL,
                                   stderr=stderr, start_new_session=True)
    try:
        deadline = time.monotonic() + 100
        table = tmp_path / "run" / "metrics.csv"
        while not table.exists() or len(metrics(table.parent)) < 2:  # training and validation have workers then
            assert time.monotonic() < deadline, (tmp_path / "stderr.txt").read_text()
            time.sleep(0.01)
        if signals:
            assert len(children(process.pid)) == (4 if kind == "process" else 0)
        for number in signals:
            os.kill(process.pid, number)
            time.sleep(0.1)
        assert process.wait(timeout=60) in codes
        deadline = time.monotonic() + 10
        while running(process.pid):
            assert time.monotonic() < deadline, running(process.pid)
            time.sleep(0.01)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert "Traceback" not in (tmp_path / "stderr.txt").read_text()


# D27 and D28


class Numbers(gluon.data.Dataset):
    """A dataset of one's own: Python code. Items: (1000,) float32, a label of 2."""

    def __init__(self, length, threads=False):
        self.length, self.threads = length, threads

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return np.full(1000, index % 7 / 7, "float32"), np.int32(index % 2)


def network():
    net = nn.HybridSequential()
    net.add(nn.Dense(8, activation="relu"), nn.Dense(2))
    return net


FORKS = """
import sys
import mxtrain
import cv2
import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn


class Pictures(gluon.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        x = np.full((40, 40, 3), index, "uint8")
        x = cv2.GaussianBlur(cv2.resize(x, (24, 24)), (3, 3), 1)
        return x.astype("float32").transpose(2, 0, 1) / 255, np.int32(index % 2)


for number in range(20):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), nn.Dense(2))
    net.initialize()
    net(mx.nd.ones((4, 3, 24, 24))).wait_to_read()  # threads of MXNet and OpenCV are there before the fork
    cv2.resize(np.zeros((500, 500, 3), "uint8"), (300, 300))
    result = mxtrain.fit(net, Pictures(), Pictures(), batch_size=8, epochs=2, lr=0.01, workers=2)
    assert result.rows[-1]["samples"] == 24
    print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", None])
def test_forks_after_computing_never_hang(tmp_path, threads):
    (tmp_path / "forks.py").write_text(FORKS)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment.update({"OMP_NUM_THREADS": threads} if threads else {})
    done = subprocess.run([sys.executable, "forks.py"], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0 and done.stdout.split() == [str(number) for number in range(20)], done.stderr


class Memory(Callback):
    """Resident bytes of this process and its workers after every epoch."""

    def __init__(self):
        self.bytes = []

    def epoch(self, rows):
        pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
        self.bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_memory_stays_flat(kind):
    """2,000 updates in 20 epochs with validation. Batches are 32 KB: 38 MB, were those of the last 12 epochs held.

    A few more megabytes come now and then: on a busy machine more batches are ahead of the devices, and pages of a
    forked worker count when it first reads them."""
    memory = Memory()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that tests before gave back to malloc would hide what is held here
    data = Numbers(800, threads=kind == "thread")
    files = len(os.listdir("/proc/self/fd"))
    mxtrain.fit(network(), data, Numbers(40, threads=kind == "thread"), batch_size=8, epochs=20, lr=0.01, workers=2,
                worker_kind=kind, callbacks=[memory])
    warm, end = max(memory.bytes[4:8]), min(memory.bytes[-4:])
    assert end - warm < 10 * 2**20, [round(value / 2**20, 1) for value in memory.bytes]
    assert_no_workers()
    assert len(os.listdir("/proc/self/fd")) <= files + 2
