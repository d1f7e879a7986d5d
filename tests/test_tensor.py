"""Law 1 and 2 for layers that are split over contexts: to 1e-5, since sums are split inside a layer."""

import json
import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

import mxtrain
from laws import result
from mxtrain.errors import UserError
from mxtrain.models.experts_settings import ExpertsConfig
from mxtrain.models.gpt import GPT
from mxtrain.models.gpt_settings import GPTConfig
from mxtrain.models.split import TwoLayers
from mxtrain.tasks.language import TokenLoss
from spread import HOROVOD, LAUNCH, SLOW, run

VOCABULARY, CONTEXT = 24, 6
RANDOM = np.random.RandomState(1)
IDS = RANDOM.randint(0, VOCABULARY, (23, CONTEXT + 1)).astype("int32")
TEXT = gluon.data.ArrayDataset(IDS[:17, :-1], IDS[:17, 1:])
MORE_TEXT = gluon.data.ArrayDataset(IDS[17:, :-1], IDS[17:, 1:])
X, Y = RANDOM.randn(21, 3, 4).astype("float32"), RANDOM.randint(0, 5, 21).astype("int32")
POINTS = gluon.data.ArrayDataset(X, Y)
# Batches of 8, 8 and 1 in 4 shards: accumulation, and shards without rows. Clipping is always on.
SETTINGS = dict(batch_size=8, shards=4, epochs=2, lr=0.5, momentum=0.9, clip_norm=0.3, seed=3, tensorboard=False,
                plots=False)


def gpt(dropout=0.0, tied=True, vocabulary=VOCABULARY, experts=ExpertsConfig(), **config):
    return GPT(vocabulary, GPTConfig(**{**dict(layers=2, heads=4, width=16, context=CONTEXT), **config},
                                     dropout=dropout, tied=tied), experts)


def chain():
    """Layers that are split, and others before, between and behind them, which are not."""
    net = nn.HybridSequential(prefix="")
    net.add(nn.Dense(8, flatten=False), nn.Dropout(0.2), TwoLayers(8, 8), nn.LayerNorm(), TwoLayers(16, 6, use_bias=False),
            nn.Dropout(0.2), nn.Flatten(), nn.Dense(5))
    return net


def contexts(count):
    return [mx.cpu(number) for number in range(count)]


def train(folder, net, count=1, **settings):
    """See saved."""
    return saved(fit(folder, net, count, **settings).folder)


def fit(folder, net, count, **settings):
    data = (TEXT, MORE_TEXT) if isinstance(net, GPT) else (POINTS, POINTS)
    settings = {**({} if "resume" in settings else {**SETTINGS, "out": str(folder)}), **settings}
    return mxtrain.fit(net, *data, loss=TokenLoss() if isinstance(net, GPT) else None, ctx=contexts(count), **settings)


def saved(folder):
    """(arrays of the last checkpoint, losses, numbers of samples, and hits)."""
    arrays, rows = result(folder)
    return arrays, [(float(row["loss"]), row["samples"], row["accuracy"]) for row in rows]


def assert_close(got, expected):
    """To 1e-5 of each tensor's largest element, as law 1 says."""
    (arrays, rows), (expected_arrays, expected_rows) = got, expected
    assert set(arrays) == set(expected_arrays)
    for name, value in expected_arrays.items():
        np.testing.assert_allclose(arrays[name], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name)
    assert [row[1:] for row in rows] == [row[1:] for row in expected_rows]
    np.testing.assert_allclose([row[0] for row in rows], [row[0] for row in expected_rows], rtol=1e-5)


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """Trains on one context, each kind of network once."""
    results = {}

    def get(make, **config):
        key = make.__name__, *config.items()
        if key not in results:
            results[key] = train(tmp_path_factory.mktemp("once") / "run", make(**config))
        return results[key]

    return get


DROPOUT = dict(dropout=0.3, tied=False)
CASES = [({}, 4, dict(tp=4)), ({}, 4, dict(tp=2)), ({}, 4, dict(tp=2, pp=2)), (DROPOUT, 2, dict(tp=2)),
         (DROPOUT, 8, dict(tp=2, pp=2, recompute="2", pp_schedule="gpipe"))]
