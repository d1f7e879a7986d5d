"""What the tests of launches have in common."""

import os
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "launch.py"
PYTHON = [sys.executable, "-S", "-c"]  # starts in 20 ms

STUBS = f"""
from mxtrain.launch import group, parameter_server
parameter_server._COMMAND = {[*PYTHON, "import time; time.sleep(60)"]}
group._SERVICE_SECONDS = 0.1
"""
"""Puts programs that do nothing in the place of MXNet's scheduler and servers, which take seconds to start."""

TOKEN = "MXTRAIN_TEST_LAUNCH"
"""A variable by whose value the processes of one test are found."""


def processes(token):
    """Process numbers of those that inherited the token, this process not counted."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if f"{TOKEN}={token}".encode() in variables and state != "Z":
                found.append(int(folder.name))
    return found


def variables_of(pid):
    """The environment that a process started with."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def wait_for(condition, seconds=20.0):
    """Waits until the condition gives something true -> that."""
    until = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
