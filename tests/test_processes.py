"""The laws over processes: Horovod and the parameter server give what one process gives."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from launching import TOKEN, processes, variables_of, wait_for
from trainings import SCRIPT, arrays, assert_close, assert_same_bits, idx_folder, metrics

LAUNCH = SCRIPT.with_name("launch.py")
MEASURED = {"seconds", "samples_per_second", "wait_share"}
HOROVOD = pytest.param("horovod", marks=pytest.mark.skipif(importlib.util.find_spec("horovod") is None,
                                                           reason="Horovod is not installed (make setup HOROVOD=1)"))
NETWORK = """
from mxnet.gluon import nn

def net(classes):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, use_bias=False), nn.BatchNorm(), nn.Activation("relu"), nn.Dropout(0.3), nn.Flatten(),
            nn.Dense(8, activation="relu"), nn.Dropout(0.2), nn.Dense(classes))
    return net
"""
FAULTY = """
import os
from mxnet.gluon import nn

def net(classes):
    net, off = nn.HybridSequential(), 1 + 2.0**-20 * (os.environ["MXTRAIN_RANK"] == "1")
    net.add(nn.Dense(8, activation="relu"), nn.HybridLambda(lambda F, x: x * off), nn.Dense(classes))
    return net
"""

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """97 samples to train on, 23 to validate, a network that draws and counts; and what one process makes of them."""
    place = tmp_path_factory.mktemp("processes")
    idx_folder(place / "data", 97, 23, side=8)
    (place / "network.py").write_text(NETWORK)
    for name, flags in (("exact", ["--exact"]), ("float", ["--shards", "6"])):
        run(place, [sys.executable, str(SCRIPT), *flags_of(place, name), *flags])
    return place


def flags_of(place, out):
    return ["--data", place / "data", "--model", "network:net", "--batch-size", 10, "--epochs", 3, "--lr", 0.05, "--clip-norm",
            1.0, "--momentum", 0.9, "--no-plots", "--no-tensorboard", "--no-progress", "--out", place / out]


def launch(place, transport, workers, servers, *flags, ours=()):
    """ours: flags of launch.py."""
    kvstore = [] if transport == "horovod" else ["--kvstore", "dist_sync"]
    servers = [] if transport == "horovod" else ["-s", servers]
    return [sys.executable, LAUNCH, "--transport", transport, "-n", workers, *servers, *ours, "--", sys.executable, SCRIPT, *flags,
            *kvstore]


def run(place, command, code=0):
    done = subprocess.run(list(map(str, command)), cwd=place, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == code, done.stderr
    return done


def rows(run):
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in metrics(run)]


LAYOUTS = [pytest.param("horovod", 2, 0, 1, marks=HOROVOD.marks), pytest.param("horovod", 3, 0, 2, marks=HOROVOD.marks),
           ("ps", 2, 1, 1), ("ps", 2, 2, 2), ("ps", 3, 1, 1)]


@pytest.mark.parametrize("transport, workers, servers, contexts", LAYOUTS)
def test_the_bits_of_one_process(place, tmp_path, transport, workers, servers, contexts):
    # (And an audit finds nothing to say, and changes nothing.)
    flags = [*flags_of(place, "none"), "--exact", "--cpus", contexts, "--audit", 0.3, "--out", tmp_path / "run"]
    done = run(place, launch(place, transport, workers, servers, *flags))
    assert_same_bits(arrays(tmp_path / "run"), arrays(place / "exact"))
    assert rows(tmp_path / "run") == rows(place / "exact")
    assert done.stderr.count("all 3 epochs are done") == 1  # rank 0 speaks for all


@pytest.mark.parametrize("transport, workers, servers, contexts", [LAYOUTS[1], ("ps", 3, 2, 2)])
def test_float_sums_are_close(place, tmp_path, transport, workers, servers, contexts):
    flags = [*flags_of(place, "none"), "--shards", 6, "--cpus", contexts, "--out", tmp_path / "run"]
    run(place, launch(place, transport, workers, servers, *flags))
    assert_close(arrays(tmp_path / "run"), arrays(place / "float"))


@HOROVOD.marks[0]
@pytest.mark.parametrize("contexts", [1, 2])
def test_half_of_the_bytes(place, tmp_path, contexts):
    """float16 rounds what each of two processes sends, and the sum, to 11 bits: a gradient is off by up to 2**-10 of the
    larger of the two, and a weight, which is their sum over 30 updates, by not much more than that. 2e-3 of a tensor's
    largest value is twice 2**-10, and far below what a lost or doubled gradient makes; float32 sums stay within 1e-5."""
    flags = [*flags_of(place, "none"), "--shards", 6, "--cpus", contexts, "--compression", "fp16", "--out", tmp_path / "run"]
    run(place, launch(place, "horovod", 2, 0, *flags))
    halved, whole = arrays(tmp_path / "run"), arrays(place / "float")
    off = [np.abs(halved[name] - whole[name]).max() / np.abs(whole[name]).max() for name in whole]
    assert 1e-5 < max(off) < 2e-3


@pytest.mark.parametrize("transport", [HOROVOD, "ps"])
def test_a_process_that_computes_something_else_is_found(place, tmp_path, transport):
    """Rank 1 is off in the 20th bit in front of the last layer: its shards have another gradient on rank 0."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    flags = [*flags_of(place, "none"), "--model", "faulty:net", "--exact", "--audit", 0.3, "--out", tmp_path / "run"]
    said = run(tmp_path, launch(place, transport, 2, 1, *flags), code=1).stderr
    assert "Traceback" not in said
    named = re.findall(r"--audit: in update (\d+), shard \d, run on rank \d, cpu\(0\) and again on rank \d, cpu\(0\), has "
                       r"two gradients, which first differ in 0.weight", said)
    assert len(named) >= 1 and len(set(named)) == 1
    assert arrays(tmp_path / "run")  # of the start


