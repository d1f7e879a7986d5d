"""Run folders that something happened to: damaged and missing files, full disks; other flags and data."""

import json
import os
import re
import resource
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import yaml

from mxtrain.train import checkpoint
from mxtrain.train.main import main
from trainings import MLP, QUIET, arrays, assert_same_bits, idx_folder, metrics, one_line, train_program

train = pytest.fixture(train_program)

# A rate that does not know the number of epochs, so that three and one more are the first four of any number.
THREE = [*MLP, "--epochs", "3", "--schedule", "constant", "--lr", "0.05"]
BYTES = 210_000  # at least that much is a checkpoint of this network: 26,122 weights and as many momenta


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run of three epochs, six updates each."""
    run = tmp_path_factory.mktemp("original") / "run"
    assert main([*THREE, "--out", str(run)]) == 0
    return run


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The same run over four epochs, never stopped."""
    run = tmp_path_factory.mktemp("straight") / "run"
    assert main([*THREE, "--epochs", "4", "--out", str(run)]) == 0
    return run


@pytest.fixture
def run(original, tmp_path):
    """A copy to spoil."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def newest(run):
    return run / "checkpoints" / "update-00000018"


# Damaged files (D10, D11)


def _empty(path):
    path.write_bytes(b"")


def _halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(bytes(data))


def _html(path):
    path.write_text("<!DOCTYPE html><html><head><title>404</title></head></html>")


def _other_json(path):
    path.write_text("[1, 2]")


def _folder_instead(path):
    path.unlink()
    path.mkdir()


DAMAGES = (
    [("arrays.npz", damage) for damage in (_halve, _empty, _flip_a_bit, _html, Path.unlink, _folder_instead)]
    + [("state.json", damage) for damage in (_halve, _empty, _html, _other_json, Path.unlink)]
    + [
        ("manifest.json", damage)
        for damage in (_halve, _empty, _html, _other_json, Path.unlink, _folder_instead)
    ]
    + [(".", shutil.rmtree), (".", lambda folder: [path.unlink() for path in folder.iterdir()])]
)


@pytest.mark.parametrize("name, damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(train, run, straight, name, damage):
    damage(newest(run) / name)
    code, _, stderr = train("--resume", run, "--epochs", 4)
    assert code == 0, stderr
    if newest(run).exists() and damage is not shutil.rmtree:
        warnings = [line for line in stderr.splitlines() if line.startswith("warning: ")]
        assert len(warnings) == 1 and str(newest(run) / name) in warnings[0], stderr
    assert "resumed after update 12" in stderr
    assert_same_bits(arrays(run), arrays(straight))
    assert [row["epoch"] for row in metrics(run)] == [row["epoch"] for row in metrics(straight)]


def test_a_damaged_checkpoint_that_was_asked_for_is_refused(train, run):
    _halve(newest(run) / "arrays.npz")
    before = contents(run)
    code, _, stderr = train("--resume", newest(run), "--epochs", 4)
    assert code == 2 and str(newest(run) / "arrays.npz") in one_line(stderr)
    assert contents(run) == before


def test_without_a_usable_checkpoint_nothing_is_begun(train, run):
    for folder in (run / "checkpoints").glob("update-*"):
        _empty(folder / "arrays.npz")
    before = contents(run)
    code, stdout, stderr = train("--resume", run, "--epochs", 4)
    assert (code, stdout) == (2, "") and str(run / "checkpoints") in one_line(stderr)
    assert contents(run) == before
    shutil.rmtree(run / "checkpoints")
    code, _, stderr = train("--resume", run, "--epochs", 4)
    assert code == 2 and str(run / "checkpoints") in one_line(stderr)


def test_leftovers_of_a_killed_writer_are_no_checkpoints(train, run, straight):
    """A half-written folder goes; one that was being replaced comes back."""
    folder = run / "checkpoints"
    (folder / ".new-update-00000099").mkdir()
    (folder / ".new-update-00000099" / "arrays.npz").write_bytes(b"PK half")
    os.replace(newest(run), folder / ".old-update-00000018")
    (folder / ".latest").write_text("upd")
    code, _, stderr = train("--resume", run, "--epochs", 4)
    assert code == 0 and "resumed after update 18" in stderr
    assert_same_bits(arrays(run), arrays(straight))
    assert not [path.name for path in folder.iterdir() if path.name.startswith((".new", ".old"))]


@pytest.mark.parametrize("pointer", ["latest", "best"])
@pytest.mark.parametrize("damage", [Path.unlink, _empty, _html])
def test_pointers_are_not_needed(train, run, straight, pointer, damage):
    damage(run / "checkpoints" / pointer)
    code, _, stderr = train("--resume", run, "--epochs", 4)
    assert code == 0 and "resumed after update 18" in stderr
    assert_same_bits(arrays(run), arrays(straight))


def test_a_process_killed_before_it_had_marked_the_best(train, run):
    """The checkpoint itself knows that it was the best."""
    best = (run / "checkpoints" / "best").read_text()
    assert best.strip() == newest(run).name
    (run / "checkpoints" / "best").write_text("update-00000006\n")
    code, _, stderr = train("--resume", run, "--epochs", 4, "--lr", 0)  # no change, so epoch 4 is no better
    assert code == 0, stderr
    assert (run / "checkpoints" / "best").read_text() == best


def test_resume_from_a_named_checkpoint_takes_another_course(train, run, straight):
    code, _, stderr = train("--resume", run / "checkpoints" / "update-00000006", "--epochs", 4)
    assert code == 0 and "resumed after update 6" in stderr and "removing" in stderr
    assert_same_bits(arrays(run), arrays(straight))
    assert [row["update"] for row in metrics(run)] == [row["update"] for row in metrics(straight)]


def test_kept_are_the_newest_and_the_best(train, tmp_path):
    """With a rate of 0 the first epoch stays the best."""
    code, _, stderr = train(*MLP, "--epochs", 5, "--lr", 0, "--keep", 2, "--out", tmp_path / "run")
    assert code == 0, stderr
    names = checkpoint.Folder(tmp_path / "run" / "checkpoints").names()
    assert names == ["update-00000006", "update-00000024", "update-00000030"]
    assert (tmp_path / "run" / "checkpoints" / "best").read_text().strip() == names[0]


def test_a_checkpoint_is_no_code(original):
    for path in newest(original).iterdir():
        assert path.suffix in (".json", ".npz")
    with np.load(newest(original) / "arrays.npz", allow_pickle=False) as archive:
        assert all(archive[name].dtype.kind in "fiu" for name in archive.files)
    manifest = json.loads((newest(original) / "manifest.json").read_text())
    assert set(manifest["files"]) == {"arrays.npz", "state.json"}


# Full disks. Nothing may be left open either, whose collection would print a traceback.

full_disk = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@contextmanager
def small_disk(path, size):
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@full_disk
def test_a_disk_that_fills_up_leaves_what_was_there(train, tmp_path, straight):
    """Room for three checkpoints; also the log, the table and the plots meet the full disk."""
    with small_disk(tmp_path / "disk", 4 * BYTES) as disk:
        code, stdout, stderr = train(
            "--model",
            "mlp",
            "--batch-size",
            256,
            "--schedule",
            "constant",
            "--lr",
            0.05,
            "--epochs",
            4,
            "--keep",
            9,
            "--out",
            disk / "run",
        )
        error = one_line(stderr)
        assert (code, stdout) == (1, "")
        assert "No space left on device" in error and "checkpoint" in error and "Logging error" not in stderr
        folder = checkpoint.Folder(disk / "run" / "checkpoints", reads_only=True)
        whole = folder.names()
        assert len(whole) in (2, 3) and whole[-1] in error
        for name in whole:
            checkpoint.read(folder.path / name)
        assert not [path for path in folder.path.iterdir() if path.name.startswith(".new")]
        shutil.copytree(disk / "run", tmp_path / "run")
    code, _, stderr = train("--resume", tmp_path / "run")
    assert code == 0, stderr
    assert_same_bits(arrays(tmp_path / "run"), arrays(straight))


@full_disk
@pytest.mark.parametrize("room", [0, 1, 2, 5, 30])  # pages
def test_a_disk_that_is_full_already(train, tmp_path, room, run):
    with small_disk(tmp_path / "disk", 8 * BYTES) as disk:
        shutil.copytree(run, disk / "run")
        with open(disk / "filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(b"x" * 4096)
            except OSError:
                pass
            filler.truncate(os.fstat(filler.fileno()).st_size - 4096 * room)
        before = {
            name: arrays(disk / "run", name)
            for name in checkpoint.Folder(disk / "run" / "checkpoints").names()
        }
        for arguments in (["--resume", disk / "run", "--epochs", 4], [*MLP, "--out", disk / "new"]):
            code, stdout, stderr = train(*arguments)
            error = one_line(stderr)
            assert (
                (code, stdout) == (1, "") and "No space left on device" in error and str(disk) in error
            ), stderr
            assert "Logging error" not in stderr
        for name, old in before.items():
            assert_same_bits(old, arrays(disk / "run", name))


@full_disk
def test_a_checkpoint_that_cannot_be_written(train, run):
    """The same by a limit on the size of files, which needs no rights."""
    before = arrays(run)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES // 2, limit[1]))
    try:
        code, _, stderr = train("--resume", run, "--epochs", 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    error = one_line(stderr)
    assert (
        code == 1 and "update-00000024" in error and "File too large" in error and str(newest(run)) in error
    )
    assert_same_bits(before, arrays(run))
    assert not (run / "checkpoints" / "update-00000024").exists()


# At the end, and past it (D14)


@pytest.mark.parametrize("more", [[], ["--epochs", "3"], ["--epochs", "2"], ["--cpus", "2"]])
def test_a_finished_run_says_so_and_stays_as_it_is(train, run, more):
    before = contents(run)
    code, stdout, stderr = train("--resume", run, *more)
    assert code == 0 and "is finished: all 3 epochs are done" in stderr
    assert stdout.splitlines()[0] == f"run folder: {run}" and stdout.splitlines()[1].startswith(
        "best accuracy: 0."
    )
    assert contents(run) == before


def test_more_epochs_after_the_end(train, run, straight):
    code, _, stderr = train("--resume", run, "--epochs", 4, "--cpus", 1)
    assert code == 0 and "from update 19 on: epochs 4 (was 3)" in stderr
    assert_same_bits(arrays(run), arrays(straight))
    saved = (run / "config.yaml").read_text()
    assert "# from update 19 on: epochs 4 (was 3)" in saved and yaml.safe_load(saved)["epochs"] == 4
    assert "from update 19 on: epochs 4 (was 3)" in (run / "log.txt").read_text()


@pytest.mark.parametrize(
    "flags",
    [
        ["--schedule", "step", "--decay-epochs", "1", "2"],
        ["--schedule", "step", "--decay-epochs", "9", "1", "1.5"],
        ["--warmup-epochs", "9"],
        ["--schedule", "poly", "--warmup-epochs", "0.5"],
        ["--batch-size", "2000"],
    ],
)
def test_the_rate_goes_on_as_if_never_stopped(train, tmp_path, flags):
    """Decay before, at and after the stop; warm-up longer than the run; one batch per epoch."""
    assert train(*MLP, "--epochs", 4, *flags, "--out", tmp_path / "straight")[0] == 0
    shutil.copytree(tmp_path / "straight", tmp_path / "run")
    second = checkpoint.Folder(tmp_path / "run" / "checkpoints").names()[-3]
    code, _, stderr = train("--resume", tmp_path / "run" / "checkpoints" / second)
    assert code == 0 and "epoch 3, batch 0" in stderr
    rates = [[row["lr"] for row in metrics(tmp_path / name)] for name in ("run", "straight")]
    assert len(rates[0]) == 8 and rates[0] == rates[1]
    assert_same_bits(arrays(tmp_path / "run"), arrays(tmp_path / "straight"))


def test_the_first_rate_is_the_one_asked_for(train, tmp_path):
    assert (
        train(*MLP, "--lr", 0.03, "--schedule", "step", "--decay-epochs", 1, "--out", tmp_path / "run")[0]
        == 0
    )
    assert [float(row["lr"]) for row in metrics(tmp_path / "run")] == [0.03, 0.03]


def test_another_schedule_from_here_on(train, tmp_path):
    run = tmp_path / "run"
    assert train(*MLP, "--epochs", 2, "--schedule", "step", "--decay-epochs", 1, "--out", run)[0] == 0
    code, _, stderr = train("--resume", run, "--epochs", 4, "--schedule", "constant", "--lr", 0.02)
    assert code == 0 and "schedule constant (was step)" in stderr and "decay_epochs [] (was [1.0])" in stderr
    assert [float(row["lr"]) for row in metrics(run)[::2]] == pytest.approx([0.1, 0.01, 0.02, 0.02])


# Early stopping (D12)


def test_early_stopping_counts_on(train, tmp_path):
    run = tmp_path / "run"
    assert (
        train(*MLP, "--lr", 0, "--patience", 3, "--epochs", 3, "--out", run)[0] == 0
    )  # two epochs without improvement
    code, stdout, stderr = train("--resume", run, "--epochs", 20)
    assert code == 0 and "accuracy has not improved for 3 epochs" in stderr
    assert stdout.splitlines()[-1].endswith("(epoch 1)")
    assert [row["epoch"] for row in metrics(run)[::2]] == ["1", "2", "3", "4"]
    before = contents(run)
    code, stdout, stderr = train("--resume", run)
    assert code == 0 and "is finished: accuracy has not improved for 3 epochs" in stderr
    assert stdout.splitlines()[-1].endswith("(epoch 1)")
    assert contents(run) == before
    code, _, stderr = train("--resume", run, "--patience", 5)
    assert code == 0 and "patience 5 (was 3)" in stderr
    assert [row["epoch"] for row in metrics(run)[::2]] == ["1", "2", "3", "4", "5", "6"]


# Other flags (D09)


def test_a_new_rate_wins_and_is_said(train, run):
    code, _, stderr = train("--resume", run, "--lr", 0.01, "--epochs", 4)
    assert code == 0 and "from update 19 on: lr 0.01 (was 0.05)" in stderr
    assert [row["lr"] for row in metrics(run)[::2]] == ["0.05", "0.05", "0.05", "0.01"]
    saved = (run / "config.yaml").read_text()
    assert "# from update 19 on: lr 0.01 (was 0.05)" in saved and yaml.safe_load(saved)["lr"] == 0.01
    code, _, stderr = train("--resume", run, "--epochs", 5)  # and it stays
    assert code == 0 and "lr" not in re.findall("from update 25 on: (.*)", stderr)[0]
    assert metrics(run)[-1]["lr"] == "0.01"
    assert "# from update 19 on: lr 0.01 (was 0.05)" in (run / "config.yaml").read_text()


@pytest.mark.parametrize(
    "flags, values",
    [
        (["--seed", "1"], ["--seed", "1", "0"]),
        (["--batch-size", "128"], ["--batch-size", "128", "256"]),
        (["--shards", "2"], ["--shards", "2", "1"]),
        (["--micro-batch", "64"], ["--shards", "4", "1"]),
        (["--model", "digits"], ["--model", "digits", "mlp"]),
        (["--model", "own:net"], ["--model", "own:net", "mlp"]),
        (["--exact"], ["--exact", "True", "False"]),
        (["--threads", "2"], ["--threads", "2", "1"]),
        (["--optimizer", "adam"], ["--optimizer", "adam", "sgd"]),
        (["--momentum", "0.5"], ["--momentum", "0.5", "0.9"]),
        (["--weight-decay", "0"], ["--weight-decay", "0", "0.0001"]),
        (["--clip-norm", "1"], ["--clip-norm", "1", "None"]),
        (["--freeze", "1.bias"], ["--freeze", "1.bias"]),
        (["--label-smoothing", "0.1"], ["--label-smoothing", "0.1", "0.0"]),
        (["--val-split", "0.1"], ["--val-split", "0.1"]),
        (["--last-batch", "drop"], ["--last-batch", "drop", "keep"]),
        (["--augment", "flip"], ["--augment", "flip", "None"]),
        (["--color-jitter", "0.4"], ["--color-jitter", "0.4", "0.0"]),
        (["--hue", "0.1"], ["--hue", "0.1", "0.0"]),
        (["--lighting", "0.1"], ["--lighting", "0.1", "0.0"]),
        (["--rand-augment", "2,9"], ["--rand-augment", "2,9", "None"]),
        (["--random-erasing", "0.25"], ["--random-erasing", "0.25", "0.0"]),
        (["--out", "elsewhere"], ["--out", "--resume"]),
        (["--gpus", "99"], ["--gpus", "99"]),
        (["--kvstore", "dist_sync"], ["--kvstore", "dist_sync"]),
        (["--epochs", "0"], ["--epochs", "0"]),
    ],
)
def test_what_belongs_to_the_run_cannot_change(train, run, flags, values):
    before = contents(run)
    code, stdout, stderr = train("--resume", run, "--epochs", 4, *flags)
    error = one_line(stderr)
    assert (code, stdout) == (2, "") and [value for value in values if value not in error] == [], error
    assert contents(run) == before


def test_the_same_command_again_with_resume(train, tmp_path):
    """People take their last command from the shell's history and add --resume."""
    command = [
        "--model",
        "mlp",
        "--batch-size",
        256,
        "--micro-batch",
        100,
        "--weight-decay",
        1e-5,
        "--task",
        "auto",
        "--data",
        "digits",
        "--epochs",
        1,
        "--freeze",
        "1.bias",
        "--out",
        tmp_path / "run",
        *QUIET,
    ]
    assert train(*command)[0] == 0
    code, _, stderr = train(*command, "--resume", tmp_path / "run")
    assert code == 0 and "is finished" in stderr, stderr


