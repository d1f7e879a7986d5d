"""A process of a launch, here or on another host, and the way of its output."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Tuple

from mxtrain.launch import guard
from mxtrain.launch.hosts import SSH
from mxtrain.launch.worker import RUN_FOLDER

BEAT_SECONDS = 2.0
"""How often a guard on another host is told that the launcher is there."""

_SILENCE_SECONDS = 15.0  # after which such a guard gives it up
_LONGEST_LINE = 1 << 20  # bytes; a longer one is passed on in pieces
_LONGEST_WORDS = 500  # characters of a cause

_OWN = re.compile(r"HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|_|HOSTNAME|TERM|TMPDIR|MAIL|DISPLAY|XAUTHORITY|LS_COLORS"
                  r"|XDG_.*|SSH_.*|DBUS_.*|BASH_FUNC_.*")
"""Variables that belong to a host or to a login there."""


@dataclass(frozen=True)
class Task:
    """What a process is to do; the same on every host."""

    name: str
    """Such as "worker 0"; the prefix of its lines."""
    command: List[str]
    host: str
    here: bool
    """Whether the host is this machine."""
    variables: Dict[str, str]
    rank: Optional[int] = None
    """None for a scheduler or server, which serves the workers and so outlives them."""
    towards: Optional[str] = None
    """Address of the launcher, where a variable's value holds {address} or {interface}."""
    named: bool = False
    """Whether other hosts have to reach its host by what the host's own name stands for there."""
    unset: Tuple[str, ...] = ()


class Output:
    """Passes lines on, one at a time, whoever writes them."""

    def __init__(self, prefixes: bool):
        self._prefixes, self._lock = prefixes, threading.Lock()

    def line(self, stream: int, name: str, text: bytes) -> None:
        """stream: 1 or 2. Nobody may be reading any more: the training has to end well all the same."""
        prefix = f"[{name}] ".encode() if self._prefixes else b""
        with self._lock, suppress(OSError):
            data = prefix + text + b"\n"
            while data:
                data = data[os.write(stream, data):]


class Process:
    """A running task. Started by the constructor, which raises OSError when not even that goes."""

    def __init__(self, task: Task, grace: float, output: Output, announced: Callable[[str], None]):
        self.task = task
        self.code: Optional[int] = None
        self.signalled = False
        self.last_words = ""
        """Its last line on stderr that says something."""
        self._output, self._announced = output, announced
        self._mark = f"MXTRAIN_PROCESS={uuid.uuid4().hex}"
        run = [sys.executable, "-I", "-S", guard.__file__]  # neither the site's nor the user's packages are needed
        if not task.here:
            run = [*SSH, task.host, "exec " + " ".join(map(shlex.quote, run))]
        self._popen = subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       start_new_session=True)
        self._pumps = [threading.Thread(target=self._pump, args=(pipe, stream), daemon=True)
                       for pipe, stream in ((self._popen.stdout, 1), (self._popen.stderr, 2))]
        for pump in self._pumps:
            pump.start()
        self._tell(json.dumps(self._job(grace)))
        self._beaten = time.monotonic()

    def signal(self, number: int) -> None:
        """Sends a signal, SIGKILL to all that the process has started too."""
        self.signalled = True
        self._tell(str(int(number)))

    def beat(self) -> None:
        """To be called again and again: tells another host that the launcher is there."""
        if not self.task.here and time.monotonic() - self._beaten > BEAT_SECONDS:
            self._beaten = time.monotonic()
            self._tell("0")

    def poll(self) -> Optional[int]:
        """Its exit code, 128 + n when signal n ended it, once its last line has been passed on; else None."""
        if self.code is None and self._popen.poll() is not None:
            code = self._popen.returncode
            if code < 0 and self.task.here:  # a guard that was killed has ended nothing but its process
                guard.end_strays(self._mark)
            for pump in self._pumps:
                pump.join(2)  # on no account for ever
            self.code = code if code >= 0 else 128 - code
            with suppress(OSError):
                self._popen.stdin.close()
        return self.code

    def abandon(self) -> None:
        """Gives up a guard that does not answer; on its host it ends by itself."""
        self._popen.kill()

    def end(self) -> str:
        """How it ended, in words, after poll() has given a code."""
        how = f"exit code {self.code}"
        with suppress(ValueError):
            if self.code > 128:
                how = f"{how} ({signal.Signals(self.code - 128).name})"
        if self.code == 255 and not self.task.here:
            how = f"{how} (of ssh, if the connection was lost)"
        where = f"{self.task.name} on {self.task.host} ended with {how}"
        says_why = self.last_words and self.code != 128 + signal.SIGKILL  # of which it knew nothing
        return f"{where}: {self.last_words}" if says_why else where

    def _job(self, grace: float) -> dict:
        task = self.task
        variables = {"PYTHONUNBUFFERED": "1"}  # or lines would come late, and the last ones of a killed process never
        if not task.here:
            variables.update({name: value for name, value in os.environ.items() if not _OWN.fullmatch(name)})
        variables.update(task.variables)
        return {"command": task.command, "folder": os.getcwd(), "set": variables, "unset": list(task.unset),
                "towards": task.towards, "named": task.named, "mark": self._mark,
                "service": task.rank is None, "grace": grace,
                "silence": None if task.here else _SILENCE_SECONDS}

    def _tell(self, line: str) -> None:
        with suppress(OSError, ValueError):  # it has ended
            self._popen.stdin.write(line.encode() + b"\n")
            self._popen.stdin.flush()

    def _pump(self, pipe, stream: int) -> None:
        rest = b""
        while True:
            try:
                data = os.read(pipe.fileno(), 65536)
            except OSError:
                data = b""
            *lines, rest = (rest + data).split(b"\n")
            if rest and (not data or len(rest) > _LONGEST_LINE):
                lines.append(rest)
                rest = b""
            for line in lines:
                self._line(stream, line)
            # A bar is drawn over itself again and again: what a terminal would show of it is its last state.
            rest = rest[max(rest.rfind(b"\r", 0, len(rest) - 1), 0):]
            if not data:
                return

    def _line(self, stream: int, line: bytes) -> None:
        if stream == 2 and line.startswith(RUN_FOLDER):
            self._announced(os.fsdecode(line[len(RUN_FOLDER):]))
            return
        line = line.rstrip(b"\r").rpartition(b"\r")[2]
        text = line.decode(errors="replace").strip()
        if not text:
            return
        if stream == 2 and not text.startswith("[bt]"):  # MXNet's stack traces
            self.last_words = text[:_LONGEST_WORDS]
        self._output.line(stream, self.task.name, line)