@pytest.mark.parametrize("first, second", [pytest.param("ps", "horovod", marks=HOROVOD.marks), ("ps", "alone"),
                                           pytest.param("horovod", "ps", marks=HOROVOD.marks)])
def test_stopped_and_resumed_elsewhere(place, tmp_path, first, second):
    """Stopped by a signal to the launcher, at whatever update it comes; goes on over another transport, other ranks."""
    out = tmp_path / "run"
    command = launch(place, first, 2, 1, *flags_of(place, "none"), "--exact", "--epochs", 25, "--schedule", "constant",
                     "--out", out)
    process = subprocess.Popen(list(map(str, command)), cwd=place, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while len(metrics(out) if (out / "metrics.csv").exists() else []) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "stopped after update" in said and "Traceback" not in said
    again = ["--resume", out, "--epochs", "26"]
    run(place, [sys.executable, SCRIPT, *again] if second == "alone" else launch(place, second, 3, 2, *again))
    alone = run(place, [sys.executable, SCRIPT, *flags_of(place, "none"), "--exact", "--epochs", 26, "--schedule", "constant",
                        "--out", tmp_path / "alone"])
    assert alone.returncode == 0
    assert_same_bits(arrays(out), arrays(tmp_path / "alone"))
    assert rows(out) == rows(tmp_path / "alone")


@pytest.mark.parametrize("transport", [HOROVOD, "ps"])
def test_after_a_kill_it_goes_on_by_itself(place, tmp_path, transport):
    """kill -9 of one of three workers; the next start does without its place, and ends with the bits of one process."""
    out, token = tmp_path / "run", f"{os.getpid()}-{transport}"
    flags = [*flags_of(place, "none"), "--exact", "--epochs", 40, "--schedule", "constant", "--out"]
    command = launch(place, transport, 3, 1, *flags, out, ours=["--restarts", 2, "--min-workers", 2, "--grace", 2])
    process = subprocess.Popen(list(map(str, command)), cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, TOKEN: token})
    wait_for(lambda: (out / "metrics.csv").exists() and len(metrics(out)) >= 4 or process.poll() is not None, 100)
    victims = [pid for pid in processes(token) if variables_of(pid).get("MXTRAIN_RANK") == "1"
               and variables_of(pid).get("MXTRAIN_SIZE") == "3" and "train.py" in Path(f"/proc/{pid}/cmdline").read_text()
               and "guard" not in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(victims[0], signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "resumed after update" in said
    assert not processes(token)
    run(place, [sys.executable, SCRIPT, *flags, tmp_path / "alone"])
    assert_same_bits(arrays(out), arrays(tmp_path / "alone"))
    assert rows(out) == rows(tmp_path / "alone")


@pytest.mark.parametrize("transport", [HOROVOD, "ps"])
def test_more_processes_than_samples_of_a_batch(place, tmp_path, transport):
    """A batch of two on three processes: one of them has nothing to do, in any step, and takes them all."""
    flags = [*flags_of(place, "none"), "--batch-size", 2, "--epochs", 1, "--shards", 3, "--out"]
    run(place, launch(place, transport, 3, 1, *flags, tmp_path / "run"))
    run(place, [sys.executable, SCRIPT, *flags, tmp_path / "alone"])
    assert_close(arrays(tmp_path / "run"), arrays(tmp_path / "alone"))
    assert [row["samples"] for row in metrics(tmp_path / "run")] == ["97", "23"]


@pytest.mark.parametrize("transport", [HOROVOD, "ps"])
def test_a_mistake_ends_all(place, tmp_path, transport):
    said = run(place, launch(place, transport, 2, 1, "--data", tmp_path / "nothing"), code=2).stderr
    assert said.count("does not exist") == 2 and "Traceback" not in said  # by rank 0, and last by the launcher


def test_no_scheduler_is_said(place, monkeypatch):
    for name, value in (("ROLE", "worker"), ("PS_ROOT_URI", "no.such.host.invalid"), ("PS_ROOT_PORT", "9"), ("NUM_WORKER", "1"),
                        ("NUM_SERVER", "1")):
        monkeypatch.setenv(f"DMLC_{name}", value)
    said = run(place, [sys.executable, SCRIPT, "--kvstore", "dist_sync"], code=2).stderr
    assert "no scheduler answers at no.such.host.invalid:9" in said and "Traceback" not in said
