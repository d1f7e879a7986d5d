"""The laws over processes: Horovod and the parameter server give what one process gives."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import pytest

from launching import TOKEN, processes, variables_of, wait_for
from mxtrain.inference.evaluate import main as evaluate
from spread import FLAGS, HOROVOD, NETWORK, STEPS, UPDATES, alone, chain, check_chain, launch, place, run  # noqa: F401
from trainings import SCRIPT, arrays, assert_close, assert_same_bits, make_parts, metrics, rows

SLOW = pytest.mark.slow
FAULTY = """
import os
from mxnet.gluon import nn

def net(classes):
    net, off = nn.HybridSequential(), 1 + 2.0**-20 * (os.environ["MXTRAIN_RANK"] == "1")
    net.add(nn.Dense(8, activation="relu"), nn.HybridLambda(lambda F, x: x * off), nn.Dense(classes))
    return net
"""

pytestmark = pytest.mark.timeout(300)


def every_pair(kinds):
    """A closed walk that goes once from each of the kinds to each other."""
    count, walk = len(kinds), [0]
    for i in range(count):
        for j in range(i + 2, count):
            walk += [j, i]
        walk += [i + 1] * (i + 1 < count)
    return [kinds[number] for number in (*walk, *range(count - 2, -1, -1))]


KINDS = [("alone", 1, 0), ("horovodrun", 2, 0), ("horovod", 4, 0), ("ps", 2, 1), ("ps", 2, 2), ("ps", 3, 1)]
LONG = [(*kind, 1 + (number // 2 + number) % 2) for number, kind in enumerate(every_pair(KINDS))]
SHORT = [("horovodrun", 2, 0, 1), ("ps", 2, 2, 2), ("alone", 1, 0, 2), ("horovod", 3, 0, 1), ("ps", 3, 1, 1)]


def test_the_long_chain_goes_from_everywhere_to_everywhere():
    pairs = {(one[:3], other[:3]) for one, other in zip(LONG, LONG[1:])}
    assert pairs == {(one, other) for one in KINDS for other in KINDS if one != other}
    assert set(LONG) == {(*kind, contexts) for kind in KINDS for contexts in (1, 2)}


@pytest.mark.parametrize("links", [pytest.param(SHORT, id="short"),
                                   pytest.param(LONG, id="long", marks=[SLOW, pytest.mark.timeout(1800)])])
def test_every_start_goes_on_with_the_bits_of_one_process(place, alone, tmp_path, links):
    check_chain(place, alone, tmp_path / "run", links)


FLOAT = [pytest.param([("horovod", 3, 0, 2), ("dist_device_sync", 2, 1, 1), ("alone", 1, 0, 2)], id="short"),
         pytest.param([("ps", 3, 2, 2), ("horovodrun", 4, 0, 1), ("ps", 2, 1, 2), ("horovod", 2, 0, 2)], id="long",
                      marks=SLOW)]


@pytest.mark.parametrize("links", FLOAT)
def test_float_sums_are_close_after_every_start(place, alone, tmp_path, links):
    expected, out = alone("--shards", 8, *STEPS, "--epochs", 4), tmp_path / "run"
    for epochs in chain(place, out, links, "--shards", 8):
        assert_close(arrays(out), arrays(expected, f"update-{UPDATES * epochs:08d}"))


@pytest.mark.slow
@pytest.mark.parametrize("transport", [HOROVOD, "ps"])
def test_a_process_that_computes_something_else_is_found(place, tmp_path, transport):
    """Rank 1 is off in the 20th bit in front of the last layer: its shards have another gradient on rank 0."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    flags = [*FLAGS, "--data", place / "data", "--model", "faulty:net", "--exact", "--audit", 0.3]
    said = run(tmp_path, launch(transport, 2, 1, *flags, "--out", tmp_path / "run"), code=1).stderr
    assert "Traceback" not in said
    named = re.findall(r"--audit: in update (\d+), shard \d, run on rank \d, cpu\(0\) and again on rank \d, cpu\(0\), has "
                       r"two gradients, which first differ in 0.weight", said)
    assert len(named) >= 1 and len(set(named)) == 1
    assert arrays(tmp_path / "run")  # of the start


