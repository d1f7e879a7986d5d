"""train.py as its users call it: flags, files, tiny data, networks of their own, and what it prints.

In one process, through the script's own door; a process of its own only where that is the point.
"""

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
import yaml
from mxnet import gluon

import mxtrain
from mxtrain import config
from mxtrain.errors import UserError
from mxtrain.train import checkpoint, loop, session
from trainings import (
    MLP,
    QUIET,
    SCRIPT,
    arrays,
    assert_close,
    assert_same_bits,
    idx_folder,
    image_folder,
    metrics,
    one_line,
    train_program,
)

PACKAGE = Path(mxtrain.__file__).parent
train = pytest.fixture(train_program)


@pytest.fixture
def runs(monkeypatch):
    """The trained runs (mxtrain.train.run.Run), in their order."""
    found, carry_out = [], session.carry_out

    def spy(run, *arguments, **named):
        found.append(run)
        return carry_out(run, *arguments, **named)

    monkeypatch.setattr(session, "carry_out", spy)
    return found


@pytest.fixture
def own_network(tmp_path, monkeypatch, request):
    """Writes a user's module with a network; returns the value for --model."""

    def write(source):
        name = "own_" + re.sub(r"\W", "_", request.node.name)
        (tmp_path / f"{name}.py").write_text("from mxnet.gluon import nn\n\n\n" + source)
        monkeypatch.syspath_prepend(tmp_path)
        return f"{name}:net"

    return write


def assert_copies_equal(run):
    for name, parameter in run.parameters.items():
        first, *others = (copy.asnumpy() for copy in parameter.list_data())
        assert np.isfinite(first).all() and all(np.array_equal(first, other) for other in others), name


# Flags and files


def test_flags_win_over_the_file_and_the_resolved_configuration_is_the_same_run(train, tmp_path):
    (tmp_path / "my.yaml").write_text(
        "lr: 5e-2\nepochs: 7\nmodel: mlp\nbatch-size: 256\nclip_norm: 2\nplots: false\n"
        "tensorboard: false\nfreeze: ['1.bias']\nschedule: step\ndecay_epochs: [1, 2]\n"
    )
    code, _, stderr = train(
        "--config", tmp_path / "my.yaml", "--epochs", 2, "--seed", 3, "--out", tmp_path / "a"
    )
    assert code == 0, stderr
    saved = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert set(saved) == set(config.field_names())
    assert (saved["epochs"], saved["lr"], saved["seed"], saved["batch_size"], saved["freeze"]) == (
        2,
        0.05,
        3,
        256,
        ["1.bias"],
    )
    assert train("--config", tmp_path / "a" / "config.yaml", "--out", tmp_path / "b")[0] == 0
    assert_same_bits(arrays(tmp_path / "a"), arrays(tmp_path / "b"))


