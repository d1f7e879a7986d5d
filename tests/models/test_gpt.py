"""The GPT against plain numpy, its causality, its start and its plan."""

import re
from math import erf, prod, sqrt
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

from mxtrain import config
from mxtrain.errors import UserError
from mxtrain.models import plan, weights
from mxtrain.models.gpt import GPT
from mxtrain.models.gpt_settings import GPTConfig
from mxtrain.tasks.language import TokenLoss
from mxtrain.train.setup import initialize

VOCABULARY, SHAPE = 11, GPTConfig(layers=2, heads=2, width=8, context=6)
IDS = np.random.RandomState(0).randint(0, VOCABULARY, (3, 6)).astype("int32")
LABELS = np.random.RandomState(1).randint(0, VOCABULARY, (3, 6)).astype("int32")


@pytest.fixture(scope="module")
def net():
    """With weights far from those of a start, so that every part of the network matters."""
    net, random = GPT(VOCABULARY, SHAPE), np.random.RandomState(2)
    initialize(net, [mx.cpu()], 0)
    for parameter in net.collect_params().values():
        start = 1.0 if parameter.name.endswith("gamma") else 0.0
        parameter.set_data(mx.nd.array(start + 0.3 * random.randn(*parameter.shape)))
    return net


def scores_of(net, ids):
    return net(mx.nd.array(ids, dtype="int32")).asnumpy()


# The network in numpy, in float64. w: arrays by name.


def norm(x, w, name):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * w[f"{name}.gamma"] + w[f"{name}.beta"]


def dense(x, w, name):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def attention(x, w, name):
    query, key, value = np.split(dense(x, w, f"{name}.qkv"), 3, axis=-1)
    time, size = x.shape[1], SHAPE.width // SHAPE.heads
    found = np.zeros_like(x)
    for row in range(len(x)):
        for first in range(0, SHAPE.width, size):
            own = slice(first, first + size)
            for t in range(time):
                scores = [query[row, t, own] @ key[row, s, own] / sqrt(size) for s in range(t + 1)]
                share = np.exp(scores) / np.exp(scores).sum()
                found[row, t, own] = share @ value[row, :t + 1, own]
    return dense(found, w, f"{name}.out")


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(erf)(x / sqrt(2)))


def forward(ids, w):
    x = w["embeddings.token"][ids] + w["embeddings.position"][:ids.shape[1]]
    for i in range(SHAPE.layers):
        x = x + attention(norm(x, w, f"blocks.{i}.norm1"), w, f"blocks.{i}.attention")
        hidden = gelu(dense(norm(x, w, f"blocks.{i}.norm2"), w, f"blocks.{i}.mlp.0"))
        x = x + dense(hidden, w, f"blocks.{i}.mlp.2")
    return dense(norm(x, w, "output.norm"), w, "output.scores")


def losses(ids, labels, w):
    scores = forward(ids, w)
    log_p = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    return -np.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0].mean(axis=1)


def arrays_of(net):
    return {name: p.data().asnumpy().astype("float64") for name, p in weights.parameters(net).items()}


def test_forward_is_that_of_numpy(net):
    # float32 against float64: a few hundred roundings of 6e-8 on scores of a size of 1 to 3.
    np.testing.assert_allclose(scores_of(net, IDS), forward(IDS, arrays_of(net)), rtol=1e-4, atol=1e-5)


def test_loss_and_gradient_are_those_of_numpy(net):
    loss, w, random = TokenLoss(), arrays_of(net), np.random.RandomState(3)
    with autograd.record():
        value = loss(net(mx.nd.array(IDS, dtype="int32")), mx.nd.array(LABELS, dtype="int32"))
    value.backward()
    np.testing.assert_allclose(value.asnumpy(), losses(IDS, LABELS, w), rtol=1e-5)
    for name, parameter in weights.parameters(net).items():
        # Along two random directions, by a central difference in float64, whose own error is about 1e-9.
        for _ in range(2):
            direction = random.randn(*parameter.shape)
            ends = [losses(IDS, LABELS, {**w, name: w[name] + step * direction}).sum() for step in (1e-4, -1e-4)]
            found = (parameter.grad().asnumpy() * direction).sum()
            assert found == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=2e-4, abs=1e-5), name


@pytest.mark.parametrize("compiled", [False, True])
def test_no_output_sees_a_later_token(net, compiled):
    net.hybridize(compiled)
    before = scores_of(net, IDS)
    for t in range(IDS.shape[1]):
        changed = IDS.copy()
        changed[:, t] = (changed[:, t] + 1) % VOCABULARY
        after = scores_of(net, changed)
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any(axis=(0, 2)).all()  # and all later ones see it
    net.hybridize(False)


def test_shorter_sequences_have_the_first_outputs_of_longer_ones(net):
    # Another number of rows in a product may round otherwise.
    np.testing.assert_allclose(scores_of(net, IDS[:, :4]), scores_of(net, IDS)[:, :4], rtol=1e-5, atol=1e-6)
    with pytest.raises(mx.base.MXNetError):
        scores_of(net, np.zeros((1, SHAPE.context + 1), "int32"))


def test_large_scores_of_attention_overflow_nothing():
    net = GPT(VOCABULARY, SHAPE)
    initialize(net, [mx.cpu()], 0)
    net.blocks[0].attention.qkv.weight.set_data(1e4 * net.blocks[0].attention.qkv.weight.data())
    with autograd.record():
        loss = TokenLoss()(net(mx.nd.array(IDS, dtype="int32")), mx.nd.array(LABELS, dtype="int32"))
    loss.backward()
    assert np.isfinite(loss.asnumpy()).all()
    assert all(np.isfinite(p.grad().asnumpy()).all() for p in net.collect_params().values())


def test_it_starts_like_gpt2():
    shape = GPTConfig(layers=8, heads=2, width=64, context=32)
    net = GPT(256, shape)
    initialize(net, [mx.cpu()], 0)
    for name, array in arrays_of(net).items():
        if name.endswith(("bias", "beta")):
            assert not array.any(), name
        elif name.endswith("gamma"):
            assert (array == 1).all(), name
        else:
            residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
            # Of the 2,048 and more numbers of an array the deviation is known to 1/sqrt(2 * 2048): three times that.
            assert array.std() == pytest.approx(0.02 / (sqrt(2 * 8) if residual else 1), rel=0.05), name
    # So it begins with nearly equal chances for all tokens: scores deviate by 0.02 * sqrt(64), over 18 places by 0.04.
    loss = TokenLoss()(net(mx.nd.array(IDS, dtype="int32")), mx.nd.array(LABELS, dtype="int32"))
    assert loss.asnumpy().mean() == pytest.approx(np.log(256) + 0.16**2 / 2, abs=0.15)


def test_its_segments_are_embeddings_blocks_and_output(net):
    assert plan.segments(net) == [net.embeddings, *net.blocks, net.output]
    assert plan.blocks(net) == [[segment] for segment in plan.segments(net)]
    plan.check(net, plan.segments(net), mx.nd.array(IDS, dtype="int32"))
    assert not any(map(plan.draws, plan.segments(net)))
    drawing = GPT(VOCABULARY, GPTConfig(layers=2, heads=2, width=8, context=6, dropout=0.1))
    assert [plan.draws(segment) for segment in plan.segments(drawing)] == [True, True, True, False]


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "scripts" / "configs").glob("gpt-*.yaml")),
                         ids=lambda path: path.stem)
def test_configurations_have_the_size_that_they_state(path):
    shape = config.build(config.load(path)).gpt
    stated = float(re.search(r"([\d.,]+) million parameters", path.read_text())[1].replace(",", ""))
    net = GPT(256, shape)  # allocates nothing
    count = sum(prod(parameter.shape) for parameter in net.collect_params().values())
    assert round(count / 1e6, 1) == stated
    width, blocks = shape.width, 12 * shape.width**2 + 13 * shape.width
    assert count == (2 * 256 + shape.context) * width + shape.layers * blocks + 2 * width


@pytest.mark.parametrize("given, says", [
    ({"heads": 3, "width": 8}, "--heads 3: must divide --width 8"), ({"layers": 0}, "--layers 0: must be 1 or more"),
    ({"context": -1}, "--context -1: must be 1 or more"),
    ({"dropout": 1.0}, "--dropout 1.0: must be from 0 to below 1"),
])
def test_shapes_that_cannot_be(given, says):
    with pytest.raises(UserError, match=re.escape(says)):
        GPTConfig(**given)
