import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

from mxtrain.errors import UserError
from mxtrain.parallel.communicator import ALONE
from mxtrain.parallel.grid import Grid
from mxtrain.parallel.passing import Boundary, Passing, boundaries


def chain(*blocks):
    net = nn.HybridSequential(prefix="")
    net.add(*blocks)
    net.initialize()
    return list(net)


def test_what_comes_into_each_stage():
    segments = chain(nn.Conv2D(3, 3), nn.Flatten(), nn.Dense(5), nn.HybridLambda(lambda F, x: F.reshape(x, (-1, 1))),
                     nn.Dense(2))
    x = mx.nd.zeros((2, 1, 6, 6))
    assert boundaries(segments, [0], [x]) == []
    assert boundaries(segments, [0, 1, 3, 4], [x]) == [
        Boundary(1, (3, 4, 4), np.float32), Boundary(1, (5,), np.float32), Boundary(5, (1,), np.float32)]
    assert Boundary(5, (1,), np.float32).shape(3) == (15, 1)


def test_what_has_no_rows_is_not_handed_on():
    segments = chain(nn.Dense(3), nn.HybridLambda(lambda F, x: F.sum(x, axis=0, keepdims=True)), nn.Dense(2))
    with pytest.raises(UserError, match=r"--pp 2: segment 1 \(HybridLambda\) does not give one array with as many rows"):
        boundaries(segments, [0, 2], [mx.nd.zeros((2, 3))])


def test_arrays_go_to_the_context_of_the_stage():
    grid = Grid(4, stages=2)  # two replicas
    passing = Passing(grid, [mx.cpu(c) for c in range(4)], ALONE, [Boundary(1, (3,), np.float32)])
    assert not passing.is_there(3, 0, "forward 0")
    passing.give(2, 1, "forward 0", mx.nd.ones((2, 3), ctx=mx.cpu(2)))
    assert passing.is_there(3, 0, "forward 0") and not passing.is_there(1, 0, "forward 0")
    array = passing.take(3, 0, "forward 0", 2)
    assert array.context == mx.cpu(3) and not passing.is_there(3, 0, "forward 0")
    passing.give(1, 0, "backward 0", array.as_in_context(mx.cpu(1)))
    assert passing.take(0, 1, "backward 0", 2).context == mx.cpu(0)


def test_arrays_are_added_from_both_sides():
    passing = Passing(Grid(2, stages=2), [mx.cpu(0), mx.cpu(1)], ALONE, [])
    one, other = mx.nd.array([1, 2], ctx=mx.cpu(0)), mx.nd.array([10, 20], ctx=mx.cpu(1))
    passing.add_from_each_other(0, (0, 1), ([one], [other]))
    assert one.asnumpy().tolist() == other.asnumpy().tolist() == [11, 22]
