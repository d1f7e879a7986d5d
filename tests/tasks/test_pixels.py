import mxnet as mx
import numpy as np
import pytest
from mxtrain.tasks.pixels import Normalize, Pixels

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("shape, channels, peak", [
    ((8, 8, 1), 1, 16), ((1, 1, 3), 3, 255), ((1, 9, 1), 1, 255), ((28, 28, 1), 3, 255), ((90, 100, 1), 3, 255), ((5, 7, 3), 3, 255), ((80, 70, 3), 3, 255)])
def test_host_and_device_normalize_alike(shape, channels, peak):
    pixels = Pixels(shape, channels, peak, MEAN[:channels], STD[:channels])
    x = np.random.RandomState(0).randint(0, peak + 1, (3, *shape)).astype("uint8")
    block = Normalize(pixels)
    wide = np.repeat(x, channels // shape[2], axis=3).astype("float64")
    plain = ((wide / peak - MEAN[:channels]) / STD[:channels]).transpose(0, 3, 1, 2)
    on_host = block.on_host(x, mx.cpu(1))
    assert on_host.context == mx.cpu(1) and on_host.dtype == np.float32
    # Tables are rounded once, to half a unit in the last place of numbers below 4; the operators round twice.
    np.testing.assert_allclose(on_host.asnumpy(), plain, rtol=0, atol=2.5e-7)
    np.testing.assert_allclose(block(mx.nd.array(x, dtype="uint8")).asnumpy(), plain, rtol=0, atol=1e-6)


def test_rows_of_a_view_are_taken_as_they_are():
    pixels = Pixels((70, 70, 3), 3, 255, MEAN, STD)
    x = np.random.RandomState(0).randint(0, 256, (6, 70, 70, 3)).astype("uint8")
    block = Normalize(pixels)
    whole = block.on_host(x, mx.cpu()).asnumpy()
    np.testing.assert_array_equal(block.on_host(x[4:], mx.cpu()).asnumpy(), whole[4:])
    np.testing.assert_array_equal(block.on_host(x[::-1], mx.cpu()).asnumpy(), whole[::-1])
