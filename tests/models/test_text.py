"""The network for bags of words: against numpy, as a chain of segments, and its place among the networks."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

from mxtrain.errors import UserError
from mxtrain.models import plan, zoo
from mxtrain.models.text import EmbeddingMean, bag

IDS = np.array([[1, 3, 3, 0], [2, 0, 0, 0], [0, 0, 0, 0], [4, 1, 2, 3]], "int32")


@pytest.mark.parametrize("dtype", ["int32", "float32"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_the_mean_of_the_vectors(dtype, hybrid):
    block = EmbeddingMean(4, 3)
    block.initialize()
    if hybrid:
        block.hybridize()
    with autograd.record():
        out = block(mx.nd.array(IDS, dtype=dtype))
    weight = block.weight.data().asnumpy()
    expected = [np.mean(weight[row[row > 0]], axis=0) if row.any() else np.zeros(3) for row in IDS]
    np.testing.assert_allclose(out.asnumpy(), expected, rtol=1e-6, atol=1e-7)  # float32 sums of four
    out.backward()
    gradient = np.zeros((5, 3))
    for row in IDS:
        for i in row[row > 0]:
            gradient[i] += 1 / (row > 0).sum()
    np.testing.assert_allclose(block.weight.grad().asnumpy(), gradient, rtol=1e-6)
    assert not block.weight.grad().asnumpy()[0].any()  # what fills up learns nothing


def test_it_is_a_chain():
    net = bag(3, 4)
    net.initialize()
    segments = plan.segments(net)
    assert len(segments) == 4 and [plan.draws(one) for one in segments] == [False, True, False, False]
    plan.check(net, segments, mx.nd.array(IDS, dtype="int32"))
    assert len(plan.blocks(net)) == 3  # grouped by layers with weights


def test_networks_for_texts_and_for_images_are_kept_apart():
    assert zoo.create_text(zoo.default_text_name(), 3, 10)(mx.sym.var("data")) is not None
    with pytest.raises(UserError, match="--model bag: is a network for texts"):
        zoo.create("bag", 10)
    with pytest.raises(UserError, match="--model lenet: is a network for images; for texts there are bag"):
        zoo.create_text("lenet", 2, 10)
    with pytest.raises(UserError, match="--model bags: no such network"):
        zoo.create_text("bags", 2, 10)
    assert "bag" not in zoo.names()
