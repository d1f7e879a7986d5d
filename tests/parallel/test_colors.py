"""Color images through the preprocessing of the image task: their arrays may be in oneDNN's layout, which views cannot bear."""

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import loss, nn

from mxtrain.parallel.communicator import InProcess
from mxtrain.parallel.layout import Layout
from mxtrain.tasks.heads import heads_for
from mxtrain.tasks.pixels import Pixels, preprocess

PIXELS = Pixels((32, 32, 3), 3, 255, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def gradients(count, rows):
    contexts = [mx.cpu(i) for i in range(count)]
    rng = np.random.RandomState(rows)
    x, y = rng.randint(0, 256, (rows, 32, 32, 3)).astype("uint8"), rng.randint(0, 3, rows)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, strides=2), nn.BatchNorm(), nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Dense(3))
    mx.random.seed(1)
    net.initialize(mx.init.Xavier(), ctx=contexts)
    sample = [preprocess(PIXELS)(mx.nd.array(x[:2], dtype="uint8"))]
    net(*sample)
    layout = Layout(net, *heads_for(loss.SoftmaxCrossEntropyLoss(), 3), contexts, 8, exact=True,
                    preprocess=preprocess(PIXELS), sample=sample)
    layout.forward_backward((x, y), 0)
    InProcess("device", contexts).allreduce(layout.sums)
    layout.finish(8)
    return [gradient.asnumpy() for gradient in (held.gradient for held in layout.held[0])]


@pytest.mark.parametrize("rows", [9, 16, 21])
def test_exact_gradients_of_color_images(rows):
    expected = gradients(1, rows)
    for count in (2, 3, 4):
        for a, b in zip(gradients(count, rows), expected):
            np.testing.assert_array_equal(a, b)
