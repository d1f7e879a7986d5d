import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import closing
from functools import partial

import mxtrain  # noqa: F401
import numpy as np
import pytest
from mxnet import gluon
from mxtrain.data import workers
from mxtrain.data.datasets import ArrayDataset
from mxtrain.data.loader import Loader, loaders
from mxtrain.data.settings import DataConfig
from mxtrain.errors import BadSample, TrainingError, UserError
from mxtrain.parallel.shards import part_of


class Numbers(gluon.data.Dataset):
    """Sample i of epoch e is the image [i, e] with label i; no `rows`, so it is read sample by sample."""

    def __init__(self, length, broken=None, threads=True, bad=()):
        self.length = length
        self.broken = broken
        self.threads = threads
        self.bad = bad
        self.readers = set()

    def __len__(self):
        return self.length

    def __getitem__(self, key):
        epoch, index = key
        if index == self.broken:
            raise ZeroDivisionError(f"{index} is not divisible")
        if index in self.bad:
            raise BadSample(f"image {index}.jpg is broken")
        self.readers.add(threading.current_thread().name)
        return np.array([index, epoch], np.uint8), np.int32(index)


def in_memory(length):
    return ArrayDataset(
        np.arange(length * 4, dtype=np.uint8).reshape(length, 2, 2, 1), np.arange(length, dtype=np.int32)
    )


def everything(loader, epoch, start=0):
    return [(x.tolist(), y.tolist()) for x, y in loader.batches(epoch, start)]


def test_memory_and_files_give_the_same_batches():
    data = in_memory(11)
    whole = Loader(data, 4, seed=2)
    single = Loader(gluon.data.SimpleDataset(range(11)), 4, seed=2)  # for its sampler: keys are not read
    assert len(whole) == len(single) == 3 and whole.samples == 11
    for batch, (x, y) in enumerate(whole.batches(5)):
        samples = [data[5, index] for index in single.sampler.indices(5, batch)]
        assert np.array_equal(x, np.stack([image for image, _ in samples]))
        assert np.array_equal(y, [label for _, label in samples])
        assert x.dtype == np.uint8 and y.dtype == np.int32


KINDS = [(0, "auto"), (1, "thread"), (2, "thread"), (4, "thread"), (1, "process"), (2, "process"), (4, "process")]


@pytest.mark.parametrize("workers, kind", KINDS)
def test_workers_change_nothing(workers, kind):
    alone = Loader(Numbers(23), 4, seed=7)
    with closing(Loader(Numbers(23), 4, seed=7, workers=workers, worker_kind=kind)) as helped:
        assert everything(helped, 0) == everything(alone, 0)
        assert everything(helped, 3, start=2) == everything(alone, 3, start=2) == everything(alone, 3)[2:]


def test_workers_do_the_reading():
    data = Numbers(23)
    with closing(Loader(data, 4, workers=2)) as loader:
        next(loader.batches(0))
        data.readers.clear()  # the shape of a sample was found out by the caller
        everything(loader, 1)
    assert data.readers <= {"mxtrain-loader-0", "mxtrain-loader-1"} and data.readers


def test_the_kind_of_workers_is_chosen_by_the_dataset():
    assert Loader(Numbers(3), 1, workers=1).worker_kind == "thread"
    assert Loader(Numbers(3, threads=False), 1, workers=1).worker_kind == "process"
    assert Loader(in_memory(3), 1, workers=4).workers == 0
    assert Loader(Numbers(3), 1, workers=None).workers == len(os.sched_getaffinity(0))


def test_workers_without_effect_are_said(caplog):
    caplog.set_level(logging.INFO, "mxtrain")
    train, val = loaders(Numbers(5), in_memory(3), DataConfig(workers=2), 4, 0)
    assert not caplog.text and (train.workers, val.workers) == (2, 0)
    loaders(in_memory(5), None, DataConfig(workers=2), 4, 0)
    assert "--workers 2 has no effect" in caplog.text


def test_the_short_last_batch_is_delivered_short():
    assert [len(y) for _, y in Loader(Numbers(9), 4).batches(0)] == [4, 4, 1]
    assert [len(y) for _, y in Loader(in_memory(9), 4).batches(0)] == [4, 4, 1]


