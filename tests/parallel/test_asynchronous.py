"""Processes that are threads, and servers that are an object: what is sent, added, and told ahead in dist_async."""

import pickle
import random
import threading
import time
from types import SimpleNamespace
from typing import get_args

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import Parameter

from holding import give, held
from mxtrain.errors import BadSample, Elsewhere, UserError
from mxtrain.optim.optimizer import Optimizer
from mxtrain.optim.settings import OptimConfig, OptimizerName
from mxtrain.parallel import server
from mxtrain.parallel.asynchronous import Asynchronous, OnServers, missing_updates, pieces
from mxtrain.parallel.updates import add
from mxtrain.train import loop
from mxtrain.train.agreement import agree
from mxtrain.train.metrics import Meter
from mxtrain.train.state import State

pytestmark = pytest.mark.timeout(60)


class Servers:
    """What MXNet's servers do, in dist_async: one push at a time, applied at once, answered with what is then there."""

    def __init__(self, workers):
        self.workers, self.arrays, self.updater = workers, {}, None
        self.lock, self.barrier = threading.Lock(), threading.Barrier(workers)


class Store:
    """A worker's KVStore."""

    def __init__(self, servers, rank):
        self._servers, self.rank, self.num_workers = servers, rank, servers.workers

    def set_optimizer(self, optimizer):
        self._servers.updater = mx.optimizer.get_updater(pickle.loads(pickle.dumps(optimizer, 0)))

    def _barrier(self):
        self._servers.barrier.wait(20)

    def init(self, keys, arrays):
        if self.rank == 0:
            assert not set(keys) & set(self._servers.arrays)
            self._servers.arrays.update((key, array.copy()) for key, array in zip(keys, arrays))
        self._barrier()

    def pushpull(self, keys, arrays, out):
        for key, array, result in zip(*map(_list, (keys, arrays, out))):
            with self._servers.lock:
                assert array.shape == self._servers.arrays[key].shape
                self._servers.updater(key, array.copy(), self._servers.arrays[key])
                self._servers.arrays[key].copyto(result)

    def pull(self, keys, out):
        for key, result in zip(_list(keys), _list(out)):
            with self._servers.lock:
                self._servers.arrays[key].copyto(result)


def _list(value):
    return value if isinstance(value, list) else [value]


@pytest.fixture
def among(monkeypatch):
    """What function(communicator) returns or raises for each of some ranks."""
    monkeypatch.setattr(server, "_meet_scheduler", lambda: None)
    monkeypatch.setattr(server, "_in_time", lambda create: create())  # in the thread that it is for
    monkeypatch.setattr(Asynchronous, "_wait_at_the_end", lambda *_: None)
    here = threading.local()
    create = mx.kv.create
    monkeypatch.setattr(mx.kv, "create", lambda name: here.store if name == "dist_async" else create(name))

    def among(count, function):
        servers, results = Servers(count), [None] * count

        def run(rank):
            here.store = Store(servers, rank)
            try:
                results[rank] = function(Asynchronous())
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return among