def test_the_configuration_of_a_run_makes_a_new_run(train, tmp_path, monkeypatch):
    """It is not the old folder that is asked for again, which would be refused."""
    monkeypatch.chdir(tmp_path)
    assert train(*MLP, "--out", "a")[0] == 0
    code, stdout, stderr = train("--config", "a/config.yaml")
    assert code == 0, stderr
    assert stdout.splitlines()[-2] == "run folder: runs/digits-mlp-001"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--epoch", "3"], ["--epoch", "--epochs"]),
        (["--learning-rate", "1"], ["--learning-rate"]),
        (["--bacth-size", "1"], ["--bacth-size", "--batch-size"]),
        (["--batch_size", "1"], ["--batch_size", "--batch-size"]),
        (["digits"], ["digits"]),
        (["--epochs", "many"], ["--epochs", "many", "whole number"]),
        (["--epochs"], ["--epochs"]),
        (["--epochs", "2.5"], ["--epochs", "2.5"]),
        (["--lr", "fast"], ["--lr", "fast"]),
        (["--lr", "nan"], ["--lr", "nan"]),
        (["--lr", "-1"], ["--lr", "-1"]),
        (["--schedule", "cosin"], ["--schedule", "cosin", "cosine"]),
        (["--kvstore", "devise"], ["--kvstore", "devise", "device"]),
        (["--kvstore", "dist_sync"], ["--kvstore", "dist_sync"]),
        (["--kvstore", "nccl", "--cpus", "2"], ["--kvstore", "nccl"]),
        (["--optimizer", "sdg"], ["--optimizer", "sdg", "sgd"]),
        (["--model", "resnet18v1"], ["--model", "resnet18v1", "resnet18_v1"]),
        (["--data", "nowhere"], ["--data", "nowhere"]),
        (["--monitor", "accurcy"], ["--monitor", "accurcy", "accuracy"]),
        (["--recompute", "99"], ["--recompute", "99"]),
        (["--batch-size", "0"], ["--batch-size", "0"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--beta2", "-0.5"], ["--beta2", "-0.5"]),
        (["--epsilon", "0"], ["--epsilon", "0"]),
        (["--min-delta", "0.1"], ["--min-delta", "--patience"]),
        (["--decay-epochs", "1"], ["--decay-epochs", "cosine"]),
        (["--shards", "2", "--micro-batch", "3"], ["--shards", "--micro-batch"]),
        (["--exact", "--shards", "2", "--cpus", "3"], ["--exact", "2", "3"]),
        (["--resume", "nowhere"], ["nowhere"]),
        (["--config", "nowhere.yaml"], ["--config", "nowhere.yaml"]),
        (["--init-from", "nowhere.params"], ["nowhere.params"]),
        (["--pretrained"], ["--pretrained", "digits"]),
        (["--freeze", "nothing-like-it"], ["--freeze", "nothing-like-it"]),
        (["--freeze", "."], ["--freeze"]),
        (["--zero-gamma"], ["--zero-gamma"]),
    ],
)
def test_a_mistake_is_one_line_and_makes_no_folder(train, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, stdout, stderr = train("--epochs", 1, *arguments)
    error = one_line(stderr)
    assert (code, stdout) == (2, "")
    assert [word for word in words if word not in error] == [], error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text, words",
    [
        ("epocs: 3\n", ["epocs", "epochs"]),
        ("epochs: many\n", ["epochs", "many"]),
        ("epochs: null\n", ["epochs"]),
        ("- epochs\n", ["my.yaml"]),
        ("epochs: [3\n", ["my.yaml"]),
    ],
)
def test_a_mistake_in_a_file_is_one_line(train, tmp_path, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(text)
    code, _, stderr = train("--config", "my.yaml")
    error = one_line(stderr)
    assert code == 2
    assert [word for word in words if word not in error] == [], error
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]


def test_every_flag_has_help_and_is_read_by_some_code():
    helped = {action.dest: action.help for action in config.training_parser()._actions}
    source = "\n".join(
        path.read_text() for path in PACKAGE.rglob("*.py") if path.name not in ("settings.py", "config.py")
    )
    for section in config.SECTIONS.values():
        own = Path(sys.modules[section.__module__].__file__).read_text()
        for field in dataclasses.fields(section):
            assert len(helped.get(field.name, "").split()) >= 3, f"--{field.name} has no help text"
            # As an attribute of a settings object. In the class's own file its checks (self.x) do not count.
            elsewhere = re.findall(
                rf"(?:config|settings|model|train|data|text|parallel|optim|devices|experts)\.{field.name}\b", source + own
            )
            assert elsewhere, f"no code reads {field.name}: --{field.name.replace('_', '-')} has no effect"
    assert len(set(config.field_names())) == len(config.field_names())


