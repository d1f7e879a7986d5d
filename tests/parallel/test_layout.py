"""Shards, and the gradient of a batch over contexts: the sum of its samples' gradients, by plain numpy."""

from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from mxtrain.data.loader import Batch
from mxtrain.parallel.communicator import InProcess
from mxtrain.parallel.exact import NotSummable
from mxtrain.parallel.layout import Layout
from mxtrain.parallel.shards import assigned, part_of, shard_bounds
from mxtrain.tasks.heads import heads_for

FEATURES, CLASSES = 6, 4
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
# float32 against float64: a probability is off by up to 1e-6 (MXNet's exponential is an approximation), and 16
# samples add up. A sample that is lost, or counts twice, makes a difference of 1e-2 and more.
TOLERANCE = dict(rtol=1e-5, atol=3e-5)

generator = np.random.RandomState(3)
WEIGHT = generator.randn(CLASSES, FEATURES).astype("float32")
BIAS = generator.randn(CLASSES).astype("float32")
X = generator.randn(16, FEATURES).astype("float32")
Y = generator.randint(0, CLASSES, 16).astype("int32")


def contexts(count):
    return [mx.cpu(i) for i in range(count)]


def linear(ctx):
    net = nn.Dense(CLASSES, in_units=FEATURES, prefix="")
    net.initialize(ctx=ctx)
    net.weight.set_data(mx.nd.array(WEIGHT))
    net.bias.set_data(mx.nd.array(BIAS))
    return net


def layout_of(net, ctx, shards, loss=LOSS, **options):
    return Layout(net, *heads_for(loss, CLASSES), ctx, shards, **options)


def gradients_of(layout):
    return [[held.gradient for held in own] for own in layout.held]


def run(layout, batch, update=0, kvstore="device"):
    """One batch; returns (reports (rows, 2), [gradients by name on each context])."""
    reports = layout.forward_backward(batch, update)
    InProcess(kvstore, layout.contexts).allreduce(layout.sums)
    layout.finish(sum(map(bool, layout.rows_of(batch))))
    gradients = [{p.name: g.asnumpy().copy() for p, g in zip(layout.parameters, own)} for own in gradients_of(layout)]
    return np.concatenate([report.asnumpy() for report in reports]), gradients


def by_numpy(x, y):
    """Losses of the samples, and the gradients of their sum."""
    x = x.astype("float64")
    scores = x @ WEIGHT.astype("float64").T + BIAS
    shifted = scores - scores.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    error = np.exp(log_p) - np.eye(CLASSES)[y]
    hits = scores.argmax(axis=1) == y
    return -log_p[np.arange(len(y)), y], hits, {"weight": error.T @ x, "bias": error.sum(axis=0)}


def test_shard_bounds():
    assert shard_bounds(8, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert shard_bounds(7, 3) == [(0, 2), (2, 4), (4, 7)]
    assert shard_bounds(2, 4) == [(0, 0), (0, 1), (1, 1), (1, 2)]
    assert shard_bounds(0, 2) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 61, 1000])
@pytest.mark.parametrize("shards", [1, 2, 3, 8, 13])
def test_shards_hold_each_row_once_and_are_nearly_equal(rows, shards):
    bounds = shard_bounds(rows, shards)
    assert [row for a, b in bounds for row in range(a, b)] == list(range(rows))
    sizes = [b - a for a, b in bounds]
    assert len(sizes) == shards and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("shards", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8, 9])
def test_each_shard_is_assigned_once(shards, replicas):
    shares = [assigned(r, replicas, shards) for r in range(replicas)]
    assert [s for share in shares for s in share] == list(range(shards))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("count, shards", [(1, 1), (1, 3), (2, 2), (3, 3), (3, 8), (3, 2), (4, 8)])
def test_gradient_is_the_sum_over_the_samples(count, shards, exact):
    if exact and shards < count:
        pytest.skip("refused by the settings")
    layout = layout_of(linear(contexts(count)), contexts(count), shards, exact=exact)
    # The short batches follow longer ones: nothing of those may be left, on an idle context either.
    for update, rows in enumerate((16, 7, 1, 2, 16)):
        reports, gradients = run(layout, (X[:rows], Y[:rows]), update)
        losses, hits, expected = by_numpy(X[:rows], Y[:rows])
        np.testing.assert_allclose(reports[:, 0], losses, **TOLERANCE)
        np.testing.assert_array_equal(reports[:, 1], hits)
        for own in gradients:
            for name, value in expected.items():
                np.testing.assert_allclose(own[name], value, **TOLERANCE)
                np.testing.assert_array_equal(own[name], gradients[0][name])


