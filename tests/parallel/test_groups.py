"""Groups of processes: their sums, and what two of them send each other."""

import sys

import mxnet as mx
import pytest

from mxtrain.errors import UserError
from mxtrain.parallel.communicator import AmongProcesses, InProcess
from ranks import among
from spread import HOROVOD, LAUNCH, SLOW, run
from vectors import check_vectors

pytestmark = pytest.mark.timeout(120)

class Threaded(AmongProcesses):
    """The defaults, over ranks that are threads."""

    def __init__(self, communicator):
        self.rank, self.size, self._communicator = communicator.rank, communicator.size, communicator

    def _added(self, array, tag):
        return mx.nd.array(self._communicator.total(array.asnumpy()), dtype=array.dtype)


@pytest.mark.parametrize("size", [2, 3])
def test_vectors_made_of_sums(size):
    assert among(size, lambda communicator: check_vectors(Threaded(communicator))) == [True] * size


def test_a_single_process():
    communicator = InProcess("none", [mx.cpu(0), mx.cpu(1)])
    communicator.meet([])
    communicator.meet([(0,)])
    assert communicator.among([0]) is communicator and check_vectors(communicator)


def test_fewer_than_all_need_horovod():
    """In one line, and one of several processes alone is like a single one."""
    communicator = Threaded(among(3, lambda threaded: threaded)[1])
    communicator.use([mx.cpu(0), mx.cpu(1)])
    communicator.meet([(1,)])
    with pytest.raises(UserError, match="a pipeline over several processes needs Horovod") as error:
        communicator.meet([(1,), (0, 1)])
    assert "\n" not in str(error.value)
    assert communicator.among((0, 1, 2)) is communicator
    own = communicator.among((1,))
    copies = [mx.nd.ones((2,), ctx=mx.cpu(number)) for number in range(2)]
    own.allreduce([copies])
    assert (own.rank, own.size) == (0, 1) and [copy.asnumpy().tolist() for copy in copies] == [[2, 2]] * 2


WORKER = """
import itertools, os, random, sys
import mxtrain
import mxnet as mx
import numpy as np
from mxtrain.parallel.communicator import connect
from mxtrain.parallel.world import world
from vectors import check_vectors

everyone = connect(world(None if "HOROVOD_RANK" in os.environ else "dist_sync"), [mx.cpu(0), mx.cpu(1)])
rank, size = everyone.rank, everyone.size
"""
OF_ALL = WORKER + """
assert check_vectors(everyone) and check_vectors(everyone, 1)
everyone.close()
print("done")
"""
OF_SOME = WORKER + """
pairs = list(itertools.combinations(range(size), 2))

def check_hops():
    # All that ranks say to each other, each in an order of its own, before anything is awaited.
    def value(source, to, number):
        return np.array([source, to, number, -0.0, np.nan, 1e-42], dtype="float32").reshape(3, 2)

    hops = [(other, number) for other in range(size) if other != rank for number in range(8)]
    calls = [("send", *hop) for hop in hops] + [("receive", *hop) for hop in hops]
    random.Random(rank).shuffle(calls)
    got, counts = [], dict.fromkeys(calls, 0)
    for what, other, number in calls + calls:
        counts[what, other, number] += 1
        content = number + 100 * counts[what, other, number]  # one tag after the other has an order
        if what == "send":
            everyone.send(mx.nd.array(value(rank, other, content), ctx=mx.cpu(1)), other, str(number))
        else:
            array = everyone.receive((3, 2), "float32", mx.cpu(1), other, str(number))
            got.append((array, mx.nd.negative(array), value(other, rank, content)))
    for array, negative, expected in got:
        assert array.context == mx.cpu(1) and array.asnumpy().tobytes() == expected.tobytes()
        assert negative.asnumpy().tobytes() == (-expected).tobytes()

def check_layouts():
    # What operators of oneDNN have made, with its padding, arrives as it is.
    for channels, shape in ((20, (9, 9)), (3, (5, 4)), (16, (8, 8)), (5, (4, 4, 4))):
        draw = np.random.RandomState(channels)
        x, w = (mx.nd.array(draw.randn(*size)) for size in ((2, 16, *shape), (channels, 16, *[3] * len(shape))))
        w[0], x[0, 0] = 0, np.nan
        made = mx.nd.Convolution(x, w, no_bias=True, kernel=(3,) * len(shape), num_filter=channels) * -1
        made = made if len(shape) > 2 else mx.nd.Convolution(
            made, mx.nd.array(draw.randn(channels, channels, 1, 1)), no_bias=True, kernel=(1, 1), num_filter=channels)
        if rank == 0:
            everyone.send(made, 1)
        elif rank == 1:
            assert everyone.receive(made.shape, "float32", mx.cpu(0), 0).asnumpy().tobytes() == made.asnumpy().tobytes()

def check_types():
    for dtype in ("float16", "float64", "int32", "int64", "uint8"):
        if rank == 1:
            everyone.send(mx.nd.array([1, 2, 255], dtype=dtype), 0, dtype)
        elif rank == 0:
            array = everyone.receive((3,), dtype, mx.cpu(0), 1, dtype)
            assert array.dtype == np.dtype(dtype) and array.asnumpy().tolist() == [1, 2, 255]

def check_groups(groups):
    for ranks in groups:
        if rank in ranks:
            group = everyone.among(ranks)
            assert group is everyone.among(ranks)
            assert (group.rank, group.size) == (ranks.index(rank), len(ranks)) and check_vectors(group)
            copies = [mx.nd.full((3,), rank + 1.0, ctx=mx.cpu(number)) for number in range(2)]
            group.allreduce([copies])
            total = 2.0 * (sum(ranks) + len(ranks))
            assert [copy.asnumpy().tolist() for copy in copies] == [[total] * 3] * 2
            assert group.gather(rank) == list(ranks)
            weights = mx.nd.full((2,), rank)
            group.broadcast([weights])
            assert weights.asnumpy().tolist() == [ranks[0]] * 2
            # Nobody holds what is gathered, nor waits.
            for number in range(50):
                group.all_gather(mx.nd.ones((100,)))
                group.reduce_scatter(mx.nd.ones((100 * len(ranks),)))

everyone.meet([(0,), *pairs[:1]])
check_layouts()
check_types()
everyone.meet(pairs)  # of which one is known
everyone.use([mx.cpu(0), mx.cpu(1)])  # as another training does
check_groups([*pairs, tuple(range(size))])
check_groups([*reversed(pairs), tuple(range(size))])
check_hops()
everyone.close()
print("done")
"""


