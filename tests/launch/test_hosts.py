"""The file of hosts, which of them is here, and which answer."""

import socket

import pytest
from mxtrain.errors import UserError
from mxtrain.launch import hosts
from mxtrain.launch.hosts import Slot


def test_the_file(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two machines\n\nalpha slots=2\n  bob@beta   # a comment\n")
    assert hosts.read(str(file)) == [Slot("alpha", 0), Slot("alpha", 1), Slot("bob@beta", 0)]


@pytest.mark.parametrize("text, message", [
    ("alpha\nbeta slots=0\n", "line 2: 'beta slots=0' is not of the form"),
    ("alpha slot=2\n", "line 1: 'alpha slot=2' is not of the form"),
    ("-oProxyCommand=x\n", "line 1: '-oProxyCommand=x' is not of the form"),
    ("alpha\nbeta\nalpha slots=2\n", "line 3: alpha is there already"),
    ("# nothing\n", "names no host"),
    (None, "cannot be read"),
])
def test_mistakes_in_the_file(tmp_path, text, message):
    file = tmp_path / "hosts"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=message):
        hosts.read(str(file))


def test_too_few_slots(launch, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("localhost slots=2\n")
    assert "-n 3: --hosts" in launch("-n", 3, "--hosts", file)[0]


def test_here():
    assert hosts.is_here("localhost") and hosts.is_here("127.0.0.1") and hosts.is_here(socket.gethostname())
    assert not hosts.is_here("198.51.100.1")  # TEST-NET-2: nobody has it
    assert not hosts.is_here("no.such.host.invalid")
    assert not hosts.is_here("somebody@localhost")


def test_alone_means_loopback():
    assert hosts.own_address([]) == "127.0.0.1"


def test_silent_hosts_and_what_ssh_says(ssh):
    (ssh / "beta").touch()
    assert hosts.silent(["alpha", "beta"]) == {"beta": "ssh: connect to host beta port 22: No route to host"}
    assert "BatchMode=yes" in (ssh / "calls").read_text()


def test_an_unknown_host_is_refused_before_anything_starts(launch, ssh, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("198.51.100.1\n")
    (ssh / "198.51.100.1").touch()
    result, out, err = launch("-n", 1, "--hosts", file, code="print('started')")
    assert result.startswith("UserError: --hosts") and "198.51.100.1 does not answer: ssh: connect" in result
    assert "started" not in out
