"""Training over processes that do not wait for each other: --kvstore dist_async, on MXNet's own servers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launching import SCRIPT as LAUNCH
from launching import TOKEN, processes, variables_of, wait_for
from spread import run
from trainings import QUIET, SCRIPT, arrays, assert_close, idx_folder, metrics

pytestmark = pytest.mark.timeout(300)

# Batch normalization of five samples at a time is noisy: it has a small part here, so that a short training shows.
NETWORK = """
from mxnet.gluon import HybridBlock, nn

class Network(HybridBlock):
    def __init__(self, classes):
        super().__init__()
        self.main, self.side = nn.HybridSequential(), nn.HybridSequential()
        self.main.add(nn.Flatten(), nn.Dense(8, activation="relu"), nn.Dense(classes))
        self.side.add(nn.Conv2D(classes, 3, use_bias=False), nn.BatchNorm(), nn.GlobalMaxPool2D(), nn.Flatten())

    def hybrid_forward(self, F, x):
        return self.main(x) + 0.1 * self.side(x)

def net(classes):
    return Network(classes)
"""
FLAGS = ["--data", "data", "--model", "network:net", "--batch-size", 10, *QUIET]

# What MXNet's servers have to be: they take one push at a time and show it whole, keep float64, and any size.
EXCHANGE = """
import random, time
from collections import deque
import mxtrain
import mxnet as mx
import numpy as np
from mxtrain.parallel.communicator import connect
from mxtrain.parallel.world import world

c = connect(world("dist_async"), [mx.cpu(0)])
rank, size = c.rank, c.size
draw = random.Random(rank).random
for number in range(300):
    time.sleep(0.003 * draw() * (number % 50 == 0))
    count = [1, 9, 50_000][number % 3]
    total = c.total(np.full(count, 2.0**-40 + number + 1000 * rank))
    assert (total == size * (2.0**-40 + number) + 1000 * sum(range(size))).all(), (number, total)
large = np.arange(2_500_000) * (rank + 1.0)
assert (c.total(large) == np.arange(2_500_000) * 6.0).all()
array = mx.nd.array([[0.0, -0.0, rank + 1.1]])
c.broadcast([array])
assert array.asnumpy().tobytes() == np.array([[0.0, -0.0, 1.1]], "float32").tobytes()
assert c.share({"a": "é" if rank == 0 else 1}) == {"a": "é"}
c.ahead = 3
told = deque()
for number in range(300):
    told.append(c.tell(np.full(9, number + 0.5 * rank)))
    time.sleep(0.002 * draw() * (number // 40 % size == rank))
    if len(told) > c.ahead:
        assert (told.popleft()() == size * (number - c.ahead) + 1.5).all()
while told:
    told.popleft()()
c.barrier()

from mxnet import gluon
random.seed(rank)
x = np.random.RandomState(0).normal(size=(50, 4)).astype("float32")
data = gluon.data.ArrayDataset(x, (x[:, 0] > 0).astype("float32"))
for units in (2, 3):  # another training, by the same processes and servers
    net = gluon.nn.Dense(units)
    done = mxtrain.fit(net, data, data, kvstore="dist_async", batch_size=10, epochs=4, lr=0.1)
    assert [row["samples"] for row in done.rows] == [50] * 8 and done.rows[-1]["accuracy"] > 0.8
    weight = net.weight.data().asnumpy().astype("float64")
    assert (c.total(weight) == size * weight).all()
if rank == 0:
    print("all sums are right")
c.close()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("asynchronous")
    idx_folder(place / "data", 97, 23, side=8)
    (place / "network.py").write_text(NETWORK)
    return place


def launch(workers, servers, program, *flags, ours=()):
    words = [sys.executable, LAUNCH, "-n", workers, "-s", servers, *ours, "--", sys.executable, program, *flags]
    return [str(word) for word in words]


def begin(place, command, out, rows, **variables):
    """Starts a training, and waits until it has so many rows in its table."""
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1", **variables})
    wait_for(lambda: process.poll() is not None or (out / "metrics.csv").exists() and len(metrics(out)) >= rows, 100)
    assert process.poll() is None, process.stderr.read()
    return process


def test_sums_on_servers_that_know_none(place, tmp_path):
    (tmp_path / "exchange.py").write_text(EXCHANGE)
    said = run(place, launch(3, 2, tmp_path / "exchange.py"))
    assert "all sums are right" in said.stdout


def test_one_worker_ends_with_the_weights_of_no_server(place, tmp_path):
    """Momentum, decay, clipping and schedule, on two contexts: law 1's bound for sums of float32."""
    flags = [*FLAGS, "--epochs", 3, "--cpus", 2, "--lr", 0.05, "--clip-norm", 0.5, "--weight-decay", 0.01,
             "--warmup-epochs", 1, "--shards", 4, "--out"]
    run(place, launch(1, 2, SCRIPT, *flags, tmp_path / "run", "--kvstore", "dist_async", "--staleness", 0))
    run(place, [sys.executable, SCRIPT, *flags, tmp_path / "alone"])
    weights = {name: array for name, array in arrays(tmp_path / "alone").items() if name.startswith("weights/")}
    assert_close(arrays(tmp_path / "run"), weights)


def test_it_learns_stops_and_goes_on(place, tmp_path):
    out = tmp_path / "run"
    flags = [*FLAGS, "--epochs", 400, "--lr", 0.01, "--schedule", "constant", "--warmup-epochs", 1, "--out", out,
             "--kvstore", "dist_async"]
    process = begin(place, launch(2, 2, SCRIPT, *flags), out, 12)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "lack up to 10 updates of other processes" in said and said.count("stopped after update") == 1
    assert "Traceback" not in said

    epochs = int(metrics(out)[-1]["epoch"]) + 1
    again = ["--resume", out, "--epochs", epochs, "--kvstore", "dist_async", "--staleness", 1]
    said = run(place, launch(2, 1, SCRIPT, *again)).stderr
    assert said.count("they begin anew") == 1 and "resumed after update" in said
    rows = metrics(out)
    assert [(row["epoch"], row["split"], row["samples"]) for row in rows] == [
        (str(epoch), *part) for epoch in range(1, epochs + 1) for part in (("train", "97"), ("val", "23"))]
    assert float(rows[-1]["loss"]) < 0.3 < 0.5 < float(rows[0]["loss"])
    done = run(place, [sys.executable, SCRIPT.with_name("evaluate.py"), "--run", out, "--checkpoint", "latest",
                       "--data", "data", "--json"])
    alone = json.loads(done.stdout.splitlines()[-1])
    assert alone["accuracy"] == float(rows[-1]["accuracy"])
    assert abs(alone["loss"] - float(rows[-1]["loss"])) < 1e-6


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.slow
def test_after_a_kill_it_goes_on_by_itself(place, tmp_path):
    out, token = tmp_path / "run", f"{os.getpid()}-async"
    flags = [*FLAGS, "--epochs", 60, "--lr", 0.01, "--out", out, "--kvstore", "dist_async"]
    process = begin(place, launch(2, 1, SCRIPT, *flags, ours=["--restarts", 1, "--grace", 2]), out, 4, **{TOKEN: token})
    victim = next(pid for pid in processes(token) if variables_of(pid).get("MXTRAIN_RANK") == "1"
                  and "train.py" in command_of(pid) and "guard" not in command_of(pid))
    os.kill(victim, signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "resumed after update" in said and len(metrics(out)) == 120
    assert not processes(token)
