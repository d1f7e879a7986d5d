"""kill -9 at random moments: everything ends soon, the last checkpoint is whole, and a resume ends with the bits of the
run that nobody disturbed."""

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
from spread import FLAGS, HOROVOD, launch, prepare, run
from trainings import SCRIPT, arrays, assert_same_bits, rows

SECONDS = 30  # that all have to end
UPDATES = 80  # of 8 epochs
QUICK, SLOW = range(2), range(2, 20)
SEEDS = [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The data, the network, and `straight`, the run in one process."""
    place = prepare(tmp_path_factory.mktemp("kills"))
    run(place, [sys.executable, SCRIPT, *flags(place, "straight")])
    return place


def flags(place, out):
    return [*FLAGS, "--data", place / "data", "--exact", "--epochs", UPDATES // 10, "--checkpoint-updates", 3,
            "--out", out]


def start(folder, command, token):
    """Starts a launch in the background."""
    return subprocess.Popen(list(map(str, command)), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env={**os.environ, "OMP_NUM_THREADS": "1", TOKEN: token})


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
    process = start(place, launch(transport, 2, 1, *flags(place, out), ours=grace), token)
    try:
        if seed % 4 == 3:
            time.sleep(draw.uniform(0.5, 5))
        else:
            wanted = f"update-{draw.randrange(UPDATES // 2):08d}"
            wait_for(lambda: process.poll() is not None or any(name >= wanted for name in names(out)), 100)
            time.sleep(draw.uniform(0, 0.05))
        found = {"launcher": process.pid} if victim else wait_for(lambda: parts(token, process))
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


BREAKS = """
import os
from mxnet.gluon import nn

class Breaks(nn.Dense):
    calls = 0

    def __call__(self, x):
        Breaks.calls += 1
        if Breaks.calls == 60 and os.environ["MXTRAIN_RANK"] == "1":
            raise ValueError("no such row")
        return super().__call__(x)

def net(classes):
    net = nn.Sequential()
    net.add(Breaks(classes))
    return net
"""


@pytest.mark.parametrize("transport", [HOROVOD, pytest.param("ps", marks=pytest.mark.slow)])
def test_an_exception_in_one_process(place, tmp_path, transport):
    """A traceback, once, of the process that it is in; the other one ends too, and the launcher says the cause last."""
    (tmp_path / "breaks.py").write_text(BREAKS)
    token = f"{os.getpid()}-{transport}-breaks"
    process = start(tmp_path, launch(transport, 2, 1, *flags(place, tmp_path / "run"), "--model", "breaks:net",
                                     ours=["--grace", 8]), token)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 1 and said.count("Traceback") == 1, said
    assert said.splitlines()[-1] == (
        "launch.py: error: worker 1 on localhost ended with exit code 1: ValueError: no such row")
    assert not processes(token)
    checkpoint.read(tmp_path / "run" / "checkpoints" / names(tmp_path / "run")[-1])


@pytest.mark.parametrize("transport", [pytest.param("horovod", marks=[*HOROVOD.marks, pytest.mark.slow]), "ps"])
def test_a_signal_to_all_processes_of_a_job(place, tmp_path, transport):
    """As systemd, Slurm and docker send it: to launcher, workers and servers, and twice; workers get it three times."""
    out, token = tmp_path / "run", f"{os.getpid()}-{transport}-all"
    process = start(place, launch(transport, 2, 1, *flags(place, out)), token)
    try:
        wait_for(lambda: process.poll() is not None or any(name >= "update-00000012" for name in names(out)), 100)
        for _ in range(2):
            for pid in processes(token):
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.02)
        _, said = process.communicate(timeout=SECONDS)
        wait_for(lambda: not processes(token), SECONDS)
    finally:
        for pid in processes(token):
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == 143 and said.count("stopped after update") == 1, said
    resumes(place, out)
