"""A training that ends with more workers than it began with."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import processes, variables_of, wait_for

from spread import FLAGS, HOROVOD, launch, prepare, run
from trainings import SCRIPT, arrays, assert_same_bits, rows

FAR = "far@localhost"  # another user: counts as another host, and the stand-in for ssh leads here


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", [HOROVOD, pytest.param("ps", marks=pytest.mark.slow)])
def test_a_host_that_comes_back_is_taken_in(tmp_path, ssh, token, transport):
    """One of two hosts does not answer at first. When the only worker is killed, it is back, with places for two: the
    run goes on there, and ends with the bits of one process."""
    prepare(tmp_path)
    (tmp_path / "hosts").write_text(f"localhost\n{FAR} slots=2\n")
    (ssh / FAR).touch()
    out = tmp_path / "run"
    flags = [*FLAGS, "--exact", "--epochs", 12, "--checkpoint-updates", 4, "--out"]
    command = launch(transport, 3, 1, *flags, out,
                     ours=["--hosts", tmp_path / "hosts", "--min-workers", 1, "--restarts", 5, "--grace", 2])
    process = subprocess.Popen(list(map(str, command)), cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                               text=True)

    def only_worker():
        return [pid for pid in processes(token) if variables_of(pid).get("MXTRAIN_SIZE") == "1"
                and "train.py" in Path(f"/proc/{pid}/cmdline").read_text()]

    wait_for(lambda: process.poll() is not None or (out / "checkpoints" / "update-00000008").exists(), 100)
    os.remove(ssh / FAR)
    os.kill(only_worker()[0], signal.SIGKILL)
    _, said = process.communicate(timeout=150)
    assert process.returncode == 0, said
    assert f"{FAR} does not answer" in said and said.count("restart 1 of 5") == 1 and "restart 2" not in said
    assert "[worker 0] resumed after update" in said
    assert (ssh / "calls").read_text().count("guard.py") == 2 + (transport == "ps")  # two workers, a server
    run(tmp_path, [sys.executable, SCRIPT, *flags, tmp_path / "alone"])
    assert_same_bits(arrays(out), arrays(tmp_path / "alone"))
    assert rows(out) == rows(tmp_path / "alone")
