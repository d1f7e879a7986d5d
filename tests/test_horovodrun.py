"""The program `horovodrun` itself, as it comes with Horovod."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launching import TOKEN, processes, variables_of, wait_for
from spread import FLAGS, prepare, run
from trainings import SCRIPT, arrays, assert_same_bits, rows

HOROVODRUN = Path(sys.executable).with_name("horovodrun")

pytestmark = [pytest.mark.timeout(300),
              pytest.mark.skipif(not HOROVODRUN.exists(), reason="Horovod is not installed (make setup HOROVOD=1)")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """97 samples and a network; `alone`, what one process makes of them."""
    place = prepare(tmp_path_factory.mktemp("horovodrun"))
    run(place, [sys.executable, SCRIPT, *flags("alone")])
    return place


def flags(out, epochs=1):
    return [*FLAGS, "--exact", "--shards", 8, "--epochs", epochs, "--out", out]


def horovodrun(place, count, *words, token):
    """A horovodrun in the background: the only words that it needs are how many, and the command."""
    command = [HOROVODRUN, "-np", count, sys.executable, SCRIPT, *words]
    return subprocess.Popen(
        list(map(str, command)), cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", TOKEN: token, "PATH": f"{HOROVODRUN.parent}:{os.environ['PATH']}"})


def ended(process, token, seconds):
    """(stdout, stderr) at the end, after which nothing is left."""
    try:
        said = process.communicate(timeout=seconds)
        wait_for(lambda: not processes(token), seconds)
        return said
    finally:
        for pid in processes(token):
            os.kill(pid, signal.SIGKILL)


def ranks(token):
    """Rank -> process number of the trainings that have begun."""
    found = {}
    for pid in processes(token):
        try:
            own, command = variables_of(pid), Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if "HOROVOD_RANK" in own and bytes(SCRIPT) in command[:2]:  # and not the shell that started it
            found[int(own["HOROVOD_RANK"])] = pid
    return found


def test_eight_processes(place, tmp_path):
    """Equal bits, one set of files, each line once: also with more processes than some batches have samples."""
    out, token = tmp_path / "run", f"{os.getpid()}-eight"
    process = horovodrun(place, 8, *flags(out), token=token)
    stdout, stderr = ended(process, token, 200)
    assert process.returncode == 0, stderr
    assert_same_bits(arrays(out), arrays(place / "alone"))
    assert rows(out) == rows(place / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    files = [sorted(str(path.relative_to(top)) for path in top.rglob("*")) for top in (out, place / "alone")]
    assert files[0] == files[1]
    for text in (stderr, (out / "log.txt").read_text()):
        for line in ("97 training and 23 validation", "the epoch is done", "10 updates per epoch"):
            assert text.count(line) == 1, (line, text)
    assert "kvstore horovod" in stderr and stdout.count("best accuracy") == 1
    assert "stalled" not in stdout + stderr


def test_a_killed_rank_ends_all(place, tmp_path):
    out, token = tmp_path / "run", f"{os.getpid()}-killed"
    process = horovodrun(place, 2, *flags(out, epochs=500), "--checkpoint-updates", 7, token=token)
    wait_for(lambda: (out / "checkpoints" / "update-00000014").exists() or process.poll() is not None, 100)
    began = time.monotonic()
    os.kill(ranks(token)[1], signal.SIGKILL)
    stdout, stderr = ended(process, token, 30)
    assert process.returncode != 0 and time.monotonic() - began < 30
    assert "Process name: 1\nExit code: 137" in stderr
    assert stderr.count("train.py: error: another process has gone") == 1
    # And what was saved is good: two updates more, in one process.
    run(place, [sys.executable, SCRIPT, "--resume", out, "--epochs", "1", "--checkpoint-updates", "9"])


@pytest.mark.parametrize("mistake, line", [(["--lr", "much"], "--lr much: must be a number"),
                                           (["--data", "nothing"], "--data nothing: does not exist")])
def test_a_mistake_of_all_is_said_once(place, mistake, line):
    """Before the processes meet, and after it. horovodrun has an exit code of its own for all failures."""
    token = f"{os.getpid()}-mistake"
    process = horovodrun(place, 2, *mistake, "--json", token=token)
    stdout, stderr = ended(process, token, 100)
    assert process.returncode == 1
    assert stderr.count("train.py: error: ") == stderr.count(line) == stdout.count('"exit_code": 2') == 1
    assert "Process name: 0\nExit code: 2\n" in stderr


def test_without_horovodrun(place):
    """Nothing trains alone where several were meant."""
    said = run(place, [sys.executable, SCRIPT, "--kvstore", "horovod"], code=2).stderr
    assert "--kvstore horovod: this process was started alone; start several by horovodrun" in said