def test_the_end_of_an_epoch_has_no_batches():
    assert everything(Loader(Numbers(8), 4), 0, start=2) == []
    assert everything(Loader(in_memory(8), 4), 0, start=2) == []


@pytest.mark.parametrize("workers, kind", KINDS)
def test_an_abandoned_epoch_leaves_no_trace(workers, kind):
    with closing(Loader(Numbers(40), 4, seed=1, workers=workers, worker_kind=kind)) as loader:
        for epoch in range(1, 4):  # more often than there is memory for batches in the making
            abandoned = loader.batches(0)
            next(abandoned)
            assert everything(loader, epoch) == everything(Loader(Numbers(40), 4, seed=1), epoch)
            with pytest.raises(RuntimeError, match="one at a time"):
                next(abandoned)


@pytest.mark.parametrize("workers, kind", KINDS)
def test_an_iteration_takes_over_what_another_has_begun(workers, kind):
    with closing(Loader(Numbers(40), 4, seed=1, workers=workers, worker_kind=kind)) as loader:
        abandoned = loader.batches(0)
        next(abandoned)
        other = loader.batches(0, 1)
        batches = [next(other)]
        abandoned.close()  # its batches in the making are the other's now
        batches += other
        found = [(x.tolist(), y.tolist()) for x, y in batches]
        assert found == everything(Loader(Numbers(40), 4, seed=1), 0, 1)


@pytest.mark.parametrize("workers, kind", KINDS)
def test_a_closed_loader_begins_anew(workers, kind, monkeypatch):
    failures = []
    monkeypatch.setattr(sys, "unraisablehook", failures.append)
    with closing(Loader(Numbers(40), 4, seed=1, workers=workers, worker_kind=kind)) as loader:
        loader.prefetch(1)
        loader.close()
        assert not loader.ready()
        batches = loader.batches(1)
        next(batches)
        loader.close()
        assert everything(loader, 1) == everything(Loader(Numbers(40), 4, seed=1), 1)
        with pytest.raises(RuntimeError, match="closed"):
            next(batches)
        unfinished = loader.batches(2)
        next(unfinished)
    del unfinished  # as at the end of a training that failed
    gc.collect()
    assert not failures


@pytest.mark.parametrize("workers, kind", KINDS)
def test_an_epoch_that_was_begun_ahead_is_the_same(workers, kind):
    with closing(Loader(Numbers(40), 4, seed=1, workers=workers, worker_kind=kind)) as loader:
        for epoch, start in ((0, 0), (1, 0), (2, 7), (3, 9), (4, 10)):
            loader.prefetch(epoch, start)
            assert everything(loader, epoch, start) == everything(Loader(Numbers(40), 4, seed=1), epoch, start)
        loader.prefetch(5)  # and not asked for
        assert everything(loader, 6) == everything(Loader(Numbers(40), 4, seed=1), 6)


@pytest.mark.parametrize("make", [Numbers, in_memory])
def test_plain_iteration_is_a_new_epoch_each_time(make):
    loader = Loader(make(30), 8, seed=4)
    for epoch in range(2):
        assert [(x.tolist(), y.tolist()) for x, y in loader] == everything(Loader(make(30), 8, seed=4), epoch)


def test_what_is_dropped_is_said(caplog):
    caplog.set_level(logging.INFO, "mxtrain")
    loader = Loader(in_memory(11), 4, last_batch="drop")
    assert [len(y) for _, y in loader.batches(0)] == [4, 4]
    assert "3 of 11 samples" in caplog.text


@pytest.mark.parametrize("workers, kind", KINDS)
def test_an_error_in_a_sample_reaches_the_training_with_its_place(workers, kind):
    with closing(Loader(Numbers(12, broken=5), 4, shuffle="none", workers=workers, worker_kind=kind)) as loader:
        batches = loader.batches(0)
        assert next(batches)[1].tolist() == [0, 1, 2, 3]  # what comes before is delivered, in every layout
        with pytest.raises(ZeroDivisionError, match="5 is not") as caught:
            next(batches)
        told = "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
        assert 'raise ZeroDivisionError(f"{index}' in told


