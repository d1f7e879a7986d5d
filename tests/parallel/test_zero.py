"""How parameters are dealt out, and that what replicas hand over and get back is whole."""

from collections import Counter

import mxnet as mx
import numpy as np
import pytest

from mxtrain.optim import clipping
from mxtrain.parallel.communicator import ALONE
from mxtrain.parallel.exact import NotSummable
from mxtrain.parallel.zero import Owners, Part, Scatter, deal
from ranks import among


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(clipping, "CHUNK", 8)


SIZES = {3: 20, 4: 1, 5: 64, 7: 8, 8: 9}


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_every_element_has_one_owner_and_all_own_about_the_same(replicas):
    parts = deal(SIZES, replicas)
    for number, size in SIZES.items():
        own = [part for part in parts if part.parameter == number]
        assert [x for part in own for x in range(part.start, part.stop)] == list(range(size))
        assert all(part.start % 8 == 0 and part.size <= 8 for part in own), "as the norm is cut"
    loads = Counter()
    for part in parts:
        loads[part.owner] += part.size
    assert set(loads) == set(range(replicas)) and max(loads.values()) - min(loads.values()) <= 8


def test_whole_parameters_and_loads_from_before():
    assert deal({0: 20, 1: 9}, 2, whole=True) == [Part(0, 0, 20, 0), Part(1, 0, 9, 1)]
    loads = [30, 0]
    assert deal({0: 20, 1: 9}, 2, True, loads=loads) == [Part(0, 0, 20, 1), Part(1, 0, 9, 1)]
    assert loads == [30, 29]


def test_the_copy_of_a_parameter_has_the_same_owners():
    parts = deal({0: 30}, 3)
    copy = deal({5: 30, 6: 8}, 3, like={5: parts}, loads=[100, 0, 50])
    assert [part.owner for part in copy if part.parameter == 5] == [part.owner for part in parts]


# Two replicas in each process, whose stage has two groups, of parameters 0 and 1, and 2.
GROUPS = [{0: 20, 1: 5}, {2: 11}]
SHAPES = {0: (4, 5), 1: (5,), 2: (11,)}


def gradients(replica, turn, group):
    draw = np.random.RandomState(100 * replica + 10 * turn + group).randn
    return {number: draw(size).astype("float32").reshape(SHAPES[number]) for number, size in GROUPS[group].items()}


def scatter_of(communicator, shards, exact):
    """Runs a batch: shards of each replica of all processes; returns what each here has in the end, by parts."""
    size, loads = 2 * communicator.size, [0] * 2 * communicator.size
    groups = [deal(group, size, loads=loads) for group in GROUPS]
    contexts = [mx.cpu(0), mx.cpu(1)]
    scatter = Scatter({0: Owners(groups, contexts, communicator, 0)}, exact, sum(shards))
    mine = shards[2 * communicator.rank:2 * communicator.rank + 2]
    scatter.begin(mine, max(shards))
    for turn in range(max(mine)):
        for here, count in enumerate(mine):
            for group in (1, 0) if turn < count else ():
                given = gradients(2 * communicator.rank + here, turn, group)
                scatter.hand(0, here, group, {number: mx.nd.array(array, ctx=contexts[here])
                                              for number, array in given.items()})
    scatter.end()
    found = {}
    for here in (0, 1):
        total = scatter.sums[0, here].finish().asnumpy()
        found.update({part: total[place] for part, place in scatter.parts(0, here).items()})
        assert all(part.owner == 2 * communicator.rank + here for part in scatter.parts(0, here))
    return found


def by_numpy(shards):
    totals = {number: np.zeros(size) for group in GROUPS for number, size in group.items()}
    for replica, count in enumerate(shards):
        for turn in range(count):
            for group in (0, 1):
                for number, array in gradients(replica, turn, group).items():
                    totals[number] += array.ravel().astype("float64")
    return totals


