"""Runs one process of a launch on its host, and ends all of it when it is told to or when the launcher has gone.

The launcher starts this file with a bare interpreter, here or through ssh, so it uses the standard library only.
The first line of its standard input is the job, a JSON object:

    command   list of arguments
    folder    working directory
    set       environment variables to set; "{address}" and "{interface}" in a value stand for this host's IPv4
              address and network interface towards `towards`
    unset     environment variables to remove
    towards   address of the launcher, or null where nothing asks for it
    named     true where other hosts have to reach this one by what its own name stands for
    mark      "NAME=value" of a variable of the process that no other process has
    service   true for a scheduler or server, which the workers need to the end
    grace     seconds between a request to end and SIGKILL
    silence   seconds without a line after which the launcher counts as gone, or null where only the end of the
              input says so

Every further line is the number of a signal: 0 says that the launcher is there, 9 ends the process and whatever it
has started, another one goes to the process itself (not to its children: it decides what becomes of them).

The exit code is the process's, or 128 + the signal that ended it; 2 when it could not be started.
"""

import ctypes
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LEFT_OVER_SECONDS = 2  # for what the process has left behind when it ended by itself


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # a handler and not SIG_IGN, which the process would inherit
    lines = Lines(0)
    first = lines.next(None)
    if first is None:
        return 2
    job = json.loads(first)
    fault = name_fault() if job["named"] else None
    if fault:
        print(fault, file=sys.stderr, flush=True)
        return 2
    try:
        process = start(job)
    except OSError as error:
        what = error.filename or job["command"][0]
        print(f"{what}: cannot be started on {socket.gethostname()} ({error.strerror})", file=sys.stderr, flush=True)
        return 2
    asked = threading.Event()
    threading.Thread(target=obey, args=(lines, process.pid, job, asked), daemon=True).start()
    code = wait(process.pid)
    end_group(process.pid, job["grace"] if asked.is_set() else _LEFT_OVER_SECONDS)
    end_strays(job["mark"])
    return code


class Lines:
    """Lines of a file descriptor, read without Python's buffers, whose locks a thread must not hold at the exit."""

    def __init__(self, descriptor: int):
        self._descriptor, self._rest = descriptor, b""

    def next(self, seconds):
        """The next line without its end; None at the end of the file or after so many seconds without one."""
        while b"\n" not in self._rest:
            if not select.select([self._descriptor], [], [], seconds)[0]:
                return None
            data = os.read(self._descriptor, 65536)
            if not data:
                return None
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return line


def start(job) -> subprocess.Popen:
    """The process in a session of its own, so that a Ctrl-C on the terminal reaches the launcher alone.

    Raises OSError that names the folder or program.
    """
    environment = dict(os.environ)
    for name in job["unset"]:
        environment.pop(name, None)
    facing = facing_of(job["towards"]) if job["towards"] else {}
    mark, _, own = job["mark"].partition("=")
    environment[mark] = own
    for name, value in job["set"].items():
        for word, text in facing.items():
            value = value.replace("{%s}" % word, text)
        environment[name] = value
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only
    if prctl:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def before_exec():
        if prctl:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # for a guard that is killed itself

    return subprocess.Popen(job["command"], cwd=job["folder"], env=environment, stdin=subprocess.DEVNULL,
                            start_new_session=True, preexec_fn=before_exec)


def facing_of(address: str) -> dict:
    """This host's IPv4 `address` and network `interface` on the way to an address (nothing is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((address, 9))
        own = one.getsockname()[0]
        return {"address": own, "interface": _interface_of(own, one)}


def name_fault():
    """Why other hosts cannot reach this one by what its own name stands for here, or None."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return f"{name}: the host does not know its own name; its /etc/hosts has to give it the host's address"
    if address.startswith("127."):
        return (f"{name}: the host's own name stands for {address}, which other hosts cannot reach; its /etc/hosts has "
                "to give it the host's address")
    return None


def _interface_of(own: str, any_socket: socket.socket) -> str:
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    for _, name in socket.if_nameindex():
        request = struct.pack("256s", name.encode()[:15])
        with suppress(OSError):  # an interface without an IPv4 address
            if socket.inet_ntoa(fcntl.ioctl(any_socket, get_address, request)[20:24]) == own:
                return name
    return ""


def obey(lines: Lines, pid: int, job, asked: threading.Event) -> None:
    """Does what the launcher says; when it has gone, ends the process as it would have been told."""
    while True:
        line = lines.next(job["silence"])
        if line is None:
            break
        number = int(line)
        if number:
            asked.set()
            send(number, pid)
    asked.set()
    # Nobody waits for more than half a minute for the end of what has no launcher.
    grace = job["grace"] if job["silence"] is None else min(job["grace"], 10)
    if not job["service"]:
        send(signal.SIGTERM, pid)
    time.sleep(grace)
    send(signal.SIGKILL, pid)


def send(number: int, pid: int) -> None:
    with suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def wait(pid: int) -> int:
    """The exit code of the process; buries children of it that end before."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def end_group(group: int, seconds: float) -> None:
    """Ends what the process has left behind: it may be a shell, and the training its child."""
    until, number = time.monotonic() + seconds, signal.SIGTERM
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return
        number = signal.SIGKILL if time.monotonic() > until else 0
        time.sleep(0.02)


def end_strays(mark: str) -> None:
    """Ends what has left the group of the process: all that began with its mark in the environment."""
    found = True
    while found:
        found = False
        for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
            with suppress(OSError):  # ended meanwhile, or another user's
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if mark.encode() in file.read().split(b"\0"):
                        os.kill(int(pid), signal.SIGKILL)
                        found = True
        if found:
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