@pytest.mark.parametrize("workers, kind", KINDS)
def test_bad_samples_stop_or_are_left_out(workers, kind, caplog):
    data = Numbers(12, bad=(1, 6, 7))
    options = {"shuffle": "none", "workers": workers, "worker_kind": kind}
    with closing(Loader(data, 4, **options)) as loader, pytest.raises(BadSample, match="1.jpg.*--on-bad-sample"):
        everything(loader, 0)
    with closing(Loader(data, 4, **options, on_bad="skip")) as loader:
        batches = list(loader.batches(0))
        assert [y.tolist() for _, y in batches] == [[0, 2, 3], [4, 5], [8, 9, 10, 11]]
        assert [x[:, 0].tolist() for x, _ in batches] == [[0, 2, 3], [4, 5], [8, 9, 10, 11]]
        assert [list(batch.bad) for batch in batches] == [
            [(1, "image 1.jpg is broken")],
            [(2, "image 6.jpg is broken"), (3, "image 7.jpg is broken")],
            [],
        ]
        assert batches[0].positions.tolist() == [0, 2, 3] and batches[1].positions.tolist() == [0, 1]
        everything(loader, 1)
    assert caplog.text.count("image 6.jpg") == 1  # named once, not in every epoch


def test_a_batch_of_bad_samples_is_empty():
    loader = Loader(Numbers(8, bad=(0, 1, 2, 3)), 4, shuffle="none", on_bad="skip")
    assert [x.shape for x, _ in loader.batches(0)] == [(0, 2), (4, 2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_when_no_sample_can_be_read(workers):
    with closing(Loader(Numbers(5, bad=range(5)), 4, on_bad="skip", workers=workers)) as loader:
        with pytest.raises(BadSample, match="none of 5 samples .*4.jpg"):
            everything(loader, 0)


def test_samples_of_different_shapes_are_named():
    class Growing(Numbers):
        def __getitem__(self, key):
            return np.zeros(2 + key[1]), np.int32(0)

    with pytest.raises(UserError, match=r"sample 1 has shape \(3,\), others have \(2,\)"):
        everything(Loader(Growing(3), 2, shuffle="none"), 0)


@pytest.mark.parametrize(
    "odd, words",
    [
        ((np.zeros(2, np.uint8),), "sample 1 has 1 parts, others have 2"),
        ((np.zeros(2, np.uint8), np.int32(1), np.int32(1)), "sample 1 has 3 parts, others have 2"),
        ((np.full(2, 0.5), np.int32(1)), "sample 1 is float64, others are uint8"),
        ((np.zeros(2, np.uint8), 0.5), "sample 1 is float64, others are int32"),
    ],
)
@pytest.mark.parametrize("workers, kind", [(0, "auto"), (2, "thread"), (2, "process")])
def test_samples_that_their_batch_would_change_are_named(odd, words, workers, kind):
    class Odd(Numbers):
        def __getitem__(self, key):
            return odd if key[1] == 1 else super().__getitem__(key)

    loader = Loader(Odd(3), 3, shuffle="none", workers=workers, worker_kind=kind)
    with closing(loader), pytest.raises(UserError, match=words):
        everything(loader, 0)


def test_types_of_one_kind_are_converted():
    class Mixed(Numbers):
        def __getitem__(self, key):
            return np.zeros(2, np.float32 if key[1] else np.float64), 0.5 if key[1] == 0 else key[1]

    (x, y), = Loader(Mixed(3), 3, shuffle="none").batches(0)
    assert x.dtype == np.float64 and y.tolist() == [0.5, 1, 2]


class Sleepy(Numbers):
    """Sample 5 takes its time."""

    def __getitem__(self, key):
        if key[1] == 5:
            time.sleep(1.5)
        return super().__getitem__(key)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_stuck_worker_is_named_and_then_given_up(kind, monkeypatch, caplog):
    monkeypatch.setattr(workers, "SECONDS_TO_WARN", 0.2)
    with closing(Loader(Sleepy(8), 4, shuffle="none", workers=2, worker_kind=kind)) as loader:
        assert len(everything(loader, 0)) == 2
    assert "mxtrain-loader" in caplog.text or "loader thread" in caplog.text
    assert "sample 5" in caplog.text
    monkeypatch.setattr(workers, "SECONDS_TO_GIVE_UP", 0.4)
    with closing(Loader(Sleepy(8), 4, shuffle="none", workers=2, worker_kind=kind)) as loader:
        with pytest.raises(TrainingError, match="no batch for .*sample 5"):
            everything(loader, 0)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_slow_workers_that_go_on_are_waited_for(kind, monkeypatch):
    monkeypatch.setattr(workers, "SECONDS_TO_WARN", 0.3)
    monkeypatch.setattr(workers, "SECONDS_TO_GIVE_UP", 0.6)  # six samples; the batch takes twenty

    class Slow(Numbers):
        def __getitem__(self, key):
            time.sleep(0.1)
            return super().__getitem__(key)

    with closing(Loader(Slow(20), 20, workers=1, worker_kind=kind)) as loader:
        assert len(everything(loader, 0)) == 1


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_interruption_leaves_no_worker_and_no_half_message(kind):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with closing(Loader(Sleepy(8), 4, shuffle="none", workers=2, worker_kind=kind)) as loader:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(KeyboardInterrupt):
                everything(loader, 0)
            assert not multiprocessing.active_children()
            assert [y.tolist() for _, y in loader.batches(0)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_small_batches_keep_all_processes_busy():
    class Readers(Numbers):
        def __getitem__(self, key):
            return np.int64(os.getpid()), np.int32(key[1])

    with closing(Loader(Readers(12, threads=False), 1, workers=4)) as loader:
        readers = [int(x[0]) for x, _ in loader.batches(0)]
    assert all(readers.count(reader) == 3 for reader in readers)


def test_processes_share_no_more_memory_than_the_samples_need():
    with closing(Loader(Numbers(3, threads=False), 10**14, workers=2)) as loader:
        assert [len(y) for _, y in loader.batches(0)] == [3]


class Deadly(Numbers):
    def __getitem__(self, key):
        if key[1] == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(key)


def test_a_dead_worker_is_named_at_once():
    loader = Loader(Deadly(8, threads=False), 4, shuffle="none", workers=2)
    began = time.monotonic()
    with closing(loader), pytest.raises(TrainingError, match="mxtrain-loader-1, .*SIGKILL while it read sample 5"):
        everything(loader, 0)
    assert time.monotonic() - began < workers.SECONDS_TO_WARN  # bounded, not fast
    assert not multiprocessing.active_children()


def test_processes_end_with_the_loader_and_leave_no_shared_memory():
    def named():  # in use by this process; others may come and go
        with open("/proc/self/maps") as file:
            return [line for line in file if "/dev/shm/" in line]

    before = named()
    with closing(Loader(Numbers(40, threads=False), 4, workers=3)) as loader:
        next(loader.batches(0))
        assert len(multiprocessing.active_children()) == 3
        assert named() == before
    assert not multiprocessing.active_children()


def test_processes_end_with_a_parent_that_is_killed(tmp_path):
    program = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_loader import Loader, Numbers
loader = Loader(Numbers(400, threads=False), 4, workers=2)
next(loader.batches(0))
print(*[process.pid for process in loader._crew._processes], flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    workers = [int(pid) for pid in child.stdout.readline().split()]
    assert len(workers) == 2 and all(os.path.exists(f"/proc/{pid}") for pid in workers)
    child.kill()
    child.wait()
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in workers):
        assert time.monotonic() < deadline, "worker processes outlive their parent"
        time.sleep(0.05)


def test_processes_survive_a_signal_to_the_group():
    program = f"""
import signal, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_loader import Loader, Numbers
signal.signal(signal.SIGTERM, lambda *_: print("signalled", flush=True))
loader = Loader(Numbers(400, threads=False), 4, workers=2)
batches = loader.batches(0)
next(batches)
print("ready", flush=True)
sys.stdin.read()
print(len(list(batches)))
loader.close()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout.readline() == "ready\n"
    os.killpg(child.pid, signal.SIGTERM)
    assert child.stdout.readline() == "signalled\n"
    assert child.communicate()[0] == "99\n" and child.returncode == 0


@pytest.mark.parametrize("end", ["loader.close()", "sys.exit(3)"])
def test_a_program_ends_as_it_wants_while_threads_decode(end):
    """A thread that wants to go back to Python after its end aborts the process, from within OpenCV."""
    program = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_loader import Loader, Numbers, np
import cv2
encoded = cv2.imencode(".jpg", np.random.RandomState(0).randint(0, 256, (1500, 1500, 3)).astype(np.uint8))[1]
class Pictures(Numbers):
    def __getitem__(self, key):
        return cv2.imdecode(encoded, 1)[:2, :2], np.int32(key[1])
loader = Loader(Pictures(64), 8, workers=2)
next(iter(loader))
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (3 if "3" in end else 0, "")


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_memory_stays_flat_over_thousands_of_batches(kind):
    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    class Large(Numbers):
        def __getitem__(self, key):
            return np.full(5000, key[1] % 256, np.uint8), np.int32(key[1])

    with closing(Loader(Large(400), 4, workers=2, worker_kind=kind)) as loader:
        sizes = []
        for epoch in range(20):
            for _ in loader.batches(epoch):
                pass
            sizes.append(resident())
    # 1,900 batches of 20 kB, 38 MB, after the first: a tenth of it would be a leak.
    assert sizes[-1] - sizes[0] < 4e6


def test_a_loader_that_cannot_be_made_leaves_nothing_behind(monkeypatch):
    failures = []
    monkeypatch.setattr(sys, "unraisablehook", failures.append)
    with pytest.raises(UserError, match="--batch-size"):
        Loader(in_memory(4), 0)
    gc.collect()  # gluon's __del__ runs on what __init__ left
    assert not failures


@pytest.mark.parametrize("workers, kind", KINDS)
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_of_batches_make_up_the_whole(parts, workers, kind):
    whole = Loader(Numbers(23, bad=(3, 11)), 5, seed=2, on_bad="skip")
    loaders = [Loader(Numbers(23, bad=(3, 11)), 5, seed=2, on_bad="skip", workers=workers, worker_kind=kind,
                      part=lambda rows, p=p: (p * rows // parts, (p + 1) * rows // parts)) for p in range(parts)]
    try:
        for one, *others in zip(whole.batches(1), *(loader.batches(1) for loader in loaders)):
            for column in range(2):
                assert np.array_equal(np.concatenate([part[column] for part in others]), one[column])
            assert np.array_equal(np.concatenate([part.positions for part in others]), one.positions)
            assert [bad for part in others for bad in part.bad] == list(one.bad)
            assert {part.size for part in others} == {one.size}
    finally:
        for loader in loaders:
            loader.close()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_short_last_batch_may_have_more_rows_of_a_part_than_the_others(kind):
    # Of 5 shards the third has 0 of 3 rows, and 1 of 2.
    part = partial(part_of, first=2, count=1, replicas=5, shards=5)
    with closing(Loader(Numbers(5), 3, shuffle="none", workers=2, worker_kind=kind, part=part)) as loader:
        assert [batch[1].tolist() for batch in loader.batches(0)] == [[], [3]]


def test_a_process_reads_ahead_for_its_own_part():
    def ahead(part):
        with closing(Loader(Numbers(64), 16, workers=8, part=part)) as loader:
            loader.prefetch(0)
            return loader._crew.ahead

    assert ahead(workers.everything) == 2  # 32 samples for 8 workers
    assert ahead(lambda rows: (0, rows // 8)) == 8  # of 2 rows
    assert ahead(lambda rows: (rows, rows)) == 2  # of none: there is nothing to read


@pytest.mark.parametrize("variable", ["HOROVOD_LOCAL_SIZE", "MXTRAIN_LOCAL_SIZE"])
def test_processes_of_a_host_share_its_cores(monkeypatch, variable):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    assert workers.cores() == Loader(Numbers(3), 1, workers=None).workers == 9
    for processes, cores in (("1", 9), ("2", 4), ("8", 1), ("16", 1)):
        monkeypatch.setenv(variable, processes)
        assert workers.cores() == Loader(Numbers(3), 1, workers=None).workers == cores