@pytest.mark.parametrize("kvstore", ["none", "local", "device"])
@pytest.mark.parametrize("exact", [False, True])
def test_one_sample_on_three_contexts(kvstore, exact):
    layout = layout_of(linear(contexts(3)), contexts(3), 3, exact=exact)
    run(layout, (X, Y), 0, kvstore)
    _, gradients = run(layout, (X[5:6], Y[5:6]), 1, kvstore)
    _, _, expected = by_numpy(X[5:6], Y[5:6])
    for own in gradients:
        np.testing.assert_allclose(own["weight"], expected["weight"], **TOLERANCE)


def test_exact_gradients_have_the_same_bits_in_every_order_of_contexts():
    def gradients(ctx):
        return run(layout_of(linear(ctx), ctx, 8, exact=True), (X[:13], Y[:13]))[1][0]

    expected = gradients(contexts(1))
    for ctx in (contexts(2), contexts(2)[::-1], contexts(5), contexts(8)[::-1]):
        for name, value in gradients(ctx).items():
            np.testing.assert_array_equal(value, expected[name])


@pytest.mark.parametrize("exact", [False, True])
def test_batches_may_be_ndarrays(exact):
    # Of an odd number of float32s a row, so that later rows are not aligned as a copy of them is.
    net, ctx = linear(contexts(3)), contexts(3)
    layout = layout_of(net, ctx, 3, exact=exact)
    batch = (mx.nd.array(X[:7]), mx.nd.array(Y[:7], dtype="int32"))
    _, gradients = run(layout, batch)
    _, plain = run(layout_of(linear(ctx), ctx, 3, exact=exact), (X[:7], Y[:7]))
    for name, value in plain[0].items():
        np.testing.assert_allclose(gradients[0][name], value, **TOLERANCE)
    np.testing.assert_array_equal(batch[0].asnumpy(), X[:7])  # and are not written to


def test_exact_refuses_a_gradient_that_cannot_be_summed():
    layout = layout_of(linear(contexts(2)), contexts(2), 8, exact=True)
    bad = X.copy()
    bad[11, 2] = np.nan
    with pytest.raises(NotSummable):
        run(layout, (bad, Y))
    _, gradients = run(layout, (X, Y))  # and is usable afterwards
    np.testing.assert_allclose(gradients[0]["weight"], by_numpy(X, Y)[2]["weight"], **TOLERANCE)


@pytest.mark.parametrize("count, shards", [(1, 1), (2, 2), (3, 8), (3, 2)])
def test_evaluation_gives_each_sample_once_and_changes_nothing(count, shards):
    net = linear(contexts(count))
    layout = layout_of(net, contexts(count), shards)
    for rows in (16, 7, 1):
        values = np.concatenate([v.asnumpy() for v in layout.evaluate((X[:rows], Y[:rows]))])
        losses, hits, _ = by_numpy(X[:rows], Y[:rows])
        np.testing.assert_allclose(values[:, 0], losses, **TOLERANCE)
        np.testing.assert_array_equal(values[:, 1], hits)
    for data in net.weight.list_data():
        np.testing.assert_array_equal(data.asnumpy(), WEIGHT)


class Sometimes(gluon.Block):
    """An imperative network that uses one of its layers only for inputs with a positive first value."""

    def __init__(self):
        super().__init__(prefix="")
        self.always = nn.Dense(CLASSES, in_units=FEATURES, prefix="always_")
        self.seldom = nn.Dense(CLASSES, in_units=FEATURES, prefix="seldom_")

    def forward(self, x):
        return self.always(x) + (self.seldom(x) if x[0, 0].asscalar() > 0 else 0)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("count, shards", [(1, 1), (2, 2), (1, 4), (2, 4)])
def test_a_layer_that_is_left_out_has_no_gradient_of_an_earlier_batch(count, shards, exact):
    net = Sometimes()
    net.initialize(ctx=contexts(count))
    layout = layout_of(net, contexts(count), shards, exact=exact)
    x = np.abs(X[:8])
    assert np.abs(run(layout, (x, Y[:8]), 0)[1][0]["seldom_weight"]).max() > 0
    _, gradients = run(layout, (-x, Y[:8]), 1)
    for own in gradients:
        np.testing.assert_array_equal(own["seldom_weight"], np.zeros((CLASSES, FEATURES)))
        assert np.abs(own["always_weight"]).max() > 0


def test_a_layer_that_is_used_twice_gets_both_gradients():
    layer = nn.Dense(FEATURES, in_units=FEATURES, use_bias=False, prefix="twice_")
    net = nn.HybridSequential(prefix="")
    net.add(layer, layer)
    net.initialize(ctx=mx.cpu(0))
    w = generator.randn(FEATURES, FEATURES).astype("float32")
    layer.weight.set_data(mx.nd.array(w))
    for exact in (False, True):
        layout = layout_of(net, contexts(1), 2, loss=gluon.loss.L2Loss(), exact=exact)
        target = np.zeros((8, FEATURES), "float32")
        _, gradients = run(layout, (X[:8], target))
        x, w64 = X[:8].astype("float64"), w.astype("float64")
        hidden = x @ w64.T
        error = hidden @ w64.T / FEATURES  # L2Loss: mean of squares over the features, halved
        expected = error.T @ hidden + (error @ w64).T @ x
        # Relative to the largest, since two products of six terms cancel in part.
        np.testing.assert_allclose(gradients[0]["twice_weight"], expected, rtol=1e-5, atol=1e-5 * abs(expected).max())