MORE = [(DROPOUT, 4, dict(tp=4)), (DROPOUT, 4, dict(tp=2)), (DROPOUT, 4, dict(tp=2, pp=2)), ({}, 2, dict(tp=2)),
        ({}, 2, dict(tp=2, recompute="blocks")), (DROPOUT, 2, dict(tp=2, recompute="blocks"))]


@pytest.mark.parametrize("config, count, layout", [*CASES, *(pytest.param(*case, marks=SLOW) for case in MORE)], ids=str)
def test_a_gpt(once, tmp_path, count, layout, config):
    """Weights, momentum, losses: with tied weights, and with dropout."""
    assert_close(train(tmp_path / "run", gpt(**config), count, **layout), once(gpt, **config))


@pytest.mark.parametrize("count, layout", [(2, dict(tp=2, kvstore="none")), (8, dict(tp=4, pp=2)),
                                           (4, dict(tp=2, recompute="3"))], ids=str)
def test_any_chain_with_layers_that_say_how(once, tmp_path, count, layout):
    """Its loss is over classes, and counts hits."""
    assert_close(train(tmp_path / "run", chain(), count, **layout), once(chain))


def test_a_run_goes_on_with_any_other_degree(once, tmp_path):
    """The optimizer's states, too; and on from a checkpoint of a network that was not split."""
    walk = [(1, {}), (4, dict(tp=4)), (2, dict(tp=2)), (2, dict(tp=1, pp=2))]
    config, folder = dict(dropout=0.3), tmp_path / "run"
    for epochs, (count, layout) in enumerate(walk, 1):
        # The rate must not depend on how many epochs a start asks for.
        begun = dict(resume=str(folder)) if epochs > 1 else dict(schedule="constant")
        got = train(folder, gpt(**config), count, epochs=epochs, **layout, **begun)
    assert_close(got, train(tmp_path / "one", gpt(**config), epochs=4, schedule="constant"))


