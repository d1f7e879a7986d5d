"""Trainings killed or stopped anywhere, and resumed, end like the training never stopped, bit for bit.

Processes of their own where they are killed; signals that are answered come from within, at exactly the point
meant. Set MXTRAIN_TEST_SEED to repeat the random points of a failure.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from mxtrain.signals import SAME_SECONDS
from mxtrain.train import checkpoint, loop
from mxtrain.train.main import main
from trainings import (
    MLP,
    QUIET,
    SCRIPT,
    arrays,
    assert_same_bits,
    at_call,
    image_folder,
    metrics,
    one_line,
    train_program,
)

train = pytest.fixture(train_program)

SEED = int(os.environ.get("MXTRAIN_TEST_SEED") or random.SystemRandom().randrange(10**6))
EPOCHS, UPDATES = 4, 23  # of 64 samples, the last one of 34

# All that has a state: random masks, running statistics, momentum, a schedule, clipping, early stopping.
NETWORK = """from mxnet.gluon import nn


def net(classes):
    body = nn.HybridSequential()
    body.add(nn.Flatten(), nn.Dense(24), nn.BatchNorm(), nn.Activation("relu"))
    body.add(nn.Dropout(0.3), nn.Dense(classes))
    return body
"""
FLAGS = [
    "--model",
    "network_for_resume:net",
    "--epochs",
    str(EPOCHS),
    "--batch-size",
    "64",
    "--clip-norm",
    "0.5",
    "--warmup-epochs",
    "1.5",
    "--patience",
    "9",
    "--checkpoint-updates",
    "1",
    "--keep",
    "2",
]


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """The working directory, with the network in it."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "network_for_resume.py").write_text(NETWORK)
    before, path = os.getcwd(), list(sys.path)
    os.chdir(folder)
    yield folder
    os.chdir(before)
    sys.path[:] = path


@pytest.fixture(scope="module")
def straight(place):
    """The run folders of trainings never stopped, by their flags."""
    found = {}

    def of(*flags):
        if flags not in found:
            found[flags] = place / f"straight-{len(found)}"
            assert (
                main([*FLAGS, *QUIET, "--checkpoint-updates", "1000", *flags, "--out", str(found[flags])])
                == 0
            )
        return found[flags]

    return of


class Process:
    """A train.py in a session of its own. Its stderr goes to a file, so that it never waits for a reader."""

    def __init__(self, folder, *arguments):
        self.log = folder / "stderr.txt"
        with open(self.log, "wb") as stderr:
            self.popen = subprocess.Popen(
                [sys.executable, str(SCRIPT), *map(str, arguments)],
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )

    def wait_for(self, condition):
        """Until something can be seen from outside; the process must still be running then."""
        deadline = time.monotonic() + 120
        while not condition():
            assert (
                self.popen.poll() is None
            ), f"ended early with {self.popen.returncode}: {self.log.read_text()}"
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.001)

    def says(self, text):
        self.wait_for(lambda: text in self.log.read_text())

    def send(self, number):
        os.kill(self.popen.pid, number)

    def end(self):
        """The exit code. Nothing of its session is left."""
        code = self.popen.wait(timeout=120)
        with pytest.raises(ProcessLookupError):
            os.killpg(self.popen.pid, 0)
        return code


def assert_same_run(run, other):
    assert_same_bits(arrays(run), arrays(other))
    numbers = [
        [
            (
                row["epoch"],
                row["update"],
                row["split"],
                row["samples"],
                row["loss"],
                row["accuracy"],
                row["lr"],
            )
            for row in metrics(folder)
        ]
        for folder in (run, other)
    ]
    assert numbers[0] == numbers[1]
    assert [row["epoch"] for row in metrics(run)] == [
        str(epoch) for epoch in range(1, EPOCHS + 1) for _ in range(2)
    ]


# SIGKILL


