"""Slices of layers: what they give, added up, is what the whole layer gives, and so are gradients."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

from mxtrain.errors import UserError
from mxtrain.models.gpt import GPT
from mxtrain.models.gpt_settings import GPTConfig
from mxtrain.models.split import Cut, Slices, TwoLayers, joined
from mxtrain.tasks.language import TokenLoss

RANDOM = np.random.RandomState(3)
VOCABULARY, ROWS, TIME, WIDTH = 12, 3, 5, 8


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("axis, runs", [(0, 1), (0, 3), (1, 1), (1, 2)])
def test_slices_make_up_the_whole(size, axis, runs):
    whole = RANDOM.rand(24, 16)
    cuts = [Cut(axis, rank, size, runs) for rank in range(size)]
    slices = [cut.of(whole) for cut in cuts]
    assert all(own.size == whole.size // size for own in slices)
    np.testing.assert_array_equal(joined(slices, cuts[0]), whole)


def test_a_slice_is_of_every_run():
    whole = np.arange(12)  # three runs of 4: the second half of each
    assert Cut(0, 1, 2, 3).of(whole).tolist() == [2, 3, 6, 7, 10, 11]


def gpt(dropout=0.0):
    net = GPT(VOCABULARY, GPTConfig(layers=1, heads=4, width=WIDTH, context=TIME, dropout=dropout))
    net.initialize()
    for parameter in net.collect_params().values():
        parameter.set_data(mx.nd.array(RANDOM.randn(*parameter.shape)))
    return net


def ids():
    return mx.nd.array(RANDOM.randint(0, VOCABULARY, (ROWS, TIME)), dtype="int32")


def vectors(width=WIDTH):
    return mx.nd.array(RANDOM.randn(ROWS, TIME, width))


def dense(units, activation=None):
    net = nn.HybridSequential(prefix="")
    net.add(TwoLayers(16, units, activation or "tanh", in_units=WIDTH))
    net.initialize(mx.init.Normal(1.0))
    return net[0]


def sliced(parts, size):
    """What a function makes of the slices of every rank, filled."""
    slices = [Slices(rank, size) for rank in range(size)]
    made = [parts(own) for own in slices]
    for own in slices:
        for parameter, (whole, cut) in own.origins.items():
            values = whole.data().asnumpy()
            parameter.set_data(mx.nd.array(cut.of(values) if cut else values))
    return slices, made


def with_gradient(x):
    x = x.copy()
    if x.ndim == 3:  # tokens have none
        x.attach_grad()
    return x


def reference(segment, x, weights):
    """(output, gradient of the input, gradients of the parameters) of sum(weights * output)."""
    x = with_gradient(x)
    with autograd.record():
        y = segment(x)
        (y * weights).sum().backward()
    return y, x.grad, {parameter: parameter.grad().asnumpy() for parameter in segment.collect_params().values()}


def assert_close(got, expected):
    """Sums of at most a few hundred float32 products."""
    expected = expected.asnumpy() if isinstance(expected, mx.nd.NDArray) else expected
    got = got.asnumpy() if isinstance(got, mx.nd.NDArray) else got
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("make, x", [
    (lambda: dense(6), vectors()), (lambda: dense(6, "relu"), vectors()), (lambda: gpt().embeddings, ids()),
    (lambda: gpt().blocks[0], vectors())], ids=["layers", "relu", "embeddings", "decoder"])
@pytest.mark.parametrize("size", [2, 4])
def test_split_segments_give_what_whole_ones_give(make, x, size):
    """Piece by piece, by hand: outputs are added up forward, gradients of the inputs backward."""
    segment = make()
    shape = segment(x).shape
    weights = mx.nd.array(RANDOM.randn(*shape))
    y, x_gradient, gradients = reference(segment, x, weights)

    slices, parts = sliced(lambda own: segment.split_layers(own), size)
    passes, inputs = [], [with_gradient(x) for _ in range(size)]
    for pieces in zip(*parts):
        with autograd.record():
            outputs = [piece(own) for piece, own in zip(pieces, inputs)]
        passes.append((inputs, outputs))
        inputs = [with_gradient(sum(output.detach() for output in outputs)) for _ in range(size)]
    assert_close(inputs[0], y)
    gradient = weights
    for inputs, outputs in reversed(passes):
        for output in outputs:
            output.backward(gradient)
        gradient = sum(own.grad for own in inputs) if inputs[0].grad is not None else None
    if x_gradient is not None:
        assert_close(gradient, x_gradient)

    for whole, expected in gradients.items():
        own = [(parameter, origin.cut) for of_rank in slices for parameter, origin in of_rank.origins.items()
               if origin.whole is whole]
        values = [parameter.grad().asnumpy() for parameter, _ in own]
        assert_close(joined(values, own[0][1]) if own[0][1] else sum(values), expected)
        assert all(cut is None or parameter.shape[cut.axis] * size == whole.shape[cut.axis] for parameter, cut in own)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("scale", [1.0, 200.0])  # exp(200) is no float32
def test_a_loss_of_split_scores(size, scale):
    """Only size + 1 numbers for each place go from one to the other."""
    net = gpt()
    x, label = vectors() * scale, ids()
    net.output(x)
    whole = net.output.scores.weight
    x.attach_grad()
    with autograd.record():
        loss = TokenLoss()(net.output(x), label)
    loss.backward()
    slices, made = sliced(lambda own: net.output.split_scores(own), size)
    losses = [TokenLoss().split_loss(own, count) for own, (_, count) in zip(slices, made)]
    inputs = [x.detach().copy() for _ in range(size)]
    for own in inputs:
        own.attach_grad()
    with autograd.record():
        shares = [share(block(own), label) for (block, _), (share, _), own in zip(made, losses, inputs)]
    total = sum(share.detach() for share in shares)
    assert total.shape == (size + 1, ROWS, TIME)
    total.attach_grad()
    with autograd.record():
        own_loss = losses[0][1](total)
    own_loss.backward()
    for share in shares:
        share.backward(total.grad)
    assert_close(own_loss, loss)
    assert_close(sum(own.grad for own in inputs), x.grad)
    of_scores = [parameter for own in slices for parameter, origin in own.origins.items() if origin.whole is whole]
    assert_close(np.concatenate([parameter.grad().asnumpy() for parameter in of_scores]), whole.grad())


def test_attention_drops_what_the_whole_one_drops():
    block, x = gpt(dropout=0.4).blocks[0], vectors()
    block(x)

    def passed(function):
        mx.random.seed(4, ctx=mx.cpu())
        with autograd.train_mode():
            return function(x)

    _, parts = sliced(lambda own: block.split_layers(own)[0], 2)
    got = sum(passed(part) for part in parts)
    assert_close(got, passed(lambda x: x + block.dropout(block.attention(block.norm1(x)))))
    assert np.abs((got - passed(lambda x: x + block.attention(block.norm1(x)))).asnumpy()).max() > 0.01


@pytest.mark.parametrize("size, config, words", [
    (3, dict(width=12, heads=3), "--tp 3: the vocabulary of 13 tokens cannot be split evenly; a multiple of 3 can"),
    (2, dict(width=9, heads=3, vocabulary=12), "--tp 2: 3 heads cannot be split"),
])
def test_numbers_that_do_not_divide(size, config, words):
    config = dict(config)
    net = GPT(config.pop("vocabulary", 13), GPTConfig(layers=1, context=TIME, **config))
    net.initialize()
    net(ids())
    with pytest.raises(UserError) as error:
        for segment in net.plan()[:-1]:
            segment.split_layers(Slices(0, size))
    assert words in str(error.value)


def test_layers_that_do_not_divide():
    net = TwoLayers(9, 4, in_units=2, prefix="mine_")
    net.initialize()
    with pytest.raises(UserError, match="--tp 2: the 9 outputs of mine_hidden cannot be split"):
        net.split_layers(Slices(0, 2))


def test_an_activation_of_a_sum_cannot_be_of_its_parts():
    layer = nn.Dense(4, activation="relu", in_units=2)
    layer.initialize()
    with pytest.raises(UserError, match="its activation does not see"):
        Slices(0, 2).row(layer)
