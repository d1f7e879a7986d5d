"""What communicators make of vectors, for tests of one process and of several."""

import mxnet as mx
import numpy as np

DTYPES = ("float32", "float64")


def parts(size, count, dtype, seed=0):
    """(size, count) numbers whose sums are not rounded in any order: multiples of 1, or for float64 of 2**-20 and up to
    2**31, as exact sums have them."""
    values = np.random.RandomState(seed).randint(-2**19, 2**19, (2, size, count))
    return (values[0] + (dtype == "float64") * (values[1] * 2.0**-20 + values[0] * 2.0**11)).astype(dtype)


def check_vectors(communicator, seed=0):
    """reduce_scatter and all_gather of a communicator against numpy, bit for bit, several in flight."""
    size, rank, expected, got = communicator.size, communicator.rank, [], []
    for dtype in DTYPES:
        for count in (1, 5):
            values = parts(size, size * count, dtype, seed)
            given = mx.nd.array(values[rank], dtype=dtype)
            part = communicator.reduce_scatter(given)
            got += [part, communicator.all_gather(part), given]
            expected += [values.sum(axis=0)[rank * count:(rank + 1) * count], values.sum(axis=0), values[rank]]
        odd = np.array([[-0.0, 0.0, np.nan, np.inf, 1 + number] for number in range(size)], dtype)
        got.append(communicator.all_gather(mx.nd.array(odd[rank], dtype=dtype)))
        expected.append(odd.ravel())
    for one, other in zip(got, expected):
        assert one.dtype == other.dtype and one.asnumpy().tobytes() == other.tobytes()
    return True
