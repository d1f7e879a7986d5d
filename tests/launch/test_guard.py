"""The guard of a process, driven as the launcher drives it."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest
from mxtrain.launch import guard

PYTHON = [sys.executable, "-S", "-c"]


@pytest.fixture
def guarded(token):
    """A function: starts a guard with some code as its job -> its Popen."""
    started = []

    def start(code, **changes):
        job = {"command": [*PYTHON, code], "folder": "/", "set": {}, "unset": [], "towards": None, "named": False,
               "mark": f"MARK={uuid.uuid4().hex}", "service": False, "grace": 0.5, "silence": None, **changes}
        process = subprocess.Popen([sys.executable, "-I", "-S", guard.__file__], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(process)
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def tell(process, number):
    process.stdin.write(b"%d\n" % number)
    process.stdin.flush()


def leave(process):
    process.stdin.close()
    process.stdin = None  # or communicate() would close it again


READY = "import signal, sys, time, os; print('ready', flush=True); "
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY


@pytest.mark.parametrize("code, expected", [
    ("pass", 0), ("raise SystemExit(7)", 7), ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 128 + 11)])
def test_exit_code(guarded, code, expected):
    assert guarded(code).wait(10) == expected


def test_variables_and_folder(guarded, tmp_path, monkeypatch):
    monkeypatch.setenv("OLD", "1")
    code = "import os; print(os.getcwd(), os.environ['NEW'], 'OLD' in os.environ)"
    process = guarded(code, folder=str(tmp_path), set={"NEW": "{address}/{interface}"}, unset=["OLD"],
                      towards="127.0.0.1")
    assert process.stdout.read().decode().split() == [str(tmp_path), "127.0.0.1/lo", "False"]


@pytest.mark.parametrize("changes, text", [({"folder": "/no/such/folder"}, b"/no/such/folder: cannot be started on"),
                                           ({"command": ["no-such"]}, b"no-such: cannot be started on")])
def test_what_cannot_be_started(guarded, changes, text):
    process = guarded("pass", **changes)
    assert process.wait(10) == 2 and process.stderr.read().startswith(text)


def test_a_host_that_is_unknown_by_its_own_name(monkeypatch):
    monkeypatch.setattr(guard.socket, "gethostname", lambda: "me")
    for answer, text in (("127.0.1.1", "stands for 127.0.1.1"), (OSError(), "does not know its own name")):
        def look_up(name):
            if isinstance(answer, OSError):
                raise answer
            return answer

        monkeypatch.setattr(guard.socket, "gethostbyname", look_up)
        assert text in guard.name_fault()
    monkeypatch.setattr(guard.socket, "gethostbyname", lambda name: "198.51.100.7")
    assert guard.name_fault() is None


def test_a_signal_goes_to_the_process_and_not_to_its_children(guarded):
    child = f"signal.signal(2, lambda *_: print('child', flush=True)); {READY}time.sleep(2)"
    code = (f"import subprocess, signal, sys, time\nchild = subprocess.Popen([{sys.executable!r}, '-S', '-c', "
            f"'import signal, time; ' + {child!r}])\n"
            "signal.signal(2, lambda *_: (print('parent', flush=True), child.terminate(), sys.exit(3)))\n"
            "time.sleep(9)")
    process = guarded(code)
    assert process.stdout.readline() == b"ready\n"
    tell(process, signal.SIGINT)
    assert process.wait(10) == 3 and process.stdout.read() == b"parent\n"


def test_kill_ends_all_that_was_started(guarded):
    process = guarded("import subprocess; subprocess.Popen(['sleep', '60']); " + DEAF + "time.sleep(60)")
    assert process.stdout.readline() == b"ready\n"
    tell(process, signal.SIGKILL)
    assert process.wait(10) == 137  # what is left of the group is the fixture's business


def test_what_a_process_leaves_behind_ends_after_it(guarded):
    process = guarded("import subprocess; subprocess.Popen(['sleep', '60'])")
    assert process.wait(10) == 0


def test_a_daemon_ends_too(guarded):
    process = guarded("import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)")
    assert process.wait(10) == 0  # and the fixture finds nothing


def test_a_training_in_a_shell_has_its_time_to_save(guarded):
    save = "signal.signal(15, lambda *_: (time.sleep(0.2), print('saved', flush=True), sys.exit(143)))"
    code = f"import signal, sys, time; {save}; print('ready', flush=True); time.sleep(9)"
    process = guarded("", command=["sh", "-c", f"{sys.executable} -S -c \"{code}\"; true"], grace=5)
    assert process.stdout.readline() == b"ready\n"
    tell(process, signal.SIGTERM)
    assert process.wait(10) == 143 and process.stdout.read() == b"saved\n"


@pytest.mark.parametrize("code, seconds", [(READY, 0), (DEAF, 0.5)], ids=["listens", "deaf"])
def test_without_a_launcher_the_process_ends(guarded, code, seconds):
    process = guarded(code + "time.sleep(60)")
    assert process.stdout.readline() == b"ready\n"
    start = time.monotonic()
    leave(process)
    assert process.wait(10) in (143, 137) and seconds <= time.monotonic() - start < seconds + 3


def test_a_service_stays_for_the_grace(guarded):
    process = guarded(READY + "time.sleep(60)", service=True)
    assert process.stdout.readline() == b"ready\n"
    start = time.monotonic()
    leave(process)
    assert process.wait(10) == 137 and time.monotonic() - start >= 0.5


def test_silence_counts_as_no_launcher(guarded):
    process = guarded(READY + "time.sleep(60)", silence=0.5)
    assert process.stdout.readline() == b"ready\n"
    for _ in range(4):  # a second with a beat now and then is no silence
        time.sleep(0.25)
        tell(process, 0)
    assert process.poll() is None
    assert process.wait(10) == 143


def test_a_killed_guard_takes_its_process_with_it(guarded):
    process = guarded("import os; print(os.getpid(), flush=True); import time; time.sleep(60)")
    pid = int(process.stdout.readline())
    process.kill()
    until = time.monotonic() + 5
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.02)
    state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] if os.path.exists(f"/proc/{pid}") else "Z"
    assert state == "Z"
