"""Layouts in words."""

import mxnet as mx
import pytest

from mxtrain.parallel.grid import Grid
from mxtrain.parallel.words import in_words


@pytest.mark.parametrize("grid, starts, settings, words", [
    (Grid(1), [0], {}, None),
    (Grid(4), [0], {}, None),
    (Grid(1), [0], dict(zero=1), None),
    (Grid(2, 2), [0], dict(zero=2), "ZeRO 2 over 4 replicas"),
    (Grid(4, stages=4), [0, 3, 6, 7], {},
     # (4 - 1) / (8 + 4 - 1)
     "4 stages of segments 0-2, 3-5, 6, 7-10, on cpu(0), cpu(1), cpu(2), cpu(3); 1f1b, bubble 27%"),
    (Grid(4, stages=2), [0, 5], dict(zero=1, schedule="gpipe"),
     # 4 shards for each replica: 1 / (4 + 1)
     "2 replicas of 2 stages of segments 0-4, 5-10, on cpu(0), cpu(1) and on cpu(2), cpu(3); gpipe, bubble 20%; "
     "ZeRO 1 over 2 replicas"),
    (Grid(2, 2, stages=2), [0, 5], {},
     "2 replicas of 2 stages of segments 0-4, 5-10, on cpu(0), cpu(1) of each process; 1f1b, bubble 20%"),
    (Grid(2, 2, stages=4), [0, 1, 2, 3], {},
     "4 stages of segments 0, 1, 2, 3-10, over 2 processes; 1f1b, bubble 27%"),
    (Grid(1, 6, stages=3), [0, 1, 2], {},
     "2 replicas of 3 stages of segments 0, 1, 2-10, each over 3 processes; 1f1b, bubble 33%"),
])
def test_layouts(grid, starts, settings, words):
    assert in_words(grid, [mx.cpu(c) for c in range(grid.contexts)], starts, 11, 8, **settings) == words