def test_slices_hold_a_part_and_all_come_home(monkeypatch):
    """While it trains a context has its part of what is split; in the end each has all, the same."""
    from mxtrain.parallel.tensor_layout import TensorLayout

    held = []

    def note(layout, *arguments):
        held.append([sum(own.weight.size for own in of_context) for of_context in layout.held])
        return finish(layout, *arguments)

    finish = TensorLayout.finish
    monkeypatch.setattr(TensorLayout, "finish", note)
    net = gpt()
    mxtrain.fit(net, TEXT, loss=TokenLoss(), ctx=contexts(4), tp=4, batch_size=17)
    width = 16
    # Token embedding, output, per block 12 w^2 in four matrices and 7 w of their biases; by one of four.
    split = 2 * VOCABULARY * width + 2 * (12 * width**2 + 3 * width + 4 * width)
    alike = 5 * 2 * width  # five normalizations
    first = CONTEXT * width + 2 * 2 * width  # places, and the biases of sums
    assert held == [[split // 4 + alike + first] + [split // 4 + alike] * 3]
    for parameter in net.collect_params().values():
        assert parameter.list_ctx() == contexts(4)
        values = [data.asnumpy() for data in parameter.list_data()]
        assert np.abs(values[0]).max() > 0 or parameter.name.endswith(("bias", "beta"))
        for other in values[1:]:
            np.testing.assert_array_equal(other, values[0])


def normalized():
    net = nn.HybridSequential()
    net.add(nn.Dense(8), nn.BatchNorm(), TwoLayers(8, 5))
    return net


def plain():
    net = nn.HybridSequential()
    net.add(nn.Dense(8), nn.Dense(5))
    return net


def frozen():
    net = chain()
    net[0].weight.grad_req = "null"
    return net


@pytest.mark.parametrize("make, count, settings, words", [
    (gpt, 2, dict(tp=2, exact=True), "--tp 2: splits the sums within a layer, in float32, so that --exact cannot be"),
    (gpt, 2, dict(tp=2, zero=1), "--tp 2: does not go with --zero 1"),
    (gpt, 2, dict(tp=2, audit=3), "--tp 2: does not go with --audit 3"),
    (gpt, 2, dict(tp=2, optimizer="lamb"), "--tp 2: --optimizer lamb needs norms of whole parameters"),
    (gpt, 2, dict(tp=2, recompute="1MB"), "--tp 2: --recompute 1MB measures a network that is not split"),
    (gpt, 1, dict(tp=0), "--tp 0: must be 1 or more"),
    (gpt, 3, dict(tp=2), "--tp 2: 1 stage of 2 contexts need a multiple of 2 (--gpus or --cpus); there are 3 contexts"),
    (gpt, 4, dict(tp=2, pp=4), "--tp 2: 4 stages of 2 contexts need a multiple of 8"),
    (gpt, 4, dict(tp=2, dp=4), "--dp 4: 4 replicas of 1 stage on 2 contexts each need 8 contexts; there are 4"),
    (gpt, 8, dict(tp=8), "--tp 8: 4 heads cannot be split evenly"),
    (gpt, 3, dict(tp=3), "--tp 3: 4 heads cannot be split evenly; a multiple of 3 can"),
    (lambda: gpt(vocabulary=25), 2, dict(tp=2), "--tp 2: the vocabulary of 25 tokens cannot be split evenly"),
    (lambda: gpt(experts=ExpertsConfig(experts=2)), 2, dict(tp=2), "--tp 2: mixtures of experts are not split"),
    (normalized, 2, dict(tp=2), "--tp 2: HybridSequential has batch normalization"),
    (plain, 2, dict(tp=2), "--tp 2: HybridSequential has no layer that says how it is split"),
    (frozen, 2, dict(tp=2), "--tp 2: --freeze: parameters that are not trained are not split"),
])
def test_what_cannot_be(make, count, settings, words):
    net = make()
    data, loss = (TEXT, TokenLoss()) if isinstance(net, GPT) else (POINTS, None)
    with pytest.raises(UserError) as error:
        mxtrain.fit(net, data, loss=loss, ctx=contexts(count), batch_size=8, **{"shards": None, **settings})
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_loss_that_needs_all_scores():
    with pytest.raises(UserError, match="--tp 2: SoftmaxCrossEntropyLoss cannot be computed where each context has a part"):
        mxtrain.fit(gpt(), TEXT, loss=gluon.loss.SoftmaxCrossEntropyLoss(), ctx=contexts(2), tp=2, batch_size=8)


WORKER = """
import json, os, sys
import mxtrain
import test_tensor

for number, (make, config, count, layout) in enumerate(json.loads(sys.argv[1])):
    net = getattr(test_tensor, make)(**config)
    test_tensor.fit(f"run{number}", net, count, kvstore="horovod", **layout)
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("workers, trainings", [
    pytest.param(2, [("gpt", {}, 2, dict(tp=2)), ("gpt", DROPOUT, 1, dict(tp=2)), ("chain", {}, 2, dict(tp=4)),
                     ("gpt", {}, 2, dict(tp=2, pp=2, recompute="blocks"))], marks=HOROVOD.marks),
    pytest.param(4, [("gpt", {}, 1, dict(tp=2)), ("gpt", DROPOUT, 1, dict(tp=4)), ("chain", {}, 1, dict(tp=2, pp=2)),
                     ("gpt", {}, 1, dict(tp=2, pp=2, recompute="blocks")), ("gpt", {}, 2, dict(tp=4, pp=2)),
                     ("gpt", {}, 2, dict(tp=2, pp=2))], marks=[*HOROVOD.marks, SLOW])])
def test_over_processes(once, tmp_path, monkeypatch, workers, trainings):
    """Teams within a process, and over several; with replicas and with stages, too."""
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    (tmp_path / "worker.py").write_text(WORKER)
    run(tmp_path, [sys.executable, LAUNCH, "--transport", "horovod", "-n", workers, "--", sys.executable, "worker.py",
                   json.dumps(trainings)])
    makers = dict(gpt=gpt, chain=chain)
    for number, (make, config, _, _) in enumerate(trainings):
        assert_close(saved(tmp_path / f"run{number}"), once(makers[make], **config))
