"""Where processes of a parameter server meet that are started by hand: it works, or is refused with host and port."""

import os
import socket
import subprocess
import sys
import time

import pytest

from launching import processes
from spread import run
from trainings import MLP, SCRIPT

SERVER = [sys.executable, "-m", "mxtrain.launch.server"]
IMPATIENT = f"""
import runpy
from mxtrain.parallel import server
server._SECONDS_TO_MEET = server._SECONDS_FOR_ALL = 4
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@pytest.fixture
def by_hand(token, monkeypatch, free_port):
    """A function: starts what has these roles, in the background, at a host; the variables stay for a worker."""
    started = []

    def start(host, *roles):
        for name, value in (("PS_ROOT_URI", host), ("PS_ROOT_PORT", free_port), ("NUM_WORKER", 1), ("NUM_SERVER", 1)):
            monkeypatch.setenv(f"DMLC_{name}", str(value))
        for role in roles:
            started.append(subprocess.Popen(SERVER, env={**os.environ, "DMLC_ROLE": role}, stderr=subprocess.PIPE,
                                            text=True))
        monkeypatch.setenv("DMLC_ROLE", "worker")
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def worker(place, *flags, program=(str(SCRIPT),), code=0):
    return run(place, [sys.executable, *program, "--kvstore", "dist_sync", *flags], code).stderr


def test_servers_that_never_come(tmp_path, by_hand, free_port, token):
    by_hand("127.0.0.1", "scheduler")
    said = worker(tmp_path, program=("-c", IMPATIENT), code=2)
    assert said == (
        "train.py: error: --kvstore: not all of 1 servers (DMLC_NUM_SERVER) and 1 workers (DMLC_NUM_WORKER) have come to "
        f"the scheduler at 127.0.0.1:{free_port} in 4 s; scripts/launch.py starts all of them\n")
    assert len(processes(token)) == 1  # the scheduler, which is ours


def test_a_scheduler_that_never_comes(tmp_path, by_hand, free_port):
    by_hand("127.0.0.1")
    began = time.monotonic()
    said = worker(tmp_path, program=("-c", IMPATIENT), code=2)
    assert f"no scheduler answers at 127.0.0.1:{free_port}" in said and time.monotonic() - began < 60


def test_an_unknown_host_is_named(tmp_path, by_hand, free_port):
    server, = by_hand("no.such.host.invalid", "server")
    assert f"no scheduler answers at no.such.host.invalid:{free_port}" in worker(tmp_path, code=2)
    assert server.wait(30) == 2
    assert server.stderr.read() == (
        "server: error: DMLC_PS_ROOT_URI=no.such.host.invalid: is no host that this one knows\n")


@pytest.mark.parametrize("variables, words", [({}, "needs servers and a scheduler"),
                                              ({"DMLC_ROLE": "worker"}, "DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT")])
def test_no_servers_at_all(tmp_path, monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = worker(tmp_path, code=2)
    assert words in said and "scripts/launch.py" in said and said.count("\n") == 1


@pytest.mark.slow
def test_a_name_in_the_place_of_an_address(tmp_path, by_hand):
    """MXNet itself takes `localhost` for an address in use."""
    started = by_hand("localhost", "scheduler", "server")
    worker(tmp_path, *MLP, "--out", tmp_path / "run")
    assert [process.wait(20) for process in started] == [0, 0]


@pytest.mark.slow
def test_a_port_of_another_program(tmp_path, by_hand, free_port):
    """The scheduler names it; a worker meets a program that is no scheduler, and does not wait for ever."""
    with socket.create_server(("127.0.0.1", free_port)):
        scheduler, = by_hand("127.0.0.1", "scheduler")
        assert scheduler.wait(60) == 1 and f"127.0.0.1:{free_port} is in use" in scheduler.stderr.read()
        assert f"127.0.0.1:{free_port} in 4 s" in worker(tmp_path, program=("-c", IMPATIENT), code=2)