@pytest.mark.parametrize("first, second", [pytest.param("ps", "horovod", marks=HOROVOD.marks),
                                           pytest.param("horovod", "ps", marks=[*HOROVOD.marks, SLOW])])
def test_stopped_and_resumed_elsewhere(place, alone, tmp_path, first, second):
    """Stopped by a signal to the launcher, at whatever update it comes; goes on over another transport, other ranks."""
    out, flags = tmp_path / "run", ["--exact", "--audit", 0.3, *STEPS]
    command = launch(first, 2, 1, *FLAGS, *flags, "--epochs", 30, "--out", out)
    process = subprocess.Popen(list(map(str, command)), cwd=place, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (out / "metrics.csv").exists() and metrics(out) or process.poll() is not None, 100)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "stopped after update" in said and "Traceback" not in said
    epochs = len(metrics(out)) // 2 + 1
    run(place, launch(second, 3, 2, "--resume", out, "--epochs", epochs))
    expected = alone("--exact", *STEPS, "--epochs", len(SHORT))
    assert epochs <= len(SHORT), "the signal came late"
    assert_same_bits(arrays(out), arrays(expected, f"update-{UPDATES * epochs:08d}"))
    assert rows(out) == rows(expected)[:2 * epochs]


@pytest.mark.slow
@pytest.mark.parametrize("transport", [HOROVOD, "ps"])
def test_after_a_kill_it_goes_on_by_itself(place, alone, tmp_path, transport):
    """kill -9 of one of three workers; the next start does without its place, and ends with the bits of one process."""
    out, token = tmp_path / "run", f"{os.getpid()}-{transport}"
    flags = ["--exact", "--schedule", "constant", "--epochs", 20]
    ours = ["--restarts", 2, "--min-workers", 2, "--grace", 2]
    command = launch(transport, 3, 1, *FLAGS, *flags, "--out", out, ours=ours)
    process = subprocess.Popen(list(map(str, command)), cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, env={**os.environ, TOKEN: token})
    wait_for(lambda: (out / "metrics.csv").exists() and len(metrics(out)) >= 4 or process.poll() is not None, 100)
    victims = [pid for pid in processes(token) if variables_of(pid).get("MXTRAIN_RANK") == "1"
               and variables_of(pid).get("MXTRAIN_SIZE") == "3" and "train.py" in Path(f"/proc/{pid}/cmdline").read_text()
               and "guard" not in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(victims[0], signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "resumed after update" in said
    assert not processes(token)
    assert_same_bits(arrays(out), arrays(alone(*flags)))
    assert rows(out) == rows(alone(*flags))


# A process that has nothing to read, a file that only one of them cannot read, a stop that all agree on.

PICTURES = {"train": {"a": 5, "b": 5}, "val": {"a": 2, "b": 2}}
STOPPING = ["--data", "pictures", "--image-size", 8, "--augment", "none", "--batch-size", 2, "--lr", 1e-6, "--patience",
            1, "--exact", "--epochs", 9, "--on-bad-sample", "skip", "--seed", 2, "--progress"]


@pytest.fixture(scope="module")
def pictures(place):
    """Nine pictures to train on and three to validate, and one more of each that cannot be read."""
    make_parts(place / "pictures", PICTURES)
    for part, number in (("train", 4), ("val", 1)):
        file = place / "pictures" / part / "b" / f"{number}.png"
        file.write_bytes(file.read_bytes()[:60])
    return place


@pytest.mark.parametrize("transport, workers, layout", [
    pytest.param("horovodrun", 8, [], marks=HOROVOD.marks), ("ps", 2, []),
    pytest.param("horovod", 2, ["--pp", 2], marks=[*HOROVOD.marks, SLOW]),
    pytest.param("horovod", 4, ["--cpus", 2, "--pp", 4, "--zero", 2], marks=[*HOROVOD.marks, SLOW]),
    pytest.param("ps", 2, ["--cpus", 2, "--pp", 2, "--zero", 1], marks=SLOW)])
def test_a_few_pictures_some_unreadable(pictures, alone, tmp_path, capsys, monkeypatch, transport, workers, layout):
    """Batches of two on eight processes: most of them have nothing to do, and take all steps. Numbers, checkpoints and
    the early stop are those of one process, and the files are written by one."""
    out, expected = tmp_path / "run", alone(*STOPPING)
    done = run(pictures, launch(transport, workers, 1, *FLAGS, *STOPPING, *layout, "--out", out))
    assert_same_bits(arrays(out), arrays(expected))
    assert rows(out) == rows(expected)
    assert [(row["samples"], row["skipped"]) for row in rows(out)] == [("9", "1"), ("3", "1")] * 2  # of nine epochs
    assert [path.name for path in sorted(out.iterdir())] == [path.name for path in sorted(expected.iterdir())]
    assert sorted(os.listdir(out / "checkpoints")) == sorted(os.listdir(expected / "checkpoints"))
    log = (out / "log.txt").read_text()
    for part, name in (("train", "4.png"), ("val", "1.png")):
        assert f"left out: image {Path('pictures', part, 'b', name)}" in log  # whoever read it
    for once in ("run folder: ", "epoch 1/9", "has not improved for 1 epochs"):
        assert log.count(once) == done.stderr.count(once) == 1
    monkeypatch.chdir(pictures)
    capsys.readouterr()
    evaluate(["--run", str(out), "--json"])
    best = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert best["accuracy"] == float(rows(out)[1]["accuracy"])
    assert best["loss"] == pytest.approx(float(rows(out)[1]["loss"]), rel=1e-6)


@pytest.mark.parametrize("transport", [HOROVOD, pytest.param("ps", marks=SLOW)])
def test_a_picture_that_one_process_cannot_read_stops_all(pictures, tmp_path, transport):
    out = tmp_path / "run"
    flags = [*FLAGS, *STOPPING, "--on-bad-sample", "stop", "--out", out]
    said = run(pictures, launch(transport, 2, 1, *flags), code=2).stderr
    assert "Traceback" not in said and "pictures/train/b/4.png" in said.splitlines()[-1]
    assert arrays(out)


# What only rank 0 sees, and what belongs to the run.

SOMEWHERE_ELSE = """
import os, sys
if os.environ["MXTRAIN_RANK"] != "0" and "--resume" in sys.argv:
    os.chdir("/")  # where a relative path to the run leads nowhere
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.parametrize("transport, twice", [("ps", False),
                                              pytest.param("horovod", True, marks=[*HOROVOD.marks, SLOW])])
def test_only_rank_0_sees_the_run(place, tmp_path, monkeypatch, transport, twice):
    """Starting weights with another head and two threads per context; then a resume where one process finds no run.
    MXNet takes its threads before the processes meet: that process can only say what it lacks."""
    (tmp_path / "elsewhere.py").write_text(SOMEWHERE_ELSE)
    (tmp_path / "network.py").write_text(NETWORK)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # four threads that wait for each other on what may be two cores
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    scope = {}
    exec(NETWORK, scope)
    net = scope["net"](5)
    net.initialize()
    net(mx.nd.zeros((1, 1, 8, 8)))
    net.save_parameters(str(tmp_path / "start.params"))

    def start(*flags, code=0):
        command = launch(transport, 2, 1, *flags)
        command.insert(command.index("--") + 2, tmp_path / "elsewhere.py")
        return run(tmp_path, command, code).stderr

    start(*FLAGS, "--data", place / "data", "--threads", 2, "--init-from", "start.params", "--epochs", 1,
          "--out", "run")
    assert "threads per context 2" in (tmp_path / "run" / "log.txt").read_text()
    assert "set OMP_NUM_THREADS=2" in start("--resume", "run", "--epochs", 2, code=2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    start("--resume", "run", "--epochs", 2)
    assert len(rows(tmp_path / "run")) == 4
    if twice:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        start("--resume", tmp_path / "copy", "--epochs", 2)  # where all see how many threads it has
        assert_same_bits(arrays(tmp_path / "run"), arrays(tmp_path / "copy"))
        assert rows(tmp_path / "run") == rows(tmp_path / "copy")


# mxtrain.fit

OWN_SCRIPT = """
import os
import mxtrain
import mxnet as mx
import numpy as np
from mxnet.gluon import data, nn

rank = int(os.environ["MXTRAIN_RANK"])
x, y = np.random.RandomState(0).rand(41, 3).astype("float32"), (np.arange(41) % 2).astype("int32")
kvstore = "dist_sync" if "DMLC_ROLE" in os.environ else "auto"

class Later:
    # batches whose labels differ in the second epoch
    epoch = 0
    def __len__(self):
        return 2
    def __iter__(self):
        for start in (0, 20):
            yield x[start:start + 20], (y[start:start + 20] + (start and self.epoch and rank)) % 2
        self.epoch += 1

def fit(name, samples, **settings):
    mx.random.seed(rank)
    net = nn.HybridSequential()  # which finds out its shapes later
    net.add(nn.Dense(4, activation="relu"), nn.BatchNorm(), nn.Dense(2))
    net.initialize()
    try:
        result = mxtrain.fit(net, samples, kvstore=kvstore, lr=0.1, epochs=3, **settings)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        weights = [parameter.data().asnumpy().tobytes().hex() for parameter in net.collect_params().values()]
        said = f"{result.rows[-1]['samples']} {result.rows[-1]['loss']} {' '.join(weights)}"
    print(name, rank, said, sep="|", flush=True)

fit("arrays", data.ArrayDataset(x, y), batch_size=8)
fit("shuffled", data.DataLoader(data.ArrayDataset(x, y), 8, shuffle=True))
fit("others", data.ArrayDataset(x + rank, y), batch_size=8)
fit("later", Later())
fit("rates", data.ArrayDataset(x, y), batch_size=8, momentum=0.1 * rank)
fit("again", data.ArrayDataset(x, y), batch_size=8)
"""
PATIENT = """
from mxtrain import cli
from mxtrain.launch import group
from mxtrain.launch.main import main

def kill(self, processes):
    print("killed", *(process.task.name for process in processes), flush=True)
    ended(self, processes)

ended, group.Group._kill, group._SERVICE_SECONDS = group.Group._kill, kill, 60
cli.run("launch.py", main)
"""


@pytest.mark.parametrize("transport", ["ps", pytest.param("horovod", marks=[*HOROVOD.marks, SLOW])])
def test_a_script_of_ones_own(tmp_path, transport):
    """Several trainings, some of which cannot be; at its end servers end by themselves."""
    (tmp_path / "own.py").write_text(OWN_SCRIPT)
    (tmp_path / "patient.py").write_text(PATIENT)
    command = launch(transport, 2, 2)
    until = command.index("--")
    done = run(tmp_path, [sys.executable, tmp_path / "patient.py", *command[2:until], "--", sys.executable, "own.py"])
    said = {}
    for name, rank, text in re.findall(r"(\w+)\|(\d)\|(.*)", done.stdout):
        said.setdefault(name, {})[int(rank)] = text
    for name in ("arrays", "shuffled", "again"):
        assert said[name][0] == said[name][1] and said[name][0].startswith("41 "), said[name]
    assert said["again"] == said["arrays"]
    for name, words in (("others", "begin with other samples for rank 1"),
                        ("later", "had other labels in epoch 2 for rank 1"),
                        ("rates", "--momentum 0.1: for rank 1, and 0.0 for rank 0")):
        assert words in said[name][1], said[name]
        assert said[name][0].startswith("Elsewhere")
    assert [line for line in done.stdout.splitlines() if line.startswith("killed")] == ["killed"], done.stdout


@pytest.mark.parametrize("transport", [pytest.param("horovod", marks=[*HOROVOD.marks, SLOW]), "ps"])
def test_a_mistake_ends_all(place, tmp_path, transport):
    said = run(place, launch(transport, 2, 1, "--data", tmp_path / "nothing"), code=2).stderr
    assert said.count("does not exist") == 2 and "Traceback" not in said  # by rank 0, and last by the launcher


def test_no_scheduler_is_said(place, monkeypatch):
    for name, value in (("ROLE", "worker"), ("PS_ROOT_URI", "no.such.host.invalid"), ("PS_ROOT_PORT", "9"),
                        ("NUM_WORKER", "1"), ("NUM_SERVER", "1")):
        monkeypatch.setenv(f"DMLC_{name}", value)
    said = run(place, [sys.executable, SCRIPT, "--kvstore", "dist_sync"], code=2).stderr
    assert "no scheduler answers at no.such.host.invalid:9" in said and "Traceback" not in said