class SumOfOutputs(gluon.HybridBlock):
    """The sum of a sample's outputs as its loss."""

    def hybrid_forward(self, F, output, label):
        return F.sum(output, axis=1) + 0 * label


def kept(seed=0, update=0, count=1, recompute="none", exact=True, rows=8):
    """(rows, 40): which of the 40 outputs of each sample a Dropout between two layers lets pass.

    Sample i is the i-th unit vector, so that its mask stands in column i of the first layer's gradient.
    """
    net = nn.HybridSequential(prefix="")
    net.add(nn.Dense(40, in_units=8, use_bias=False, prefix="in_"), nn.Dropout(0.5),
            nn.Dense(1, in_units=40, use_bias=False, prefix="out_"))
    net.initialize(mx.init.One(), ctx=contexts(count))
    sample = [mx.nd.ones((2, 8))]
    layout = layout_of(net, contexts(count), 4, loss=SumOfOutputs(), exact=exact, seed=seed, recompute=recompute,
                       sample=sample)
    _, gradients = run(layout, (np.eye(8, dtype="float32")[:rows], np.zeros(rows, "float32")), update)
    mask = gradients[0]["in_weight"].T
    assert set(np.unique(mask[:rows])) == {0.0, 2.0}  # dropout of one half doubles what it keeps
    return mask[:rows]


@pytest.mark.parametrize("exact", [False, True])
def test_random_numbers_belong_to_seed_update_and_shard(exact):
    expected = kept(exact=exact)
    for other in (dict(count=2), dict(count=3), dict(count=4), dict(recompute="2"), dict(recompute="3", count=3)):
        np.testing.assert_array_equal(kept(exact=exact, **other), expected)
    mx.random.seed(99)  # what was drawn before, anywhere, does not matter
    np.testing.assert_array_equal(kept(exact=exact), expected)
    for other in (dict(update=1), dict(seed=1)):
        # 320 independent coins fall the same with a probability of 2**-320
        assert (kept(exact=exact, **other) != expected).any()
    shards = expected.reshape(4, 2, 40)
    assert all((shards[i] != shards[j]).any() for i in range(4) for j in range(i))


def test_evaluation_draws_nothing_and_uses_the_whole_network():
    net = nn.HybridSequential(prefix="")
    net.add(nn.Dense(CLASSES, in_units=FEATURES, prefix=""), nn.Dropout(0.9))
    net.initialize(ctx=contexts(1))
    layout = layout_of(net, contexts(1), 2, sample=[mx.nd.array(X[:2])])
    first, again = (layout.evaluate((X, Y)) for _ in range(2))
    for a, b in zip(first, again):
        np.testing.assert_array_equal(a.asnumpy(), b.asnumpy())
    with autograd.predict_mode():
        expected = LOSS(net(mx.nd.array(X)), mx.nd.array(Y)).asnumpy()
    # The same operators on other numbers of rows: some last bits differ.
    np.testing.assert_allclose(np.concatenate([a.asnumpy() for a in first])[:, 0], expected, **TOLERANCE)


@pytest.mark.parametrize("count, shards", [(3, 2), (2, 5), (4, 4), (5, 1)])
def test_processes_run_each_row_of_a_batch_once(count, shards):
    """Also where some have no shard; of a batch that all have whole, one with a bad sample, and their own parts."""
    kept = np.delete(np.arange(11), 4)
    whole = Batch((X[:11], Y[:11]), 11, bad=[(4, "bad")])
    communicators = [SimpleNamespace(rank=rank, size=count) for rank in range(count)]
    layouts = [layout_of(linear(contexts(1)), contexts(1), shards, communicator=one) for one in communicators]
    for batch, rows in (((X[:11], Y[:11]), np.arange(11)), (whole, kept)):
        places = [layout.place_of(batch) for layout in layouts]
        assert np.concatenate([positions for _, positions, _ in places]).tolist() == rows.tolist()
        assert np.concatenate([batch[0][here] for _, _, here in places]).tolist() == X[rows].tolist()
        assert np.sum([layout.rows_of(batch) for layout in layouts]) == len(rows)
    for rank, layout in enumerate(layouts):
        first, stop = part_of(11, rank, 1, count, shards)
        size, positions, here = layout.place_of(Batch((X[first:stop], Y[first:stop]), 11, first))
        assert (size, positions.tolist(), here) == (11, list(range(first, stop)), slice(0, stop - first))
