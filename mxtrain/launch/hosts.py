"""Hosts: the file that lists them, which of them is this one, and which answer."""

from __future__ import annotations

import re
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Dict, List, Optional

from mxtrain.errors import UserError
from mxtrain.launch.guard import facing_of

LOOPBACK = "127.0.0.1"

SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=3",
       "-o", "ServerAliveCountMax=2"]
"""No passwords are asked for, and a host that has gone is noticed after 6 to 9 seconds: with the 15 of --grace after
them, all have ended in 30."""

_ANSWER_SECONDS = 20


@dataclass(frozen=True)
class Slot:
    """A place for one worker: the host's name and the number among its places."""

    host: str
    number: int


def read(path: str) -> List[Slot]:
    """The places of all hosts, in the order of the file. UserError names the line."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hosts {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    slots: Dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        found = re.fullmatch(r"([^\s=-][^\s=]*)(?:\s+slots\s*=\s*(\d+))?", text)
        if not found or found[2] and int(found[2]) < 1:
            raise UserError(f"--hosts {path}, line {number}: {text!r} is not of the form `name slots=N`")
        if found[1] in slots:
            raise UserError(f"--hosts {path}, line {number}: {found[1]} is there already")
        slots[found[1]] = int(found[2] or 1)
    if not slots:
        raise UserError(f"--hosts {path}: names no host")
    return [Slot(host, number) for host, count in slots.items() for number in range(count)]


def is_here(host: str) -> bool:
    """Whether a name or address is this machine: one of its addresses can be bound here."""
    if host in ("localhost", socket.gethostname()):
        return True
    address = address_of(host)
    if address is None or "@" in host:  # another user, here or elsewhere
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.bind((address, 0))
        except OSError:
            return False
    return True


def address_of(host: str) -> Optional[str]:
    """IPv4 address (which is all that MXNet's parameter server knows) of a host or user@host, None if unknown."""
    try:
        return socket.gethostbyname(host.rpartition("@")[2])
    except OSError:
        return None


def own_address(others: List[str]) -> str:
    """Address under which this machine is reached from the other hosts; the loopback address without any.

    UserError when the names of all of them are known to ssh only.
    """
    for host in others:
        address = address_of(host)
        if address is not None:
            return facing_of(address)["address"]
    if others:
        raise UserError(f"--hosts: {others[0]} has no IPv4 address that this machine knows")
    return LOOPBACK


def silent(hosts: List[str]) -> Dict[str, str]:
    """Those of other hosts that do not answer -> what ssh says."""
    with ThreadPoolExecutor(max(len(hosts), 1)) as pool:
        answers = list(pool.map(_complaint, hosts))
    return {host: answer for host, answer in zip(hosts, answers) if answer is not None}


def _complaint(host: str) -> Optional[str]:
    try:
        done = subprocess.run([*SSH, host, "true"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, timeout=_ANSWER_SECONDS, start_new_session=True)
    except subprocess.TimeoutExpired:
        return f"no answer in {_ANSWER_SECONDS} s"
    except OSError as error:
        return f"ssh cannot be started ({error.strerror})"
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), f"ssh ended with {done.returncode}")
