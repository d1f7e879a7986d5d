"""Horovod under the launcher: sums, and the end of all when a worker has gone."""

import importlib.util
import sys

import pytest
from mxtrain.errors import UserError
from mxtrain.launch import horovod

installed = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

WORKER = """
import os, sys, time
import mxtrain, mxnet as mx, horovod.mxnet as hvd

hvd.init()
rank = int(os.environ["MXTRAIN_RANK"])
print("ready", flush=True)

def add(number):
    return hvd.allreduce(mx.nd.full((2, 3), number), average=False, name="sum").asnumpy().tolist()
"""


def test_without_horovod_it_is_refused(monkeypatch, launch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="Horovod is not installed; make setup HOROVOD=1"):
        horovod.check_installed()


@pytest.fixture
def run(launched):
    def start(*flags, code):
        return launched("--transport", "horovod", *flags, command=[sys.executable, "-c", WORKER + code], stubs=False)

    return start


@installed
def test_workers_sum_with_the_launchers_numbers(run):
    code = "print(rank == hvd.rank(), hvd.local_rank(), hvd.size(), hvd.cross_size(), add(1.0 + rank))"
    process = run("-n", 3, code=code)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    assert sorted(line for line in out.splitlines() if "ready" not in line) == [
        f"[worker {n}] True {n} 3 1 {[[6.0] * 3] * 2}" for n in range(3)]


@installed
def test_a_killed_worker_ends_all_and_a_restart_goes_on(run):
    process = run("-n", 2, "--grace", 5, "--restarts", 1, "--min-workers", 1, code="""
if os.environ["MXTRAIN_RESTART"] == "1":
    print("again with", hvd.size(), add(1.0)[0][0])
    sys.exit(0)
for i in range(10): add(1.0)
if rank == 1: os.kill(os.getpid(), 9)
while True: add(1.0)
""")
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0 and "again with 1 1.0" in out
    assert "worker 1 on localhost ended with exit code 137 (SIGKILL); restart 1 of 1" in err


@installed
def test_the_port_of_the_rendezvous(run):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        process = run("-n", 1, "--port", port, code="")
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and f"--port {port}: is in use" in err
