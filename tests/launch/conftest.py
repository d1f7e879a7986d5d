"""Launches for tests, and a check that nothing of a launch is left."""

import os
import signal
import stat
import subprocess
import sys
import time
import uuid

import pytest
from launching import PYTHON, SCRIPT, STUBS, TOKEN, processes

from mxtrain.errors import UserError
from mxtrain.launch import group, parameter_server
from mxtrain.launch.main import main


@pytest.fixture
def token(monkeypatch):
    """The token of this test, in force for whatever it starts; afterwards, none of that may be left."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(TOKEN, value)
    yield value
    deadline = time.monotonic() + 3
    left = processes(value)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = processes(value)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes were left behind"


@pytest.fixture
def launch(token, capfd, monkeypatch):
    """A function: launches `code` in every worker with some flags -> (exit code, stdout, stderr)."""

    def run(*flags, code="pass", command=None, stubs=True):
        capfd.readouterr()
        if stubs:
            monkeypatch.setattr(parameter_server, "_COMMAND", parameter_server._COMMAND)  # put back at the end
            monkeypatch.setattr(group, "_SERVICE_SECONDS", group._SERVICE_SECONDS)
            exec(STUBS)
        try:
            result = main([*map(str, flags), "--", *(command or [*PYTHON, code])])
        except UserError as error:
            result = f"UserError: {error}"
        return (result, *capfd.readouterr())

    return run


@pytest.fixture
def launched(token):
    """A function: starts launch.py as a program of its own -> its Popen, with both streams as text."""
    started = []

    def start(*flags, code="pass", command=None, stubs=True):
        program = [str(SCRIPT)]
        if stubs:
            program = ["-c", f"import runpy{STUBS}runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"]
        command = [sys.executable, *program, *map(str, flags), "--", *(command or [*PYTHON, code])]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        stdin=subprocess.DEVNULL))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A folder: an `ssh` on the PATH that runs the command here. Writing a host's name as a file into the folder makes
    that host silent; what each call asked for is in its file `calls`."""
    folder = tmp_path / "ssh"
    folder.mkdir()
    program = folder / "ssh"
    program.write_text(f"""#!/bin/sh
# The last two words are the host and the command line, as a login shell of the host would be given it.
options=""
while [ $# -gt 2 ]; do options="$options $1"; shift; done
echo "$options | $1 | $2" >> {folder}/calls
if [ -e {folder}/$1 ]; then echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255; fi
cd /
MXTRAIN_TEST_HOST=$1 exec sh -c "$2"
""")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder
