"""Sums over contexts, by every transport within a process."""

import mxnet as mx
import numpy as np
import pytest

from mxtrain import config
from mxtrain.errors import Elsewhere, UserError
from mxtrain.parallel.communicator import InProcess
from mxtrain.train.metrics import Part, whole
from mxtrain.train.setup import part_for
from ranks import among

SHAPES = [(3,), (2, 5), (1,)]


@pytest.mark.parametrize("kvstore", ["none", "local", "device"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_copy_becomes_the_sum(kvstore, count, dtype):
    contexts = [mx.cpu(i) for i in range(count)]
    communicator = InProcess(kvstore, contexts)
    for round_ in range(2):  # the first call also makes the store's own arrays
        # Small whole numbers, so that any order of additions gives the same.
        values = np.random.RandomState(round_).randint(-50, 50, (count, 3, 10)).astype(dtype)
        arrays = [[mx.nd.array(values[r, k].ravel()[:np.prod(shape)].reshape(shape), ctx=ctx, dtype=dtype)
                   for r, ctx in enumerate(contexts)] for k, shape in enumerate(SHAPES)]
        communicator.allreduce(arrays)
        for k, copies in enumerate(arrays):
            expected = values[:, k].sum(axis=0).ravel()[:np.prod(SHAPES[k])].reshape(SHAPES[k])
            for ctx, copy in zip(contexts, copies):
                assert copy.context == ctx
                np.testing.assert_array_equal(copy.asnumpy(), expected)


@pytest.mark.parametrize("kvstore", ["none", "local", "device"])
def test_float64_is_carried_whole(kvstore):
    # 2**31 + 2**-20 needs 52 digits: what an exact sum needs, and float32 has not.
    contexts = [mx.cpu(i) for i in range(3)]
    values = [2.0**31, 2.0**-20, -(2.0**30)]
    copies = [mx.nd.array([value], ctx=ctx, dtype="float64") for value, ctx in zip(values, contexts)]
    InProcess(kvstore, contexts).allreduce([copies])
    assert [copy.asscalar() for copy in copies] == [2.0**30 + 2.0**-20] * 3


@pytest.mark.parametrize("kvstore", ["none", "local", "device"])
def test_nothing_to_sum(kvstore):
    InProcess(kvstore, [mx.cpu(0), mx.cpu(1)]).allreduce([])


def test_nccl_needs_gpus():
    with pytest.raises(UserError, match="--kvstore nccl"):
        InProcess("nccl", [mx.cpu(0)])


def test_a_single_process_agrees_with_itself():
    communicator = InProcess("none", [mx.cpu(0)])
    assert (communicator.rank, communicator.size) == (0, 1)
    assert communicator.total(np.array([15.0])).tolist() == [15.0]
    assert communicator.share({"a": [1, "é"]}) == {"a": [1, "é"]}
    communicator.check_same("x", "is {}".format)
    assert communicator.together(lambda: 3) == 3
    with pytest.raises(UserError, match="of our own"):
        communicator.together(lambda: (_ for _ in ()).throw(UserError("of our own")))


def test_what_is_made_of_sums():
    value = {"list": [1, 2.5, None], "text": "Grüße", "large": 2**53}
    assert among(3, lambda c: c.share(value if c.rank == 0 else "other")) == [value] * 3
    assert among(3, lambda c: c.gather([c.rank, "ä"] if c.rank != 1 else None)) == [[[0, "ä"], None, [2, "ä"]]] * 3
    assert among(2, lambda c: c.gather(None)) == [[None] * 2] * 2
    assert among(3, lambda c: c.check_same("data", str)) == [None] * 3
    first, *others = among(3, lambda c: c.check_same(min(c.rank, 1), "rank 0 has {}".format))
    assert isinstance(first, Elsewhere) and [str(error) for error in others] == ["rank 0 has 0"] * 2
    assert all(isinstance(error, UserError) for error in others)


def test_a_failure_of_one_is_a_failure_of_all():
    def function(communicator):
        def part():
            if communicator.rank == 1:
                raise UserError("no such file")
            return communicator.rank

        return communicator.together(part)

    first, second, third = among(3, function)
    assert isinstance(second, UserError) and str(second) == "no such file"
    assert isinstance(first, Elsewhere) and isinstance(third, Elsewhere) and "1 of 3" in str(first)


def test_a_failure_of_all_is_for_rank_0_to_say():
    def function(communicator):
        def part():
            raise UserError("no such file")

        return communicator.together(part)

    first, *others = among(3, function)
    assert isinstance(first, UserError) and str(first) == "no such file"
    assert [type(error) for error in others] == [Elsewhere] * 2


def test_rows_of_several_processes_become_whole_again():
    """Two batches of five and three rows over three processes, of which one has none; row 3 of the first is bad."""
    values = [np.arange(10.0).reshape(5, 2), 100 + np.arange(6.0).reshape(3, 2)]

    def function(communicator):
        own = [([0, 1], [0]), ([2, 4], [1, 2]), ([], [])][communicator.rank]
        parts = [Part(len(batch), np.array(rows, int), batch[rows] if rows else None) for batch, rows in zip(values, own)]
        return [block.tolist() for block in whole(parts, communicator)]

    assert among(3, function) == [[np.delete(values[0], 3, axis=0).tolist(), values[1].tolist()]] * 3


def test_batches_of_which_nobody_knows_a_row():
    parts = [Part(5, np.array([], int), None)] * 2
    assert among(2, lambda c: whole(parts, c)) == [[], []]


@pytest.mark.parametrize("given, allowed", [({}, False), ({"shards": 6}, True), ({"exact": True}, True),
                                            ({"exact": True, "audit": 0.1}, False)])
def test_other_numbers_of_contexts(given, allowed):
    """One process has one, the other two: without --shards they would cut a batch into other shards."""
    results = among(2, lambda communicator: part_for(config.build(given), communicator.rank + 1, communicator))
    if allowed:
        assert results[0](20) == (0, 10) and results[1](20) == (10, 20)
    else:
        assert isinstance(results[0], Elsewhere) and "2 contexts for rank 1 and 1 for rank 0" in str(results[1])