@pytest.mark.parametrize(
    "flags",
    [
        ["--kvstore", "none"],
        ["--cpus", "3"],
        ["--workers", "2"],
        ["--keep", "1"],
        ["--recompute", "2"],
        ["--checkpoint-updates", "2"],
        ["--plots"],
    ],
)
def test_what_belongs_to_the_machine_is_free(train, run, straight, flags):
    """And changes nothing: one shard, so the bits are equal even on three contexts."""
    code, _, stderr = train("--resume", run, "--epochs", 4, *flags)
    assert code == 0, stderr
    assert_same_bits(arrays(run), arrays(straight))


# Parts of a run folder that are gone, folders that moved, data that changed


@pytest.mark.parametrize("name", ["metrics.csv", "classes.txt", "log.txt", "input.json"])
def test_a_missing_file_that_is_not_needed(train, run, straight, name):
    (run / name).unlink()
    code, _, stderr = train("--resume", run, "--epochs", 4)
    assert code == 0, stderr
    assert "Traceback" not in stderr and (run / name).is_file()
    assert_same_bits(arrays(run), arrays(straight))
    if name == "metrics.csv":
        assert [row["epoch"] for row in metrics(run)] == ["4", "4"]


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        _empty,
        _html,
        _other_json,
        lambda path: path.write_text("epochs: [1"),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_text("epochs: many\n"),
        lambda path: path.write_text("novelty: 1\n"),
    ],
)
def test_a_damaged_configuration_is_refused(train, run, damage):
    damage(run / "config.yaml")
    code, _, stderr = train("--resume", run)
    assert code == 2 and "config.yaml" in one_line(stderr)


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", "epoch,update,split\n1,6,train\n\x00,\n", "epoch\nmany\n"]
)
def test_a_damaged_table_does_not_stop_a_training(train, run, straight, text):
    (run / "metrics.csv").write_text(text)
    code, _, stderr = train("--resume", run, "--epochs", 4)
    assert code == 0 and "Traceback" not in stderr
    assert_same_bits(arrays(run), arrays(straight))


