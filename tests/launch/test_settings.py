"""The flags, and the refusal of what cannot work, in one line each."""

import pytest
from mxtrain.errors import UserError
from mxtrain.launch.main import parse
from mxtrain.launch.settings import LaunchConfig


def test_the_command_is_what_follows_the_dashes():
    settings, command = parse(["-n", "2", "-s", "3", "--", "prog", "-n", "9", "--", "x"])
    assert (settings.workers, settings.servers, command) == (2, 3, ["prog", "-n", "9", "--", "x"])


@pytest.mark.parametrize("words", [["-n4"], ["-n=4"], ["-n", "4"], ["--workers=4"]])
def test_spellings_of_a_number(words):
    assert parse([*words, "--", "prog"])[0].workers == 4


def test_defaults():
    settings = LaunchConfig(workers=3)
    assert (settings.servers, settings.min_workers, settings.restarts, settings.grace) == (1, 3, 0, 15)
    assert LaunchConfig(workers=3, transport="horovod").servers == 0


@pytest.mark.parametrize("words, text", [
    ([], "-n is missing"),
    (["-n", "0"], "-n 0: must be at least 1"),
    (["-n", "two"], "two: must be a whole number"),
    (["-n", "2", "-s", "0"], "-s 0: must be at least 1"),
    (["-n", "2", "-s", "1", "--transport", "horovod"], "-s 1: Horovod has no servers"),
    (["-n", "2", "--transport", "mpi"], "--transport mpi: must be one of ps, horovod"),
    (["-n", "2", "--restarts", "-1"], "--restarts -1: must be at least 0"),
    (["-n", "2", "--restarts", "1", "--min-workers", "3"], "--min-workers 3: must be from 1 to 2"),
    (["-n", "2", "--min-workers", "1"], "--min-workers 1: has an effect only with --restarts"),
    (["-n", "2", "--port", "0"], "--port 0: must be from 1 to 65535"),
    (["-n", "2", "--grace", "-1"], "--grace -1.0: must be at least 0"),
    (["-n", "2", "--grace", "nan"], "--grace nan: must be a number"),
    (["-n", "2", "--worker", "2"], "--worker: no such setting; did you mean --workers"),
])
def test_refusals(words, text):
    with pytest.raises(UserError) as error:
        parse([*words, "--", "prog"])
    assert text in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("words", [["-n", "2"], ["-n", "2", "--"], ["-n", "2", "prog"]])
def test_a_command_is_needed(words):
    with pytest.raises(UserError, match="no command: give it after --"):
        parse(words)


def test_no_such_program(launch):
    assert launch("-n", 1, command=["no-such-program"])[0] == "UserError: no-such-program: no such program"


@pytest.mark.parametrize("name", ["DMLC_ROLE", "HOROVOD_RANK"])
def test_refused_under_another_launcher(launch, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert launch("-n", 1)[0].startswith(f"UserError: {name} is set: another launcher")