def killed_twice(folder, points, resumes, flags=()):
    """Starts a training, kills it at a random point, resumes it with resumes[0], kills it again, finishes it
    with resumes[1]. Returns the run folder."""
    run = folder / "run"
    first = points.randrange(1, EPOCHS * UPDATES // 2)
    targets = [first, points.randrange(first + 6, EPOCHS * UPDATES - 6)]
    print("kills at updates", targets)
    for target, arguments in zip(targets, ([*FLAGS, *flags, "--out", run], ["--resume", run, *resumes[0]])):
        process = Process(folder, *arguments)
        checkpoints = run / "checkpoints"
        # From when this checkpoint is begun; writing it takes some 20 ms, the next update a few.
        process.wait_for(
            lambda: (checkpoints / f".new-update-{target:08d}").exists() or _newest(checkpoints) >= target
        )
        moment = time.perf_counter() + points.uniform(0, 0.04)
        while time.perf_counter() < moment:
            pass
        process.send(signal.SIGKILL)
        assert process.end() == -signal.SIGKILL, process.log.read_text()
        assert target - 1 <= _newest(checkpoints) < EPOCHS * UPDATES
    assert main(["--resume", str(run), *resumes[1]]) == 0
    return run


def _newest(checkpoints):
    names = checkpoint.Folder(checkpoints, reads_only=True).names()
    return int(names[-1].split("-")[1]) if names else -1


def chain(folder, number, straight, exact):
    shutil.copy("network_for_resume.py", folder)
    print(f"MXTRAIN_TEST_SEED={SEED}")
    points = random.Random(f"{SEED}-{number}-{exact}")
    flags = ["--exact", "--shards", "5"] if exact else ["--cpus", "2"]
    resumes = [["--cpus", "3"], ["--cpus", "2"]] if exact else [[], []]
    run = killed_twice(folder, points, resumes, flags)
    assert_same_run(run, straight(*flags))
    leftovers = [
        path for path in (run / "checkpoints").iterdir() if not re.match("update-|latest$|best$", path.name)
    ]
    assert leftovers == []


@pytest.mark.parametrize("exact", [False, True], ids=["float", "exact"])
def test_killed_and_resumed(tmp_path, straight, exact):
    chain(tmp_path, 0, straight, exact)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("exact", [False, True], ids=["float", "exact"])
def test_killed_and_resumed_twenty_times(tmp_path, straight, number, exact):
    chain(tmp_path, number, straight, exact)


# SIGINT and SIGTERM


def test_stopped_by_signals_from_outside(tmp_path, train):
    """Threads that decode ahead, first SIGTERM, then SIGINT, both at whatever point that is."""
    data = image_folder(tmp_path / "pictures", 30, side=16)
    flags = [
        "--data",
        data,
        "--image-size",
        12,
        "--model",
        "digits",
        "--batch-size",
        10,
        "--epochs",
        36,
        "--lr",
        0.01,
        "--workers",
        2,
        "--checkpoint-minutes",
        60,
        "--keep",
        90,
    ]
    run = tmp_path / "run"
    for number, rows, arguments in (
        (signal.SIGTERM, 2, [*flags, *QUIET, "--out", run]),
        (signal.SIGINT, 8, ["--resume", run]),
    ):
        process = Process(tmp_path, *arguments)
        process.wait_for(lambda: (run / "metrics.csv").exists() and len(metrics(run)) > rows)
        process.send(number)
        assert process.end() == 128 + number
        said = process.log.read_text()
        assert number.name in said and f"--resume {run}" in said and "Traceback" not in said, said
        assert "stopped after update" in (run / "log.txt").read_text()
    assert train("--resume", run)[0] == 0
    assert train(*flags, *QUIET, "--out", tmp_path / "straight")[0] == 0
    assert_same_bits(arrays(run), arrays(tmp_path / "straight"))
    assert [row["loss"] for row in metrics(run)] == [row["loss"] for row in metrics(tmp_path / "straight")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_before_the_loop(tmp_path, number):
    """Nothing to save yet: the end comes at once, without a traceback and without a folder."""
    process = Process(tmp_path, *MLP, "--epochs", 500, "--out", tmp_path / "run")
    process.says("devices: ")
    process.send(number)
    assert process.end() in (
        128 + number,
        *([-number] if number == signal.SIGTERM else []),
    )  # a shell shows both as 143
    assert "Traceback" not in process.log.read_text()
    assert not (tmp_path / "run").exists() or list((tmp_path / "run").iterdir())


def test_a_second_signal_ends_at_once(tmp_path):
    """In an update that never ends; the checkpoint before it stays."""
    (tmp_path / "endless.py").write_text(
        "import sys\nimport time\nfrom mxnet import autograd\nfrom mxnet.gluon import nn\n\n\n"
        "class Endless(nn.Dense):\n    def __call__(self, x):\n        while autograd.is_recording():\n"
        "            print('in an update', file=sys.stderr, flush=True)\n            time.sleep(600)\n"
        "        return super().__call__(x)\n\n\n"
        "def net(classes):\n    body = nn.Sequential()\n    body.add(Endless(classes))\n"
        "    return body\n"
    )
    process = Process(tmp_path, *MLP, "--model", "endless:net", "--out", tmp_path / "run")
    process.says("in an update")
    process.send(signal.SIGINT)
    process.says("saving after this update")
    time.sleep(SAME_SECONDS + 0.5)
    process.send(signal.SIGTERM)
    assert process.end() == -signal.SIGTERM
    assert checkpoint.Folder(tmp_path / "run" / "checkpoints").names() == ["update-00000000"]


@pytest.mark.parametrize(
    "where, call, number",
    [
        ("update", 1, signal.SIGTERM),
        ("update", 17, signal.SIGINT),
        ("update", 23, signal.SIGTERM),
        ("update", EPOCHS * UPDATES, signal.SIGINT),
        ("evaluate", 1, signal.SIGTERM),
        ("evaluate", 3, signal.SIGINT),
        ("evaluate", 6, signal.SIGTERM),
        ("evaluate", 6 * EPOCHS, signal.SIGINT),
        ("save", 1, signal.SIGTERM),
        ("save", 2, signal.SIGINT),
        ("save", EPOCHS + 1, signal.SIGTERM),
        ("epoch", 2, signal.SIGINT),
    ],
)
def test_stopped_anywhere(train, straight, tmp_path, monkeypatch, where, call, number):
    """In the first and last update of an epoch and of the run, in evaluation, in a save, in a callback."""
    from mxtrain.callbacks.table import Table
    from mxtrain.parallel.layout import Layout

    targets = {
        "update": (loop, "update"),
        "evaluate": (Layout, "evaluate"),
        "save": (checkpoint, "write"),
        "epoch": (Table, "epoch"),
    }
    place, name = targets[where]
    with monkeypatch.context() as patches:
        patches.setattr(
            place, name, at_call(call, getattr(place, name), lambda: os.kill(os.getpid(), number))
        )
        code, stdout, stderr = train(
            *FLAGS, *QUIET, "--cpus", 2, "--checkpoint-updates", 1000, "--out", tmp_path / "run"
        )
    finished = (where, call) in (
        ("evaluate", 6 * EPOCHS),
        ("save", EPOCHS + 1),
    )  # it came too late to stop anything
    assert code == (0 if finished else 128 + number), stderr
    if not finished:
        assert stdout == "" and f"--resume {tmp_path / 'run'}" in stderr.splitlines()[-1]
    assert (
        signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        and signal.getsignal(signal.SIGINT) != signal.SIG_DFL
    )
    code, stdout, stderr = train("--resume", tmp_path / "run")
    assert code == 0, stderr
    assert_same_run(tmp_path / "run", straight("--cpus", "2"))
    best = [
        re.findall(r"best accuracy: .*", text)[0]
        for text in (stdout, train("--resume", straight("--cpus", "2"))[1])
    ]
    assert best[0] == best[1]


def test_stopped_and_resumed_many_times(train, straight, tmp_path, monkeypatch):
    """Many stops in a row, with all that is saved and loaded each time."""
    run, starts = tmp_path / "run", 0
    arguments = [*FLAGS, *QUIET, "--cpus", 2, "--checkpoint-updates", 1000, "--out", run]
    while True:
        starts += 1
        with monkeypatch.context() as patches:
            patches.setattr(
                loop, "update", at_call(13, loop.update, lambda: os.kill(os.getpid(), signal.SIGTERM))
            )
            code, _, stderr = train(*arguments)
        if code == 0:
            break
        assert code == 143, stderr
        arguments = ["--resume", run]
    assert starts == 1 + EPOCHS * UPDATES // 13
    assert_same_run(run, straight("--cpus", "2"))


def test_died_between_the_table_and_the_checkpoint(train, straight, tmp_path, monkeypatch):
    """The rows of that epoch are there already, and made again."""

    class Died(BaseException):
        pass

    def die():
        raise Died

    with monkeypatch.context() as patches, pytest.raises(Died):
        patches.setattr(
            checkpoint, "write", at_call(UPDATES * 2 + 4, checkpoint.write, die)
        )  # of the start, updates and epochs
        train(*FLAGS, *QUIET, "--cpus", 2, "--out", tmp_path / "run")
    assert (
        metrics(tmp_path / "run")[-1]["epoch"] == "2"
        and _newest(tmp_path / "run" / "checkpoints") == 2 * UPDATES
    )
    assert train("--resume", tmp_path / "run")[0] == 0
    assert_same_run(tmp_path / "run", straight("--cpus", "2"))


@pytest.mark.parametrize("contexts", [1, 3])
def test_resumed_exactly_on_other_contexts_in_the_middle_of_an_epoch(
    train, straight, tmp_path, monkeypatch, contexts
):
    with monkeypatch.context() as patches:
        patches.setattr(
            loop, "update", at_call(30, loop.update, lambda: os.kill(os.getpid(), signal.SIGTERM))
        )
        assert (
            train(
                *FLAGS,
                *QUIET,
                "--checkpoint-updates",
                1000,
                "--exact",
                "--shards",
                5,
                "--cpus",
                2,
                "--out",
                tmp_path / "run",
            )[0]
            == 143
        )
    assert train("--resume", tmp_path / "run", "--cpus", contexts)[0] == 0
    assert_same_run(tmp_path / "run", straight("--exact", "--shards", "5"))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("before, after", [(1, 2), (2, 1), (2, 3)])
def test_optimizer_states_on_other_contexts(train, tmp_path, optimizer, before, after):
    """D07: without --exact the first loss after it is still that of the run never stopped."""
    flags = [*MLP, "--optimizer", optimizer, "--lr", 0.01, "--schedule", "constant", "--epochs", 2]
    assert train(*flags, "--cpus", before, "--out", tmp_path / "run")[0] == 0
    assert train(*flags, "--cpus", before, "--epochs", 3, "--out", tmp_path / "straight")[0] == 0
    code, _, stderr = train("--resume", tmp_path / "run", "--epochs", 3, "--cpus", after)
    assert code == 0, stderr
    # The sums' order changes the seventh digit; six steps do not magnify that by more than ten.
    losses = [float(metrics(tmp_path / name)[4]["loss"]) for name in ("run", "straight")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_divergence_after_a_resume_is_still_an_error(train, tmp_path):
    assert train(*MLP, "--out", tmp_path / "run")[0] == 0
    code, _, stderr = train("--resume", tmp_path / "run", "--lr", 1e9, "--epochs", 3, "--cpus", 2)
    assert code == 1 and "diverged" in one_line(stderr)