def test_a_run_folder_may_move(train, run, straight, tmp_path, monkeypatch):
    shutil.move(run, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    code, stdout, stderr = train("--resume", "moved", "--epochs", 4)
    assert code == 0 and stdout.splitlines()[0] == "run folder: moved", stderr
    assert_same_bits(arrays("moved"), arrays(straight))
    assert not run.exists()


@pytest.mark.parametrize("change", ["labels", "fewer", "classes", "digits"])
def test_changed_data_are_refused(train, tmp_path, change):
    data, run = idx_folder(tmp_path / "data", 40, 8), tmp_path / "run"
    assert train("--data", data, *MLP, "--out", run)[0] == 0
    more = []
    if change == "labels":
        path = data / "train-labels-idx1-ubyte"
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
    elif change == "digits":
        more = ["--data", "digits"]
    else:
        shutil.rmtree(data)
        idx_folder(data, 39, 8) if change == "fewer" else idx_folder(data, 40, 8, classes=4)
    before = contents(run)
    code, _, stderr = train("--resume", run, "--epochs", 2, *more)
    assert code == 2 and "data have changed" in one_line(stderr)
    assert contents(run) == before


def test_data_may_move(train, tmp_path):
    data, run = idx_folder(tmp_path / "data", 40, 8), tmp_path / "run"
    assert train("--data", data, *MLP, "--out", run)[0] == 0
    shutil.move(data, tmp_path / "elsewhere")
    code, _, stderr = train("--resume", run, "--epochs", 2)
    assert code == 2 and str(data) in one_line(stderr)
    code, _, stderr = train("--resume", run, "--epochs", 2, "--data", tmp_path / "elsewhere")
    assert code == 0 and len(metrics(run)) == 4, stderr


@pytest.mark.parametrize("text", ["run", "run/checkpoints", "run/metrics.csv", "run/checkpoints/latest", "."])
def test_paths_that_are_no_runs(train, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "metrics.csv").write_text("")
    (tmp_path / "run" / "checkpoints" / "latest").write_text("update-00000001")
    code, _, stderr = train("--resume", text)
    assert code == 2 and text in one_line(stderr)