class Threads:
    """Processes that are threads, with what zero asks of a communicator."""

    def __init__(self, communicator):
        self.rank, self.size, self._communicator = communicator.rank, communicator.size, communicator

    def reduce_scatter(self, array, tag):
        total = self._communicator.total(array.asnumpy().astype("float64"))
        return mx.nd.array(np.split(total, self.size)[self.rank], dtype=array.dtype)

    def all_gather(self, array, tag):
        table = np.zeros((self.size, array.size))
        table[self.rank] = array.asnumpy()
        return mx.nd.array(self._communicator.total(table).ravel(), dtype=array.dtype)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shards", [(3, 3), (2, 1), (1, 0), (2, 2, 2, 2), (3, 3, 2, 2), (2, 1, 0, 0), (1, 1, 1, 0, 0, 0)])
def test_gradients_are_summed_at_their_owners(shards, exact):
    """Also where replicas, or whole processes, have fewer shards than others."""
    expected = by_numpy(shards)
    if len(shards) == 2:
        found = scatter_of(ALONE, shards, exact)
    else:
        results = among(len(shards) // 2, lambda c: scatter_of(Threads(c), shards, exact))
        assert all(isinstance(result, dict) for result in results), results
        found = {part: values for result in results for part, values in result.items()}
    assert sum(part.size for part in found) == 36
    for part, values in found.items():
        exactly = expected[part.parameter][part.start:part.stop]
        if exact:  # float64 sums of so few numbers of one size are off by far less than a float32 rounds to
            np.testing.assert_array_equal(values, exactly.astype("float32"))
        else:  # up to eight float32 numbers of size 1 to 3
            np.testing.assert_allclose(values, exactly, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("number", [0, 2])
def test_what_cannot_be_summed_is_seen_in_all_processes(monkeypatch, number):
    real = gradients

    def with_nan(replica, turn, group):
        given = real(replica, turn, group)
        if (replica, turn) == (1, 1) and number in given:
            given[number].ravel()[-1] = np.nan
        return given

    monkeypatch.setitem(globals(), "gradients", with_nan)
    assert [type(result) for result in among(2, lambda c: scatter_of(Threads(c), (2, 2, 2, 2), True))] == [NotSummable] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_updated_parts_come_to_all_replicas(size):
    """Every replica has written its number into what it owns."""
    loads = [0] * 2 * size
    groups = [deal(group, 2 * size, loads=loads) for group in GROUPS]

    def function(communicator):
        contexts = [mx.cpu(0), mx.cpu(1)]
        owners = Owners(groups, contexts, Threads(communicator) if size > 1 else ALONE, 0)
        weights = [{number: mx.nd.zeros(shape, ctx=ctx) for number, shape in SHAPES.items()} for ctx in contexts]
        for here, own in enumerate(weights):
            for part in (part for group in owners.owned(here) for part in group):
                own[part.parameter].reshape((-1,))[part.start:part.stop] = 2 * communicator.rank + here
        owners.share(weights)
        return [{number: array.asnumpy().ravel() for number, array in own.items()} for own in weights]

    for replicas in among(size, function) if size > 1 else [function(ALONE)]:
        for own in replicas:
            for part in (part for group in groups for part in group):
                assert (own[part.parameter][part.start:part.stop] == part.owner).all()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_are_brought_together_from_their_owners(size):
    """For one replica after the other; another one takes part when its process has it do so."""
    loads, draw = [0] * 2 * size, np.random.RandomState(7).randn
    groups = [deal(group, 2 * size, loads=loads) for group in GROUPS]
    whole = {number: draw(*shape).astype("float32") for number, shape in SHAPES.items()}

    def function(communicator):
        contexts = [mx.cpu(0), mx.cpu(1)]
        owners = Owners(groups, contexts, Threads(communicator) if size > 1 else ALONE, 0)
        kept = [{part: mx.nd.array(whole[part.parameter].ravel()[part.start:part.stop], ctx=contexts[here])
                 for group in owners.owned(here) for part in group} for here in (0, 1)]
        found = []
        for group, sizes in enumerate(GROUPS):
            weights = {number: mx.nd.zeros(SHAPES[number], ctx=contexts[1]) for number in sizes}
            owners.gather(group, 1, kept, weights if group >= communicator.rank else {})
            found.append({number: array.asnumpy() for number, array in weights.items()})
        return found

    for rank, found in enumerate(among(size, function) if size > 1 else [function(ALONE)]):
        for group, weights in enumerate(found):
            for number, array in weights.items():
                np.testing.assert_array_equal(array, whole[number] if group >= rank else 0 * whole[number])