def test_help_and_parsing_do_not_import_mxnet():
    probe = (
        "import sys; from mxtrain import config; from mxtrain.train import main, session\n"
        "parsed = config.parse(['--epochs', '3', '--cpus', '2'])\nsession.configure(parsed.given)\n"
        "try: config.parse(['--help'])\nexcept SystemExit as ended: assert not ended.code\n"
        "heavy = {'mxnet', 'gluoncv', 'cv2', 'sklearn', 'matplotlib', 'tensorboardX'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--batch-size" in done.stdout and "--help" in done.stdout


@pytest.mark.parametrize(
    "flags, idle",
    [
        (["--optimizer", "adam", "--momentum", 0.5], ["--momentum 0.5"]),
        (["--beta1", 0.5, "--epsilon", 0.1], ["--beta1 0.5", "--epsilon 0.1"]),
        (["--final-lr", 0.1, "--schedule", "constant"], ["--final-lr 0.1"]),
        (["--decay-factor", 0.5, "--poly-power", 1], ["--decay-factor", "--poly"]),
        (["--schedule", "poly", "--poly-power", 1, "--final-lr", 0.01, "--momentum", 0.5], []),
    ],
)
def test_flags_without_effect_are_said(train, tmp_path, flags, idle):
    code, _, stderr = train(*MLP, *flags, "--out", tmp_path / "run")
    said = [line for line in stderr.splitlines() if "has no effect" in line]
    assert (
        code == 0 and len(said) == len(idle) and all(any(text in line for line in said) for text in idle)
    ), stderr


# Devices (D03)


@pytest.mark.parametrize(
    "devices", ["98,99", "98", "99,98", "0,0", "", "0,", "0,a", "-1", " ", "0;1", "0.5", "al", "1,,2"]
)
def test_bad_gpu_lists_are_refused_before_data_are_read(train, devices):
    code, _, stderr = train(f"--gpus={devices}", "--data", "nowhere")
    error = one_line(stderr)
    assert code == 2 and "--gpus" in error and "nowhere" not in error
    assert devices.strip() in error
    if devices.startswith("9"):
        assert "visible" in error


@pytest.mark.parametrize("count", ["0", "-1", "two", "0,1", "1.5", ""])
def test_bad_cpu_counts_are_refused_before_data_are_read(train, count):
    code, _, stderr = train(f"--cpus={count}", "--data", "nowhere")
    error = one_line(stderr)
    assert code == 2 and "--cpus" in error and "nowhere" not in error


def test_gpus_and_cpus_exclude_each_other(train):
    assert "--cpus" in one_line(train("--gpus", "0", "--cpus", 2, "--data", "nowhere")[2])


# What is printed and written


def test_last_lines_and_files(train, tmp_path):
    code, stdout, stderr = train(
        "--model", "mlp", "--batch-size", 100, "--epochs", 2, "--out", tmp_path / "run", "--cpus", 2
    )
    assert code == 0
    rows = metrics(tmp_path / "run")
    best = max((float(row["accuracy"]), -int(row["epoch"])) for row in rows if row["split"] == "val")
    assert stdout.splitlines() == [
        f"run folder: {tmp_path / 'run'}",
        f"best accuracy: {best[0]:.4f} (epoch {-best[1]})",
    ]
    assert list(rows[0])[:10] == [
        "epoch",
        "update",
        "split",
        "samples",
        "loss",
        "accuracy",
        "lr",
        "seconds",
        "samples_per_second",
        "wait_share",
    ]
    assert [(row["epoch"], row["update"], row["split"], row["samples"]) for row in rows] == [
        (str(epoch), str(15 * epoch), split, count)
        for epoch in (1, 2)
        for split, count in (("train", "1442"), ("val", "355"))
    ]
    assert all(
        math.isfinite(float(value))
        for row in rows
        for name, value in row.items()
        if name != "split" and value
    )
    entries = {path.name for path in (tmp_path / "run").iterdir()}
    assert {
        "config.yaml",
        "metrics.csv",
        "events",
        "curves.png",
        "classes.txt",
        "log.txt",
        "checkpoints",
    } <= entries
    assert not [name for name in entries if name.startswith(".")]
    assert (tmp_path / "run" / "classes.txt").read_text().split() == list("0123456789")
    # The first lines name the devices and the data, then each epoch has one.
    assert len([line for line in stderr.splitlines() if re.match(r"epoch \d/2  train loss", line)]) == 2
    assert "cpu(0), cpu(1)" in stderr and "1442 training and 355 validation" in stderr
    # The log keeps what was said before there was a folder to keep it in.
    assert "1442 training and 355 validation" in (tmp_path / "run" / "log.txt").read_text()


def test_json_is_the_last_line(train, tmp_path):
    code, stdout, _ = train(*MLP, "--json", "--out", tmp_path / "run")
    assert code == 0 and stdout.count("\n") == 1
    told = json.loads(stdout)
    assert (told["run"], told["epochs"], told["updates"], told["monitor"]) == (
        str(tmp_path / "run"),
        1,
        6,
        "accuracy",
    )
    assert told["best"] == float(metrics(tmp_path / "run")[1]["accuracy"])


def test_an_output_folder_in_use_is_left_alone(train, tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    code, _, stderr = train(*MLP, "--out", tmp_path)
    assert code == 2 and "--out" in one_line(stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_a_training_outlives_broken_loggers(train, tmp_path, monkeypatch):
    from mxtrain.callbacks.curves import Curves
    from mxtrain.callbacks.events import Events
    from mxtrain.callbacks.progress import Progress
    from mxtrain.callbacks.table import Table

    assert train(*MLP, "--out", tmp_path / "well")[0] == 0

    def fail(*_):
        raise RuntimeError("no more ink")

    for kind, event in (
        (Curves, "close"),
        (Events, "epoch"),
        (Progress, "log"),
        (Table, "epoch"),
        (Table, "close"),
    ):
        monkeypatch.setattr(kind, event, fail)
    code, stdout, stderr = train(*MLP, "--plots", "--tensorboard", "--progress", "--out", tmp_path / "ill")
    assert code == 0 and stdout.startswith(f"run folder: {tmp_path / 'ill'}")
    for kind in ("Curves", "Events", "Progress", "Table"):
        assert len([line for line in stderr.splitlines() if line.startswith("warning") and kind in line]) == 1
    assert "Traceback" not in stderr
    assert_same_bits(arrays(tmp_path / "well"), arrays(tmp_path / "ill"))


def test_nobody_reading_the_log_does_not_end_the_training(tmp_path):
    """As in `train.py 2>&1 | head -1`, or when a terminal has gone."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *MLP, "--progress", "--out", str(tmp_path / "run")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    process.stderr.close()
    assert process.wait(timeout=120) == 0
    assert len(metrics(tmp_path / "run")) == 2


# Divergence (D13)


@pytest.mark.parametrize("more", [[], ["--exact"], ["--clip-norm", "1e9", "--cpus", "2"]])
def test_divergence_stops_and_names_the_update(train, tmp_path, more):
    code, stdout, stderr = train("--lr", 1e6, "--out", tmp_path / "run", "--epochs", 3, *QUIET, *more)
    assert (code, stdout) == (1, "")
    assert re.search(r"update \d+\b.*diverged", one_line(stderr))
    folder = checkpoint.Folder(tmp_path / "run" / "checkpoints")
    assert folder.names()
    for name in folder.names():
        assert all(np.isfinite(array).all() for array in arrays(tmp_path / "run", name).values())


def test_the_last_finite_checkpoint_and_the_best_stay(train, tmp_path):
    """Divergence in the second epoch, by a rate that comes up after a good first one."""
    code, _, _ = train(*MLP, "--out", tmp_path / "run", "--schedule", "constant")
    before = arrays(tmp_path / "run", "best")
    code, _, stderr = train("--resume", tmp_path / "run", "--epochs", 4, "--lr", 1e9)
    assert code == 1 and "diverged" in one_line(stderr)
    assert_same_bits(arrays(tmp_path / "run"), before)
    assert_same_bits(arrays(tmp_path / "run", "best"), before)


# Tiny data (D01, D33)


@pytest.mark.parametrize("samples, batch, contexts", [(9, 8, 3), (5, 4, 2), (5, 1, 2), (3, 8, 3), (4, 3, 4)])
def test_batches_smaller_than_the_contexts(train, runs, tmp_path, samples, batch, contexts):
    data = idx_folder(tmp_path / "data", samples, val_count=4)
    common = [
        "--data",
        data,
        "--model",
        "mlp",
        "--batch-size",
        batch,
        "--epochs",
        2,
        "--shards",
        contexts,
        "--lr",
        0.01,
        *QUIET,
    ]
    for count in (1, contexts):
        code, stdout, stderr = train(*common, "--cpus", count, "--out", tmp_path / f"on-{count}")
        assert code == 0, stderr
        assert "nan" not in stdout + stderr
        rows = metrics(tmp_path / f"on-{count}")
        assert [row["samples"] for row in rows] == [str(samples), "4"] * 2
        assert all(
            0 < float(row["samples_per_second"]) < math.inf and 0 <= float(row["accuracy"]) <= 1
            for row in rows
        )
        assert_copies_equal(runs[-1])
    assert_close(arrays(tmp_path / "on-1"), arrays(tmp_path / f"on-{contexts}"))
    one, several = metrics(tmp_path / "on-1"), metrics(tmp_path / f"on-{contexts}")
    assert [row["accuracy"] for row in one] == [row["accuracy"] for row in several]
    # An evaluation loss agrees to 1e-6 (law 3); weights that differ in the last digits add about as much.
    assert [float(row["loss"]) for row in one] == pytest.approx(
        [float(row["loss"]) for row in several], rel=1e-5
    )


def test_dropping_the_last_batch_is_said_and_an_epoch_without_batches_refused(train, tmp_path):
    data = idx_folder(tmp_path / "data", 9, 2)
    common = [
        "--data",
        data,
        "--model",
        "mlp",
        "--epochs",
        1,
        "--last-batch",
        "drop",
        "--out",
        tmp_path / "run",
        *QUIET,
    ]
    code, _, stderr = train(*common, "--batch-size", 16)
    assert code == 2 and "--last-batch" in one_line(stderr) and not (tmp_path / "run").exists()
    code, _, stderr = train(*common, "--batch-size", 4)
    assert code == 0 and "1 of 9 samples" in stderr
    assert [row["samples"] for row in metrics(tmp_path / "run")] == ["8", "2"]


def test_nine_images_in_folders(train, tmp_path):
    code, stdout, stderr = train(
        "--data",
        image_folder(tmp_path / "pictures", 9),
        "--val-split",
        0.34,
        "--model",
        "mobilenet0.25",
        "--image-size",
        32,
        "--batch-size",
        8,
        "--cpus",
        3,
        "--epochs",
        2,
        "--lr",
        0.01,
        "--workers",
        2,
        "--out",
        tmp_path / "run",
        *QUIET,
    )
    assert code == 0, stderr
    assert (tmp_path / "run" / "classes.txt").read_text().splitlines() == ["a bird", "cat", "dog"]
    rows = metrics(tmp_path / "run")
    assert int(rows[0]["samples"]) + int(rows[1]["samples"]) == 9
    assert "warning: batch normalization" in stderr  # 8 samples on 3 contexts


# Networks of one's own, starting weights, frozen parameters


def test_own_network(train, tmp_path, own_network):
    name = own_network(
        "def net(classes):\n    body = nn.HybridSequential()\n"
        "    body.add(nn.Dense(7, activation='tanh'), nn.Dense(classes))\n    return body\n"
    )
    code, _, stderr = train(*MLP, "--model", name, "--cpus", 2, "--out", tmp_path / "run")
    assert code == 0, stderr
    assert {
        key: array.shape for key, array in arrays(tmp_path / "run").items() if key.startswith("weights/")
    } == {
        "weights/0.weight": (7, 64),
        "weights/0.bias": (7,),
        "weights/1.weight": (10, 7),
        "weights/1.bias": (10,),
    }


def test_own_network_with_a_wrong_output_is_refused(train, tmp_path, own_network, monkeypatch):
    name = own_network("def net(classes):\n    return nn.Dense(classes + 1)\n")
    code, _, stderr = train(*MLP, "--model", name, "--out", tmp_path / "run")
    assert code == 2 and "10 are needed" in one_line(stderr) and not (tmp_path / "run").exists()


AUXILIARY = """class WithAuxiliary(nn.HybridBlock):
    def __init__(self, classes):
        super().__init__()
        with self.name_scope():
            self.body = nn.Dense(6, activation="relu")
            self.output = nn.Dense(classes)
            self.auxiliary = nn.Dense(classes)

    def hybrid_forward(self, F, x):
        x = self.body(x)
        return self.output(x), self.auxiliary(x)


def net(classes):
    return WithAuxiliary(classes)
"""

UNUSED = """class WithUnused(nn.{kind}):
    def __init__(self, classes):
        super().__init__()
        with self.name_scope():
            self.used = nn.Dense(classes, in_units=64)
            self.unused = nn.Dense(3, in_units=5)
            self.scale = self.params.get("scale", shape=(4,))

    def {forward}(self, {f}x{also}):
        return self.used(x.reshape((-1, 64)))


def net(classes):
    return WithUnused(classes)
"""


@pytest.mark.filterwarnings("ignore:Parameter .* is not used by any computation")
@pytest.mark.parametrize(
    "source",
    [
        AUXILIARY,
        UNUSED.format(kind="HybridBlock", forward="hybrid_forward", f="F, ", also=", scale"),
        UNUSED.format(kind="Block", forward="forward", f="", also=""),
    ],
    ids=["auxiliary", "unused", "unused-imperative"],
)
@pytest.mark.parametrize("more", [["--cpus", "2"], ["--cpus", "3", "--exact"]], ids=["float", "exact"])
def test_parameters_without_a_part_keep_the_copies_equal(train, runs, tmp_path, own_network, source, more):
    """D02; the last batch is one sample, so that all contexts but one are idle."""
    code, _, stderr = train(
        "--model",
        own_network(source),
        "--batch-size",
        131,
        "--epochs",
        1,
        *QUIET,
        *more,
        "--out",
        tmp_path / "run",
    )
    assert code == 0, stderr
    assert 1442 % 131 == 1
    assert_copies_equal(runs[-1])
    # MXNet gives a parameter that took no part a gradient of zeros; weight decay alone moves it.
    assert any(
        np.abs(array).max() > 0
        for name, array in arrays(tmp_path / "run").items()
        if name.startswith("optimizer/")
    )


def test_starting_from_another_number_of_classes_on_two_contexts(train, runs, tmp_path, caplog):
    """D34 a: the new head is initialized, alike on both contexts; the body has the file's bits."""
    three = idx_folder(tmp_path / "three", 30, 9, classes=3, side=8)
    assert train("--data", three, "--model", "mlp", "--epochs", 1, "--out", tmp_path / "a", *QUIET)[0] == 0
    body = arrays(tmp_path / "a")
    saved = {name[8:]: mx.nd.array(array) for name, array in body.items() if name.startswith("weights/")}
    mx.nd.save(str(tmp_path / "three.params"), saved)
    code, _, stderr = train(
        *MLP, "--cpus", 2, "--init-from", tmp_path / "three.params", "--out", tmp_path / "b"
    )
    assert code == 0, stderr
    assert "loaded 4 of 6 parameters" in stderr and "3.weight" in stderr and "3.bias" in stderr
    start = arrays(tmp_path / "b", "update-00000000")
    assert start["weights/3.weight"].shape == (10, 128) and np.ptp(start["weights/3.weight"]) > 0
    for name in ("1.weight", "1.bias", "2.weight", "2.bias"):
        assert np.array_equal(start[f"weights/{name}"], body[f"weights/{name}"])
    assert_copies_equal(runs[-1])
    mx.nd.save(str(tmp_path / "foreign.params"), {"x.weight": mx.nd.ones((2, 3))})
    code, _, stderr = train(*MLP, "--init-from", tmp_path / "foreign.params", "--out", tmp_path / "c")
    assert code == 2 and "foreign.params" in one_line(stderr) and not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "more",
    [[], ["--cpus", "2", "--exact", "--optimizer", "adamw"], ["--recompute", "2"]],
    ids=["plain", "exact", "recompute"],
)
def test_frozen_is_frozen(train, tmp_path, more):
    """Bits, with weight decay, and the running statistics with them."""
    code, _, stderr = train(
        "--model",
        "digits",
        "--epochs",
        1,
        "--weight-decay",
        0.1,
        "--lr",
        0.01,
        "--freeze",
        r"^[0-4]\.",
        *QUIET,
        *more,
        "--out",
        tmp_path / "run",
    )
    assert code == 0, stderr
    before, after = arrays(tmp_path / "run", "update-00000000"), arrays(tmp_path / "run")
    kept = [
        name for name in before if name.startswith("weights/") and np.array_equal(before[name], after[name])
    ]
    assert kept == [name for name in before if re.match(r"weights/[0-4]\.", name)]
    assert {"weights/1.running_mean", "weights/1.running_var", "weights/4.gamma"} <= set(kept)
    assert f"{len(kept)} of" in stderr


# Clipping (D04)


@pytest.mark.parametrize("kvstore", ["none", "local", "device"])
def test_clipping_by_the_global_norm_does_not_depend_on_the_contexts(train, tmp_path, kvstore):
    for count in (1, 2):
        code, _, stderr = train(
            *MLP,
            "--clip-norm",
            0.1,
            "--shards",
            2,
            "--cpus",
            count,
            "--kvstore",
            kvstore,
            "--momentum",
            0,
            "--out",
            tmp_path / f"on-{count}",
        )
        assert code == 0, stderr
    one, two = (metrics(tmp_path / f"on-{count}")[0] for count in (1, 2))
    assert float(one["grad_norm"]) > 0.1  # it was clipped, and the norm before that is told
    assert float(one["grad_norm"]) == pytest.approx(float(two["grad_norm"]), rel=1e-5)
    assert_close(arrays(tmp_path / "on-1"), arrays(tmp_path / "on-2"))
    # Six steps of at most lr * 0.1 each, and the decay's small part: the clipping bounds the way.
    start, end = arrays(tmp_path / "on-1", "update-00000000"), arrays(tmp_path / "on-1")
    way = math.sqrt(sum(float(np.sum((end[n] - start[n]) ** 2)) for n in start if n.startswith("weights/")))
    assert 0 < way <= 6 * 0.1 * 0.1 * 1.1


def test_users_errors_are_not_tracebacks_in_the_library_either(tmp_path):
    with pytest.raises(UserError, match="no such setting"):
        mxtrain.fit(
            gluon.nn.Dense(2),
            gluon.data.ArrayDataset(np.ones((4, 3), "float32"), np.zeros(4, "int32")),
            batch_size=2,
            learning_rate=0.1,
        )


def test_json_is_the_last_line_of_a_failure_too(train, tmp_path):
    code, stdout, stderr = train("--json", "--lr", "fast", "--out", tmp_path / "run")
    assert code == 2
    assert json.loads(stdout.splitlines()[-1]) == {"error": one_line(stderr).split("error: ", 1)[1], "exit_code": 2}


def test_json_is_the_last_line_of_a_run_that_was_stopped(train, tmp_path, monkeypatch):
    agree = loop.agree
    monkeypatch.setattr(loop, "agree", lambda run, *own: agree(run, *own)._replace(signal=15 * min(run.state.update, 1)))
    code, stdout, _ = train(*MLP, "--json", "--out", tmp_path / "run")
    assert code == 143
    assert json.loads(stdout.splitlines()[-1]) == {
        "run": str(tmp_path / "run"), "finished": None, "epochs": 0, "updates": 1, "signal": 15}


def test_a_plan_is_told_and_nothing_is_written(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, stdout, stderr = train("--model", "mlp", "--plan", "--cpus", 2, "--pp", 2, "--device-memory", "200kB")
    assert code == 0 and "1 replica of 2 stages" in stdout and "devices too small" in stdout
    code, stdout, _ = train("--model", "mlp", "--plan", "--gpus", "0,1,2,3", "--processes", 2, "--zero", 2, "--json")
    plan = json.loads(stdout)
    assert code == 0 and (plan["replicas"], [one["context"] for one in plan["devices"]]) == (4, ["gpu(0)", "gpu(1)"] * 2)
    assert list(tmp_path.iterdir()) == []
    code, _, stderr = train("--model", "mlp", "--plan", "--zero", 1)
    assert code == 0 and "--zero 1: has no effect with one replica" in stderr


@pytest.mark.parametrize("flags, words", [
    (["--plan", "--cpus", 2, "--compression", "fp16", "--zero", 1], "--compression fp16: is for gradients that all"),
    (["--plan", "--audit", 3], "--audit 3: has no effect with one process and one context"),
    (["--plan", "--pp", 2], "--pp 2: 2 stages need a multiple of 2 contexts"),
    (["--plan", "--processes", 0], "--processes 0: must be 1 or more"),
    (["--plan", "--device-memory", "16"], "--device-memory 16: must be an amount such as 16GB or 80GiB"),
    (["--processes", 2], "--processes 2: is for --plan"),
    (["--device-memory", "16GB"], "--device-memory 16GB: is for --plan"),
    (["--plan", "--check-data"], "--plan and --check-data: give one of them")])
def test_what_cannot_be_is_not_planned(train, flags, words):
    code, _, stderr = train("--model", "mlp", *flags)
    assert code == 2 and words in one_line(stderr)
