"""The laws over processes: Horovod and the parameter server give what one process gives."""

import importlib.util
import os
import re
import shutil
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
EMULATED = """
import sys
from mxtrain.parallel.communicator import InProcess
from mxtrain.parallel.compression import TwoBits
from mxtrain.train.main import main

processes = []

def allreduce(self, arrays):
    gradients, (statistics,) = arrays[:-1], arrays[-1:]
    of_both = list(zip(*gradients))
    if not processes:
        processes.extend(TwoBits(dict(enumerate(own)), 2, 0.5) for own in of_both)
    packed = [compression.pack(own) for compression, own in zip(processes, of_both)]
    sums = [one + other.as_in_context(one.context) for one, other in zip(*packed)]
    for compression, own in zip(processes, of_both):
        compression.unpack([total.as_in_context(own[0].context) for total in sums], own)
    total = statistics[0] + statistics[1].as_in_context(statistics[0].context)
    for copy in statistics:
        total.copyto(copy)

InProcess.allreduce = allreduce
sys.exit(main(sys.argv[1:]))
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


@pytest.mark.parametrize("transport, contexts", [pytest.param("horovod", 2, marks=HOROVOD.marks), ("ps", 1)])
def test_half_of_the_bytes(place, tmp_path, transport, contexts):
    """float16 rounds what each of two processes sends, and the sum, to 11 bits: a gradient is off by up to 2**-10 of the
    larger of the two, and a weight, which is their sum over 30 updates, by not much more than that. 2e-3 of a tensor's
    largest value is twice 2**-10, and far below what a lost or doubled gradient makes; float32 sums stay within 1e-5."""
    flags = [*flags_of(place, "none"), "--shards", 6, "--cpus", contexts, "--compression", "fp16", "--out", tmp_path / "run"]
    run(place, launch(place, transport, 2, 1, *flags))
    halved, whole = arrays(tmp_path / "run"), arrays(place / "float")
    off = [np.abs(halved[name] - whole[name]).max() / np.abs(whole[name]).max() for name in whole]
    assert 1e-5 < max(off) < 2e-3


TWO_BITS = ["--shards", 6, "--compression", "2bit", "--checkpoint-updates", 7, "--keep", 9]


@pytest.fixture(scope="module")
def two_bits(place):
    """Runs of two processes, by transport."""
    for transport in ("ps", *(["horovod"] if importlib.util.find_spec("horovod") else [])):
        run(place, launch(place, transport, 2, 2, *flags_of(place, transport), *TWO_BITS))
    return place


def go_on(two_bits, tmp_path, transport, command):
    """Goes on from the 14th of 30 updates of a copy of a run -> (arrays at the end, what was said)."""
    shutil.copytree(two_bits / transport, tmp_path / "run")
    said = run(two_bits, [*command, "--resume", tmp_path / "run" / "checkpoints" / "update-00000014"]).stderr
    return arrays(tmp_path / "run"), said


def residuals_in(arrays):
    return {name: array for name, array in arrays.items() if name.startswith("residual/")}


def test_two_bits_are_those_of_one_process(two_bits):
    """Two contexts play the two processes, each with a residual of its own."""
    (two_bits / "emulated.py").write_text(EMULATED)
    run(two_bits, [sys.executable, "emulated.py", *flags_of(two_bits, "emulated"), "--shards", 6, "--cpus", 2])
    of_two, of_one = arrays(two_bits / "ps"), arrays(two_bits / "emulated")
    residuals = residuals_in(of_two)
    assert_same_bits({name: array for name, array in of_two.items() if name not in residuals}, of_one)
    assert rows(two_bits / "ps") == rows(two_bits / "emulated")
    trained = [name.split("/")[1] for name in of_one if name.startswith("optimizer/")]
    assert set(residuals) == {f"residual/{rank}/{name}" for rank in range(2) for name in trained}
    assert all(array.any() for array in residuals.values())


@HOROVOD.marks[0]
def test_two_bits_have_the_same_sum_over_both_transports(two_bits):
    assert_same_bits(arrays(two_bits / "horovod"), arrays(two_bits / "ps"))
    assert rows(two_bits / "horovod") == rows(two_bits / "ps")


@pytest.mark.parametrize("transport", [HOROVOD, "ps"])
def test_two_bits_stopped_and_resumed(two_bits, tmp_path, transport):
    ended, said = go_on(two_bits, tmp_path, transport, launch(two_bits, transport, 2, 1))
    assert_same_bits(ended, arrays(two_bits / transport))
    assert rows(tmp_path / "run") == rows(two_bits / transport) and "residual" not in said


def test_two_bits_of_two_contexts(two_bits, tmp_path):
    """The contexts' sum is rounded elsewhere: where it comes to lie on the other side of the threshold, a weight moves
    an update earlier or later, and is off by the rate times the threshold over the batch, 0.0025, for a while."""
    flags = [*flags_of(two_bits, "none"), *TWO_BITS, "--cpus", 2, "--out", tmp_path / "run"]
    run(two_bits, launch(two_bits, "ps", 2, 1, *flags))
    one, two = arrays(two_bits / "ps"), arrays(tmp_path / "run")
    assert one.keys() == two.keys()
    off = np.concatenate([np.abs(one[name] - two[name]).ravel() for name in one if name.startswith("weights/")])
    assert np.mean(off > 1e-5) < 0.05 and off.max() < 0.05


def test_two_bits_resumed_by_three_processes(two_bits, tmp_path):
    ended, said = go_on(two_bits, tmp_path, "ps", launch(two_bits, "ps", 3, 1))
    assert said.count("the residuals of --compression 2bit in 2 processes are added up in rank 0 of 3") == 1
    assert {name.split("/")[1] for name in residuals_in(ended)} == {"0", "1", "2"}


def test_two_bits_resumed_without(two_bits, tmp_path):
    said = run(two_bits, [sys.executable, SCRIPT, "--resume", two_bits / "ps", "--epochs", 4], code=2).stderr
    assert "--compression 2bit: is for what processes send each other" in said and "Traceback" not in said
    ended, said = go_on(two_bits, tmp_path, "ps", [sys.executable, SCRIPT, "--compression", "none"])
    assert said.count("the residuals of --compression 2bit, what was not sent yet of the gradients, are dropped") == 1
    assert "from update 15 on: compression none (was 2bit)" in said
    assert not residuals_in(ended)


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