def start(folder, code, transport, workers, servers=1):
    (folder / "worker.py").write_text(code)
    how = ["--transport", "horovod"] if transport == "horovod" else ["-s", servers]
    return [sys.executable, LAUNCH, "-n", workers, *how, "--", sys.executable, folder / "worker.py"]


@pytest.fixture
def found(monkeypatch):
    """Workers find what tests have in common."""
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))


@pytest.mark.parametrize("transport, workers, servers", [
    ("ps", 2, 1), pytest.param("ps", 3, 2, marks=SLOW), pytest.param("horovod", 4, 0, marks=[*HOROVOD.marks, SLOW])])
def test_vectors_of_all_processes(tmp_path, found, transport, workers, servers):
    done = run(tmp_path, start(tmp_path, OF_ALL, transport, workers, servers))
    assert done.stdout.count("done") == workers


@pytest.mark.parametrize("workers", [pytest.param(3, marks=HOROVOD.marks),
                                     pytest.param(2, marks=[*HOROVOD.marks, SLOW])])
def test_groups_of_processes(tmp_path, found, workers):
    done = run(tmp_path, start(tmp_path, OF_SOME, "horovod", workers))
    assert done.stdout.count("done") == workers


LOST = WORKER + """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which the launcher ends the others
everyone.meet([(0, 1), (1, 2), (0, 2)])
everyone.barrier()
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
# 0 waits for what has gone, and 1 for 0, of which it will never hear.
begun, array = time.monotonic(), everyone.receive((5,), "float32", mx.cpu(0), {0: 2, 1: 0}[rank])
try:
    array.wait_to_read()
except mx.base.MXNetError as error:
    print("lost" if everyone.lost_peer(error) and time.monotonic() < begun + 10 else error, flush=True)
os._exit(75)
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", [HOROVOD])
def test_a_killed_process_is_missed_in_every_group(tmp_path, found, transport):
    done = run(tmp_path, start(tmp_path, LOST, transport, 3), code=128 + 9)
    assert done.stdout.count("lost") == 2 and "worker 2" in done.stderr.splitlines()[-1], done.stderr
