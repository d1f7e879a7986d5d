"""Sums over contexts, by every transport within a process."""

import mxnet as mx
import numpy as np
import pytest

from mxtrain.errors import UserError
from mxtrain.parallel.communicator import InProcess

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
    assert communicator.agree(15) == 15
