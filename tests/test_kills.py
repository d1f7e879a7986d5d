"""kill -9 at random moments: everything ends soon, the last checkpoint is whole, and a resume ends with the bits of the run
that nobody disturbed."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launching import TOKEN, processes, variables_of, wait_for
from mxtrain.train import checkpoint
from test_processes import HOROVOD, NETWORK, flags_of, launch, rows, run
from trainings import SCRIPT, arrays, assert_same_bits, idx_folder

SECONDS = 30  # that all have to end
UPDATES = 80  # of 8 epochs
QUICK, SLOW = range(2), range(2, 20)
SEEDS = [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The data, the network, and `straight`, the run in one process."""
    place = tmp_path_factory.mktemp("kills")
    idx_folder(place / "data", 97, 23, side=8)
    (place / "network.py").write_text(NETWORK)
    run(place, [sys.executable, SCRIPT, *flags(place, place / "straight")])
    return place


def flags(place, out):
    return [*flags_of(place, "none"), "--exact", "--epochs", UPDATES // 10, "--checkpoint-updates", 3, "--out", out]


def names(out):
    """The checkpoints of a run, oldest first; looking at them repairs nothing."""
    return checkpoint.Folder(out / "checkpoints", reads_only=True).names()


def parts(token, launcher):
    """What a launch has started -> {name: process number}, without the guards."""
    found = {}
    for pid in set(processes(token)) - {launcher.pid}:
        try:
            own, command = variables_of(pid), Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if b"guard.py" not in command and "MXTRAIN_PROCESS" in own:
            name = f"worker {own['MXTRAIN_RANK']}" if "MXTRAIN_RANK" in own else own["DMLC_ROLE"]
            found[name] = max(pid, found.get(name, 0))
    return found


def kill_at_random(place, out, transport, seed, victim=None):
    """A launch of two workers, of which a process is killed: in one case of four while all are starting."""
    draw = random.Random(f"{transport} {seed}")
    token = f"{os.getpid()}-{transport}-{seed}"
    grace = [] if seed in SLOW else ["--grace", 2]
    command = launch(place, transport, 2, 1, *flags(place, out), ours=grace)
    process = subprocess.Popen(list(map(str, command)), cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1", TOKEN: token})
    try:
        if seed % 4 == 3:
            time.sleep(draw.uniform(0.5, 5))
        else:
            wanted = f"update-{draw.randrange(UPDATES // 2):08d}"
            wait_for(lambda: process.poll() is not None or any(name >= wanted for name in names(out)), 100)
            time.sleep(draw.uniform(0, 0.05))
        found = {"launcher": process.pid} if victim else parts(token, process)
        name = draw.choice(sorted(found))
        case = f"seed {seed}: {name} killed after {names(out)[-1:]}"
        began = time.monotonic()
        os.kill(found[name], signal.SIGKILL)
        try:
            _, said = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{case}: the launcher does not end")
        wait_for(lambda: not processes(token), SECONDS)
    finally:
        for pid in processes(token):
            os.kill(pid, signal.SIGKILL)
    print(f"{case}; {process.returncode} after {time.monotonic() - began:.1f} s\n{said}")
    assert process.returncode != 0
    assert time.monotonic() - began < SECONDS, case
    if not victim:
        assert f"{name}" in said.splitlines()[-1] and "SIGKILL" in said.splitlines()[-1]


def resumes(place, out):
    """What is there is whole, and leads to the end of the undisturbed run."""
    for name in names(out):
        checkpoint.read(out / "checkpoints" / name)
    if names(out):
        run(place, [sys.executable, SCRIPT, "--resume", out])
    else:  # killed before there was anything
        shutil.rmtree(out, ignore_errors=True)
        run(place, [sys.executable, SCRIPT, *flags(place, out)])
    assert_same_bits(arrays(out), arrays(place / "straight"))
    assert rows(out) == rows(place / "straight")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("transport", [HOROVOD, "ps"])
def test_a_process_is_killed(place, tmp_path, transport, seed):
    kill_at_random(place, tmp_path / "run", transport, seed)
    resumes(place, tmp_path / "run")


@pytest.mark.parametrize("transport", [pytest.param("horovod", marks=[*HOROVOD.marks, pytest.mark.slow]), "ps"])
def test_the_launcher_is_killed(place, tmp_path, transport):
    """Its guards ask the workers to save, as it would have done."""
    kill_at_random(place, tmp_path / "run", transport, 0, victim="launcher")
    resumes(place, tmp_path / "run")
