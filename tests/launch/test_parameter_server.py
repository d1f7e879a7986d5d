"""MXNet's own parameter server under the launcher: sums over the workers, and the end of all when one has gone."""

import os
import signal
import sys
import time

import pytest
from launching import processes, variables_of, wait_for

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

WORKER = """
import os, sys, time
import mxtrain, mxnet as mx
from mxtrain.launch.worker import leave

rank = int(os.environ["MXTRAIN_RANK"])
kv = mx.kv.create("dist_sync")
kv.init("sum", mx.nd.zeros((2, 3)))
print("ready", flush=True)

def add(number):
    given, total = mx.nd.full((2, 3), number), mx.nd.zeros((2, 3))
    kv.push("sum", given)
    kv.pull("sum", out=total)
    return total.asnumpy().tolist()
"""


@pytest.fixture
def run(launched):
    def start(*flags, code):
        return launched(*flags, command=[sys.executable, "-c", WORKER + code], stubs=False)

    return start


@pytest.mark.parametrize("servers", [1, 2])
def test_workers_sum(run, servers):
    process = run("-n", 2, "-s", servers, code="print(kv.num_workers, add(1.0 + rank), add(10.0 * rank))")
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    said = f"2 {[[3.0] * 3] * 2} {[[10.0] * 3] * 2}"
    assert sorted(line for line in out.splitlines() if "ready" not in line) == [
        f"[worker 0] {said}", f"[worker 1] {said}"]


def test_a_killed_server_ends_all(run, token):
    process = run("-n", 2, "--grace", 1, code="while True: add(1.0)")
    process.stdout.readline(), process.stdout.readline()

    def server():
        return [pid for pid in processes(token) if variables_of(pid).get("DMLC_ROLE") == "server"]

    os.kill(wait_for(server)[0], signal.SIGKILL)
    start = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 137 and time.monotonic() - start < 15
    assert err.rstrip().endswith("launch.py: error: server 0 on localhost ended with exit code 137 (SIGKILL)")


def test_a_worker_that_fails_ends_all(run):
    """It must leave: MXNet would have it wait, when Python ends, for the other worker, which waits for it."""
    process = run("-n", 2, "--grace", 1, code="""
try:
    while True: raise ValueError("no such row") if rank else add(1.0)
except ValueError as error:
    print(error, file=sys.stderr)
    leave(1)
""")
    start = time.monotonic()
    _, err = process.communicate(timeout=110)
    assert process.returncode == 1, (err, time.monotonic() - start)
    assert err.rstrip().endswith("worker 1 on localhost ended with exit code 1: no such row")
