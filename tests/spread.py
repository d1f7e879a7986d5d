"""Trainings of a small network by scripts/train.py, alone and over processes, for tests."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from trainings import SCRIPT, arrays, assert_same_bits, idx_folder, rows

LAUNCH = SCRIPT.with_name("launch.py")
NO_HOROVOD = importlib.util.find_spec("horovod") is None
HOROVOD = pytest.param("horovod", marks=pytest.mark.skipif(NO_HOROVOD,
                                                           reason="Horovod is not installed (make setup HOROVOD=1)"))
SLOW = pytest.mark.slow
NETWORK = """
from mxnet.gluon import nn

def net(classes):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, use_bias=False), nn.BatchNorm(), nn.Activation("relu"), nn.Dropout(0.3), nn.Flatten(),
            nn.Dense(8, activation="relu"), nn.Dropout(0.2), nn.Dense(classes))
    return net
"""
UPDATES = 10  # of an epoch
FLAGS = ["--data", "data", "--model", "network:net", "--batch-size", 10, "--lr", 0.05, "--momentum", 0.9, "--clip-norm",
         1.0, "--no-plots", "--no-tensorboard", "--no-progress"]
STEPS = ["--schedule", "step", "--decay-epochs", 1.5, 3.2, 7, "--decay-factor", 0.5, "--warmup-epochs", 0.5,
         "--checkpoint-updates", UPDATES // 2, "--keep", 99]
"""A rate that does not depend on the number of epochs, and checkpoints within them."""


def launch(transport, workers, servers, *flags, ours=()):
    """The command; transport: horovod or ps by launch.py, dist_device_sync, horovodrun, or alone for a single process.
    ours: flags of launch.py."""
    train = [sys.executable, SCRIPT, *flags]
    if transport == "alone":
        return train
    if transport == "horovodrun":
        return [Path(sys.executable).with_name("horovodrun"), "-np", workers, "--gloo", "--start-timeout", 120,
                *train]
    if transport == "horovod":
        return [sys.executable, LAUNCH, "--transport", "horovod", "-n", workers, *ours, "--", *train]
    return [sys.executable, LAUNCH, "-n", workers, "-s", servers, *ours, "--", *train, "--kvstore",
            "dist_sync" if transport == "ps" else transport]


def run(place, command, code=0):
    done = subprocess.run(list(map(str, command)), cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done


def chain(place, out, links, *flags):
    """One run by many starts: each goes on from a checkpoint in the middle of the epoch before, and trains one epoch
    more than that had. Yields the number of epochs that are done.

    links: (transport, workers, servers, contexts, flags of this start...)"""
    done = 0
    for transport, workers, servers, contexts, *own in links:
        if NO_HOROVOD and "horovod" in transport:
            continue
        middle = out / "checkpoints" / f"update-{UPDATES * done - UPDATES // 2:08d}"
        how = ["--resume", middle] if done else [*FLAGS, *STEPS, *flags, "--out", out]
        done += 1
        run(place, launch(transport, workers, servers, *how, "--epochs", done, "--cpus", contexts, *own))
        yield done


def check_chain(place, alone, out, links):
    """Every link, with --exact, is a check of the layout law and of the resume law: all has the bits of one process."""
    expected = alone("--exact", *STEPS, "--epochs", len(links))
    for epochs in chain(place, out, links, "--exact"):
        assert_same_bits(arrays(out), arrays(expected, f"update-{UPDATES * epochs:08d}"))
        assert rows(out) == rows(expected)[:2 * epochs]


def prepare(place):
    """97 samples to train on, 23 to validate, and a network that draws and counts; for what runs in the folder."""
    idx_folder(place / "data", 97, 23, side=8)
    (place / "network.py").write_text(NETWORK)
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """What `prepare` makes; for tests that import it, and `alone`."""
    return prepare(tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="module")
def alone(place):
    """What gives the run folder of one process on one context for some flags, each made once."""
    folders = {}

    def get(*flags):
        if flags not in folders:
            folders[flags] = place / f"alone-{len(folders)}"
            run(place, [sys.executable, SCRIPT, *FLAGS, *flags, "--out", folders[flags]])
        return folders[flags]

    return get
