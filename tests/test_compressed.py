"""Trainings whose processes send compressed gradients."""

import shutil
import sys

import numpy as np
import pytest

from spread import FLAGS, HOROVOD, NO_HOROVOD, alone, launch, place, run  # noqa: F401
from trainings import SCRIPT, arrays, assert_same_bits, rows

SLOW = pytest.mark.slow
EMULATED = """
import sys
from mxtrain.parallel.communicator import InProcess
from mxtrain.parallel.compression import TwoBits
from mxtrain.train.main import main

processes = []

def allreduce(self, arrays):
    gradients, (statistics,) = arrays[:-1], arrays[-1:]
    of_both = list(zip(*gradients))
    if not processes:
        processes.extend(TwoBits(dict(enumerate(own)), 2, 0.5) for own in of_both)
    packed = [compression.pack(own) for compression, own in zip(processes, of_both)]
    sums = [one + other.as_in_context(one.context) for one, other in zip(*packed)]
    for compression, own in zip(processes, of_both):
        compression.unpack([total.as_in_context(own[0].context) for total in sums], own)
    total = statistics[0] + statistics[1].as_in_context(statistics[0].context)
    for copy in statistics:
        total.copyto(copy)

InProcess.allreduce = allreduce
sys.exit(main(sys.argv[1:]))
"""

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("transport, contexts", [pytest.param("horovod", 2, marks=HOROVOD.marks),
                                                 pytest.param("ps", 1, marks=SLOW)])
def test_half_of_the_bytes(place, alone, tmp_path, transport, contexts):
    """float16 rounds what each of two processes sends, and the sum, to 11 bits: a gradient is off by up to 2**-10 of
    the larger of the two, and a weight, which is their sum over 30 updates, by not much more than that. 2e-3 of a
    tensor's largest value is twice 2**-10, and far below what a lost or doubled gradient makes; float32 sums stay
    within 1e-5."""
    flags = [*FLAGS, "--epochs", 3, "--shards", 6, "--cpus", contexts, "--compression", "fp16"]
    run(place, launch(transport, 2, 1, *flags, "--out", tmp_path / "run"))
    halved, whole = arrays(tmp_path / "run"), arrays(alone("--epochs", 3, "--shards", 6))
    off = [np.abs(halved[name] - whole[name]).max() / np.abs(whole[name]).max() for name in whole]
    assert 1e-5 < max(off) < 2e-3


TWO_BITS = [*FLAGS, "--epochs", 3, "--shards", 6, "--compression", "2bit", "--checkpoint-updates", 7, "--keep", 9,
            "--out"]


@pytest.fixture(scope="module")
def two_bits(place):
    """Runs of two processes, by transport."""
    for transport in ("ps", *([] if NO_HOROVOD else ["horovod"])):
        run(place, launch(transport, 2, 2, *TWO_BITS, transport))
    return place


def go_on(two_bits, tmp_path, transport, command):
    """Goes on from the 14th of 30 updates of a copy of a run -> (arrays at the end, what was said)."""
    shutil.copytree(two_bits / transport, tmp_path / "run")
    said = run(two_bits, [*command, "--resume", tmp_path / "run" / "checkpoints" / "update-00000014"]).stderr
    return arrays(tmp_path / "run"), said


def residuals_in(arrays):
    return {name: array for name, array in arrays.items() if name.startswith("residual/")}


def test_two_bits_are_those_of_one_process(two_bits):
    """Two contexts play the two processes, each with a residual of its own."""
    (two_bits / "emulated.py").write_text(EMULATED)
    flags = [*FLAGS, "--epochs", 3, "--shards", 6, "--cpus", 2, "--out", "emulated"]
    run(two_bits, [sys.executable, "emulated.py", *flags])
    of_two, of_one = arrays(two_bits / "ps"), arrays(two_bits / "emulated")
    residuals = residuals_in(of_two)
    assert_same_bits({name: array for name, array in of_two.items() if name not in residuals}, of_one)
    assert rows(two_bits / "ps") == rows(two_bits / "emulated")
    trained = [name.split("/")[1] for name in of_one if name.startswith("optimizer/")]
    assert set(residuals) == {f"residual/{rank}/{name}" for rank in range(2) for name in trained}
    assert all(array.any() for array in residuals.values())


@HOROVOD.marks[0]
def test_two_bits_have_the_same_sum_over_both_transports(two_bits):
    assert_same_bits(arrays(two_bits / "horovod"), arrays(two_bits / "ps"))
    assert rows(two_bits / "horovod") == rows(two_bits / "ps")


@pytest.mark.parametrize("transport", [HOROVOD, pytest.param("ps", marks=SLOW)])
def test_two_bits_stopped_and_resumed(two_bits, tmp_path, transport):
    ended, said = go_on(two_bits, tmp_path, transport, launch(transport, 2, 1))
    assert_same_bits(ended, arrays(two_bits / transport))
    assert rows(tmp_path / "run") == rows(two_bits / transport) and "residual" not in said


@SLOW
def test_two_bits_of_two_contexts(two_bits, tmp_path):
    """The contexts' sum is rounded elsewhere: where it comes to lie on the other side of the threshold, a weight moves
    an update earlier or later, and is off by the rate times the threshold over the batch, 0.0025, for a while."""
    run(two_bits, launch("ps", 2, 1, *TWO_BITS, tmp_path / "run", "--cpus", 2))
    one, two = arrays(two_bits / "ps"), arrays(tmp_path / "run")
    assert one.keys() == two.keys()
    off = np.concatenate([np.abs(one[name] - two[name]).ravel() for name in one if name.startswith("weights/")])
    assert np.mean(off > 1e-5) < 0.05 and off.max() < 0.05


@SLOW
def test_two_bits_resumed_by_three_processes(two_bits, tmp_path):
    ended, said = go_on(two_bits, tmp_path, "ps", launch("ps", 3, 1))
    assert said.count("the residuals of --compression 2bit in 2 processes are added up in rank 0 of 3") == 1
    assert {name.split("/")[1] for name in residuals_in(ended)} == {"0", "1", "2"}


@SLOW
def test_two_bits_resumed_without(two_bits, tmp_path):
    said = run(two_bits, [sys.executable, SCRIPT, "--resume", two_bits / "ps", "--epochs", 4], code=2).stderr
    assert "--compression 2bit: is for what processes send each other" in said and "Traceback" not in said
    ended, said = go_on(two_bits, tmp_path, "ps", [sys.executable, SCRIPT, "--compression", "none"])
    assert said.count("the residuals of --compression 2bit, what was not sent yet of the gradients, are dropped") == 1
    assert "from update 15 on: compression none (was 2bit)" in said
    assert not residuals_in(ended)