def whole(results):
    """The results, none of which is an error."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def test_the_last_of_a_round_writes_the_sum():
    stored, waiting = mx.nd.array([4, 9, 9], dtype="float64"), []
    for values, expected in (([0, 1.5, -0.0], [4, 9, 9]), ([0, 2.0, -0.0], [5, 3.5, 0]), ([0, 1, 1], [5, 3.5, 0])):
        add(stored, mx.nd.array(values, dtype="float64"), waiting, workers=2)
        assert stored.asnumpy().tolist() == expected
        if stored[0].asscalar() == 5 and len(waiting) == 0:
            assert np.signbit(stored[2].asscalar())


@pytest.mark.parametrize("bound", ["1000000", "9"])  # the latter sends more than 7 numbers in pieces
def test_sums_are_those_of_all(among, monkeypatch, bound):
    monkeypatch.setenv("MXNET_KVSTORE_BIGARRAY_BOUND", bound)
    shapes = [(3,), (2, 9), (1,), (3,), (), (0,), (40,)] * 10

    def function(communicator):
        sums = []
        for number, shape in enumerate(shapes):
            time.sleep(random.random() / 1000)
            sums.append(communicator.total(np.full(shape, 2.0**-40 + number + 100 * communicator.rank)))
        return sums

    for sums in whole(among(3, function)):
        for number, (shape, total) in enumerate(zip(shapes, sums)):
            assert np.array_equal(total, np.full(shape, 3 * 2.0**-40 + 3 * number + 300))  # nothing is rounded


def test_what_is_made_of_sums(among):
    def function(communicator):
        rank = communicator.rank
        arrays = [mx.nd.array([[0.0, -0.0, 1.1 + rank]]), mx.nd.array([7 - rank], dtype="int64")]
        communicator.broadcast(arrays)
        assert np.signbit(arrays[0].asnumpy()).tolist() == [[False, True, False]]
        communicator.barrier()
        return communicator.share({"a": rank}), [array.asnumpy().tolist() for array in arrays]

    expected = mx.nd.array([1.1]).asscalar()
    assert whole(among(3, function)) == [({"a": 0}, [[[0.0, 0.0, expected]], [7]])] * 3


def run_of(communicator, ahead):
    """What `tell` and `agree` look at."""
    communicator.use([mx.cpu(0)])
    communicator.ahead = ahead
    nothing = SimpleNamespace(wait=lambda: None, weights=lambda *_, **__: None, gather=lambda: None,
                              rows_of=lambda batch: [batch], bad_of=lambda batch: 0)
    return SimpleNamespace(
        communicator=communicator, state=State(), meter=Meter(["loss"], communicator), layout=nothing, audit=nothing,
        optimizer=nothing, checkpoints=None, checkpoint_minutes=None, saved_at=0.0, reported_at=time.monotonic(),
        asked=set(), signals=SimpleNamespace(received=0))


@pytest.mark.parametrize("workers, ahead", [(2, 0), (3, 0), (2, 3), (3, 2)])
def test_nobody_is_further_ahead_than_told(among, workers, ahead):
    """Workers of uneven speed: each learns the numbers of all for every batch, in front of it; a fast one is held back
    by its bound only, and its weights never lack more than is said."""
    batches, lock = 30, threading.Lock()
    pushed, leads, missing = [0] * workers, [], []

    def function(communicator):
        run, rank = run_of(communicator, ahead), communicator.rank
        pulled, samples = 0, []
        for batch, told in loop._told_ahead(run, iter(range(batches))):
            agreed = agree(run, told)
            assert agreed.rows == batch
            samples.append(agreed.samples)
            time.sleep(0.004 * random.random() * (3 if rank == batch // 6 % workers else 1))
            with lock:
                missing.append(sum(pushed) - pulled)
                pushed[rank] += 1
                pulled = sum(pushed)
                leads.append(pushed[rank] - min(pushed))
        return samples

    assert whole(among(workers, function)) == [[workers * batch for batch in range(batches)]] * workers
    assert max(missing) <= missing_updates(ahead, workers)
    assert max(leads) <= ahead + 1  # one is in the making
    assert ahead == 0 or max(leads) > 1


@pytest.mark.parametrize("ahead", [0, 2])
def test_all_stop_in_front_of_the_batch_that_one_cannot_read(among, monkeypatch, ahead):
    monkeypatch.setattr(loop, "snapshot", lambda run: ({"weight": np.ones(1)}, {}))

    def function(communicator):
        run = run_of(communicator, ahead)

        def batches():
            yield from range(5)
            if communicator.rank == 1:
                raise BadSample("x.png")
            yield from range(5, 9)

        try:
            for _, told in loop._saved_first(run, loop._told_ahead(run, batches())):
                loop._answer(run, agree(run, told))
                run.state.update += 1
        except Exception as error:
            return run.state.update, type(error)

    assert whole(among(3, function)) == [(5, Elsewhere), (5, BadSample), (5, Elsewhere)]


def test_what_is_due_is_asked_for_once(among):
    """The first process asks for a checkpoint; all hear of it two batches later, and it is due again after that."""

    def function(communicator):
        run, saved = run_of(communicator, 2), []
        run.checkpoint_minutes = 1e-9  # always
        for batch, told in loop._told_ahead(run, iter(range(7))):
            if agree(run, told).save:
                saved.append(batch)
        return saved

    assert whole(among(2, function)) == [[0, 3, 6]] * 2


def parameters(contexts):
    """Two to be trained, by name, with multipliers."""
    result = {}
    for number, (name, shape) in enumerate((("weight", (3, 5)), ("bias", (4,)))):
        parameter = Parameter(name, shape=shape, lr_mult=1.0 - 0.5 * number, wd_mult=1.0)
        parameter.initialize(mx.init.Zero(), ctx=contexts)
        parameter.set_data(mx.nd.array(np.random.RandomState(number).normal(size=shape)))
        result[name] = parameter
    return result


def on_servers(config, own, communicator, holding=None):
    """holding: of all contexts; by default of one."""
    holding = holding or held(own, [mx.cpu(0)])
    contexts = [of_context[0].weight.context for of_context in holding]
    return OnServers(config, own, [], contexts, [one.gradient for one in holding[0]], communicator)


def step(number):
    """(gradients, learning rate, scale) of an update."""
    draw = np.random.RandomState(number).normal
    return [draw(size=(3, 5)), draw(size=(4,))], 0.1 / (1 + number), 1.0 / (3 + number)


@pytest.mark.parametrize("name, bound", [*((name, "1000000") for name in get_args(OptimizerName)), ("adam", "8")])
@pytest.mark.parametrize("contexts", [1, 2])
def test_a_single_worker_updates_as_without_servers(among, monkeypatch, name, bound, contexts):
    """To 1e-6 of the largest weight: gradients are scaled before MXNet's operators or inside of them, which rounds
    differently, by one unit of float32 (6e-8) an update. `bound`: parameters in one piece, or in several."""
    monkeypatch.setenv("MXNET_KVSTORE_BIGARRAY_BOUND", bound)
    contexts = [mx.cpu(i) for i in range(contexts)]
    config = OptimConfig(optimizer=name, weight_decay=0.01, decay_all=False)

    def trained(make):
        own = parameters(contexts)
        holding = held(own, contexts)
        optimizer = make(own, holding)
        optimizer.begin()
        for number in range(5):
            gradients, lr, scale = step(number)
            for of_context in holding:
                give(of_context, gradients)
            optimizer.update(number, lr, scale)
        optimizer.gather()
        for parameter in own.values():
            assert len({parameter.data(ctx).asnumpy().tobytes() for ctx in contexts}) == 1
        return [parameter.data(contexts[0]).asnumpy() for parameter in own.values()]

    expected = trained(lambda own, holding: Optimizer(config, own, holding))
    found, = whole(among(1, lambda c: trained(lambda own, holding: on_servers(config, own, c, holding))))
    start = [parameter.data(contexts[0]).asnumpy() for parameter in parameters(contexts).values()]
    for one, other, before in zip(found, expected, start):
        assert np.abs(one - other).max() <= 1e-6 * np.abs(other).max()
        assert np.abs(one - before).max() > 1e-3


def test_every_push_counts_and_all_have_the_weights_in_the_end(among):
    """Plain SGD is a sum, in any order. Running statistics become the mean over updates: rank 1 made two, rank 0 one,
    and rank 2 none."""
    contexts = [mx.cpu(0)]

    def function(communicator):
        communicator.use(contexts)
        own, mean = parameters(contexts), Parameter("mean", shape=(2,))
        mean.initialize(mx.init.Constant(communicator.rank), ctx=contexts)
        optimizer = OnServers(OptimConfig(momentum=0, weight_decay=0), own, [mean], contexts,
                              [mx.nd.ones((3, 5)), mx.nd.ones((4,))], communicator)
        optimizer.begin()
        for number in range({0: 1, 1: 2, 2: 0}[communicator.rank]):
            optimizer.update(number, lr=0.5, scale=0.25)
        optimizer.gather()
        optimizer.gather()  # without updates in between, nothing changes
        return [parameter.data().asnumpy().tolist() for parameter in (*own.values(), mean)]

    first, *others = whole(among(3, function))
    assert all(other == first for other in others)
    before = [parameter.data().asnumpy() for parameter in parameters(contexts).values()]
    np.testing.assert_allclose(first[0], before[0] - 3 * 0.125, rtol=1e-6)
    np.testing.assert_allclose(first[1], before[1] - 3 * 0.125 / 2, rtol=1e-6)
    np.testing.assert_allclose(first[2], [2 / 3] * 2, rtol=1e-6)


def test_norms_of_pieces_are_refused(among, monkeypatch):
    monkeypatch.setenv("MXNET_KVSTORE_BIGARRAY_BOUND", "8")
    error, = among(1, lambda c: on_servers(OptimConfig(optimizer="lamb"), parameters([mx.cpu(0)]), c))
    assert isinstance(error, UserError) and "--optimizer lamb" in str(error)


def test_pieces_are_below_the_bound(monkeypatch):
    monkeypatch.delenv("MXNET_KVSTORE_BIGARRAY_BOUND", raising=False)
    assert pieces(0) == [] and pieces(999_998) == [(0, 999_998)]
    assert pieces(2_000_000) == [(0, 999_998), (999_998, 1_999_996), (1_999_996, 2_000_000)]


def test_states_that_are_lost_are_spoken_of(among, caplog):
    def function(communicator):
        for momentum in (0.0, 0.9):
            config = OptimConfig(momentum=momentum)
            on_servers(config, parameters([mx.cpu(0)]), communicator).load_state_arrays({})

    whole(among(1, function))
    assert caplog.text.count("they begin anew") == 1
    caplog.clear()
    own = parameters([mx.cpu(0)])
    Optimizer(OptimConfig(momentum=0.9), own, held(own, [mx.cpu(0)])).load_state_arrays({})
    assert caplog.text.count("begin anew") == 1
