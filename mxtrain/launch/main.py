"""launch.py: starts the processes of a training, and starts them again after a failure."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import sys
import time
from typing import Dict, List, Optional, Set, Tuple, Union

from mxtrain import config
from mxtrain.errors import UserError
from mxtrain.launch import horovod, hosts, parameter_server
from mxtrain.launch.group import Group, Outcome, Signals
from mxtrain.launch.horovod import Horovod
from mxtrain.launch.hosts import Slot
from mxtrain.launch.parameter_server import ParameterServer
from mxtrain.launch.processes import Output, Task
from mxtrain.launch.settings import LaunchConfig
from mxtrain.launch.slots import Place, choose, places

_log = logging.getLogger("mxtrain")

_USERS_MISTAKE = 2
_LONGEST_PAUSE = 30  # seconds before a restart


def main(argv: List[str]) -> int:
    """Launches what the command line says -> the exit code: that of the process that failed first."""
    settings, command = parse(argv)
    _check(settings, command)
    with Signals() as signals:
        return Launcher(settings, command, signals).run()


def parse(argv: List[str]) -> Tuple[LaunchConfig, List[str]]:
    """The settings, and the command after `--`."""
    parser = config.parser("launch.py", "Run the processes of a training, on this host or several: "
                                        "launch.py -n 2 [flags] -- python scripts/train.py ...")
    config.add_fields(parser, LaunchConfig)
    cut = argv.index("--") if "--" in argv else len(argv)
    if not argv[cut + 1:] and not {"-h", "--help"} & set(argv):
        raise UserError("no command: give it after --, as in launch.py -n 2 -- python scripts/train.py")
    words = [re.sub(r"^-n(?=$|=|\d)", "--workers", re.sub(r"^-s(?=$|=|\d)", "--servers", word)) for word in argv[:cut]]
    words = [re.sub(r"^(--workers|--servers)(?=\d)", r"\1=", word) for word in words]
    values = vars(parser.parse_args(words, defaults=False))
    return config.sections_of(values, {"launch": LaunchConfig}).launch, argv[cut + 1:]


def _check(settings: LaunchConfig, command: List[str]) -> None:
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]}: no such program")
    for name in (*parameter_server.SET_HERE, *horovod.SET_HERE):
        if name in os.environ:
            raise UserError(f"{name} is set: another launcher has started launch.py, which sets it itself")
    if settings.transport == "horovod":
        horovod.check_installed()


class Launcher:
    """The starts of one launch."""

    def __init__(self, settings: LaunchConfig, command: List[str], signals: Signals):
        self._settings, self._command, self._signals = settings, command, signals
        self._this_host = socket.gethostname() if settings.hosts else "localhost"
        self._slots = self._read_slots()
        self._here = {host: not settings.hosts or hosts.is_here(host) for host in {slot.host for slot in self._slots}}
        self._others = sorted(host for host, here in self._here.items() if not here)
        self._address = hosts.own_address(self._others)
        self._run_folder: Optional[str] = None

    def run(self) -> int:
        """Starts until a start ends well, or no restart is left or of use."""
        failed: Set[Slot] = set()
        for number in range(self._settings.restarts + 1):
            slots = self._next_slots(failed, first=number == 0)
            outcome = self._start(number, slots) if slots else Outcome(1)
            if outcome.cause:
                failed = self._failed_slots(outcome, slots)
            if outcome.code == 0 or not self._worthwhile(number, outcome):
                break
            self._pause(number, outcome)
            if self._signals.count:
                break
        return self._report(outcome)

    def _read_slots(self) -> List[Slot]:
        wanted = self._settings.workers
        if self._settings.hosts is None:
            return [Slot("localhost", number) for number in range(wanted)]
        slots = hosts.read(self._settings.hosts)
        if len(slots) < wanted:
            raise UserError(f"-n {wanted}: --hosts {self._settings.hosts} has slots for {len(slots)} workers")
        return slots

    def _next_slots(self, failed: Set[Slot], first: bool) -> List[Slot]:
        """Places for the next start; none when too few hosts answer. UserError then at the first start."""
        silent = hosts.silent(self._others)
        slots = choose(self._slots, self._settings.workers, self._settings.min_workers, failed, silent)
        notes = [f"{host} does not answer: {answer}" for host, answer in silent.items()]
        if len(slots) >= self._settings.min_workers:
            for note in notes:
                _log.warning("%s; going on without it", note)
            return slots
        if first:
            raise UserError(f"--hosts {self._settings.hosts}: {notes[0]}")
        _log.error("places for %d workers of at least %d: %s", len(slots), self._settings.min_workers, "; ".join(notes))
        return []

    def _start(self, number: int, slots: List[Slot]) -> Outcome:
        numbered = places(slots)
        transport = self._transport(numbered)
        try:
            tasks = transport.services(self._here.get, self._this_host)
            tasks += [self._worker(transport, place, number) for place in numbered]
            group = Group(self._signals, self._settings.grace, Output(prefixes=len(tasks) > 1), self._announced)
            return group.run(tasks)
        finally:
            transport.close()

    def _transport(self, numbered: List[Place]) -> Union[ParameterServer, Horovod]:
        if self._settings.transport == "horovod":
            return Horovod(numbered, self._address, self._settings.port)
        return ParameterServer(self._settings.servers, numbered, self._address, self._settings.port)

    def _worker(self, transport: Union[ParameterServer, Horovod], place: Place, number: int) -> Task:
        variables: Dict[str, str] = {
            "MXTRAIN_LAUNCH": self._settings.transport, "MXTRAIN_RESTART": str(number),
            "MXTRAIN_RANK": str(place.rank), "MXTRAIN_SIZE": str(place.size),
            "MXTRAIN_LOCAL_RANK": str(place.local_rank), "MXTRAIN_LOCAL_SIZE": str(place.local_size)}
        if self._run_folder is not None:
            variables["MXTRAIN_RESUME"] = self._run_folder
        task = Task(f"worker {place.rank}", self._command, place.host, self._here[place.host], variables, place.rank)
        return transport.worker(task, place)

    def _announced(self, folder: str) -> None:
        self._run_folder = folder

    def _failed_slots(self, outcome: Outcome, slots: List[Slot]) -> Set[Slot]:
        rank = outcome.cause.task.rank
        return set() if rank is None else {slots[rank]}

    def _worthwhile(self, number: int, outcome: Outcome) -> bool:
        return (number < self._settings.restarts and outcome.code != _USERS_MISTAKE and not self._signals.count)

    def _pause(self, number: int, outcome: Outcome) -> None:
        """Hosts and the network may need a moment. A signal ends the pause."""
        seconds = min(2 ** number, _LONGEST_PAUSE)
        where = f"from {self._run_folder}" if self._run_folder else "from the beginning"
        _log.warning("%s; restart %d of %d in %d s, %s", self._cause(outcome), number + 1, self._settings.restarts,
                     seconds, where)
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._signals.count:
            time.sleep(0.05)

    def _cause(self, outcome: Outcome) -> str:
        return outcome.cause.end() if outcome.cause else "too few hosts answer"

    def _report(self, outcome: Outcome) -> int:
        """Says last how the launch ended -> its exit code."""
        if outcome.code == 0:
            return 0
        if self._signals.count and outcome.cause is None:
            print(f"launch.py: ended by {signal.Signals(self._signals.first).name}", file=sys.stderr, flush=True)
            return 128 + self._signals.first
        print(f"launch.py: error: {self._cause(outcome)}", file=sys.stderr, flush=True)
        return outcome.code
