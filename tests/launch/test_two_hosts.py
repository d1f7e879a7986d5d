"""Two hosts in network namespaces, joined by a veth pair: launching across them, and the link cut in mid-run.

The namespaces share everything but the network. The other one is reached by far_shell.py in the place of ssh.
"""

import importlib.util
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
from launching import SCRIPT, processes, wait_for

from mxtrain.train import checkpoint
from spread import FLAGS, prepare, run
from trainings import SCRIPT as TRAIN
from trainings import arrays, assert_same_bits, rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HERE, FAR, PORT = "10.77.0.1", "10.77.0.2", 22022

PS = """
import os, sys, time
import mxtrain, mxnet as mx
kv = mx.kv.create("dist_sync")
kv.init("sum", mx.nd.zeros(3))
def add(number):
    given, total = mx.nd.full(3, number), mx.nd.zeros(3)
    kv.push("sum", given)
    kv.pull("sum", out=total)
    return total.asnumpy().tolist()
"""
HOROVOD = """
import os, sys, time
import mxtrain, mxnet as mx, horovod.mxnet as hvd
hvd.init()
def add(number):
    return hvd.allreduce(mx.nd.full(3, number), average=False, name="sum").asnumpy().tolist()
"""
without = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
transports = pytest.mark.parametrize("transport, worker", [
    pytest.param("ps", PS, id="ps"), pytest.param("horovod", HOROVOD, id="horovod", marks=without)])


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path, monkeypatch, token):
    """Joins two namespaces -> (names of the two, file of hosts)."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    here, far = (f"mxtrain-{uuid.uuid4().hex[:6]}-{end}" for end in "ab")
    added = ip("netns", "add", here)
    if added.returncode != 0:
        pytest.skip(f"namespaces are not allowed: {added.stderr.strip()}")
    ip("netns", "add", far)
    server = None
    try:
        link = f"v{uuid.uuid4().hex[:8]}"
        if ip("-n", here, "link", "add", link, "type", "veth", "peer", "name", "veth0", "netns", far).returncode != 0:
            pytest.skip("veth pairs are not allowed")
        for name, device, address in ((here, link, HERE), (far, "veth0", FAR)):
            folder = Path("/etc/netns", name)  # what `ip netns exec` shows of it in the place of /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
            for words in (["link", "set", "lo", "up"], ["address", "add", f"{address}/24", "dev", device],
                          ["link", "set", device, "up"]):
                assert ip("-n", name, *words).returncode == 0
            # A network of its own, which comes first in the list: nothing that is bound to it is reached by the other.
            for words in (["link", "add", "a0", "type", "veth", "peer", "name", "a1"], ["link", "set", "a0", "up"],
                          ["link", "set", "a1", "up"], ["address", "add", "10.66.0.1/24", "dev", "a0"]):
                assert ip("-n", name, *words).returncode == 0
        shell = Path(__file__).with_name("far_shell.py")
        server = subprocess.Popen(["ip", "netns", "exec", far, sys.executable, shell, "serve", FAR, str(PORT)],
                                  stdout=subprocess.PIPE)
        server.stdout.readline()
        program = tmp_path / "bin" / "ssh"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {shell} call {PORT} "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        (tmp_path / "hosts").write_text(f"{HERE}\n{FAR}\n")
        yield here, link, tmp_path / "hosts"
    finally:
        if server:
            server.kill()
            server.communicate()
        for name in (here, far):
            ip("netns", "del", name)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
        with suppress(OSError):  # others have theirs there
            os.rmdir("/etc/netns")


def start(here, transport, hosts_file, *words, folder=None):
    """words: what Python is to run in each worker."""
    command = ["ip", "netns", "exec", here, sys.executable, SCRIPT, "-n", "2", "--transport", transport,
               "--hosts", hosts_file, "--", sys.executable, *words]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            stdin=subprocess.DEVNULL, cwd=folder)


def slow_down(here, link):
    """20 ms one way."""
    if shutil.which("tc"):
        subprocess.run(["ip", "netns", "exec", here, "tc", "qdisc", "add", "dev", link, "root", "netem", "delay",
                        "20ms"], check=False, capture_output=True)


def all_ended(token, begin):
    """Waits until nothing is left, within 30 seconds of `begin`, but for the stand-in for sshd."""
    def left():
        return [pid for pid in processes(token) if b"far_shell" not in Path(f"/proc/{pid}/cmdline").read_bytes()]

    wait_for(lambda: not left(), 30 - (time.monotonic() - begin))


@transports
def test_workers_sum_over_a_slow_link(hosts, transport, worker):
    here, link, file = hosts
    slow_down(here, link)
    code = worker + 'print(os.environ["MXTRAIN_RANK"], add(1.0 + int(os.environ["MXTRAIN_RANK"])))'
    process = start(here, transport, file, "-c", code)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == [f"[worker {n}] {n} [3.0, 3.0, 3.0]" for n in range(2)]


@transports
def test_a_cut_link_ends_all(hosts, token, transport, worker):
    here, link, file = hosts
    process = start(here, transport, file, "-c", worker + 'add(1.0); print("ready", flush=True)\nwhile True: add(1.0)')
    try:
        process.stdout.readline(), process.stdout.readline()
        assert ip("-n", here, "link", "set", link, "down").returncode == 0
        begin = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert process.returncode not in (0, None) and time.monotonic() - begin < 30
        assert "launch.py: error: " in err.splitlines()[-1]
        all_ended(token, begin)
    finally:
        process.kill()


@pytest.fixture
def flags(tmp_path):
    """A function: flags of train.py for a run folder."""
    prepare(tmp_path)
    return lambda out: [TRAIN, *FLAGS, "--epochs", 3, "--exact", "--out", tmp_path / out]


def kvstore(transport):
    return ["--kvstore", "dist_sync"] if transport == "ps" else []


@transports
def test_a_training_over_a_slow_link(hosts, flags, tmp_path, transport, worker):
    here, link, file = hosts
    slow_down(here, link)
    process = start(here, transport, file, *flags("run"), *kvstore(transport), folder=tmp_path)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    run(tmp_path, [sys.executable, *flags("alone")])
    assert_same_bits(arrays(tmp_path / "run"), arrays(tmp_path / "alone"))
    assert rows(tmp_path / "run") == rows(tmp_path / "alone")


@transports
def test_a_training_whose_link_is_cut(hosts, flags, token, tmp_path, transport, worker):
    """What was saved before is whole, and one process goes on from it to the end of the undisturbed run."""
    here, link, file = hosts
    more = ["--epochs", 20, "--schedule", "constant", "--checkpoint-updates", 7]
    process = start(here, transport, file, *flags("run"), *more, *kvstore(transport), folder=tmp_path)
    saved = checkpoint.Folder(tmp_path / "run" / "checkpoints", reads_only=True)
    try:
        wait_for(lambda: process.poll() is not None or any(name >= "update-00000021" for name in saved.names()), 100)
        assert ip("-n", here, "link", "set", link, "down").returncode == 0
        begin = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert process.returncode not in (0, None) and time.monotonic() - begin < 30, err
        assert "launch.py: error: " in err.splitlines()[-1]
        all_ended(token, begin)
    finally:
        process.kill()
    for name in saved.names():
        checkpoint.read(saved.path / name)
    run(tmp_path, [sys.executable, TRAIN, "--resume", tmp_path / "run"])
    run(tmp_path, [sys.executable, *flags("alone"), *more])
    assert_same_bits(arrays(tmp_path / "run"), arrays(tmp_path / "alone"))
    assert rows(tmp_path / "run") == rows(tmp_path / "alone")
