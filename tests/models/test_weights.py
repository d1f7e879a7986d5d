"""Starting weights: what is loaded, what is not, and what is kept as it is."""

import hashlib
import logging

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from mxtrain import UserError
from mxtrain.models import small, weights, zoo

ONE = [mx.cpu(0)]
TWO = [mx.cpu(0), mx.cpu(1)]


def convolutional(classes=10, prefix=None):
    """Shapes known only after the first pass, as in most of the zoo."""
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(nn.Conv2D(4, 3), nn.BatchNorm(), nn.Activation("relu"), nn.Flatten(), nn.Dense(classes))
    return net


X = mx.nd.array(np.random.RandomState(0).rand(4, 1, 6, 6))


def initialized(net, init=None, ctx=None):
    net.initialize(init or mx.init.Normal(1), ctx=ctx)
    return net


@pytest.fixture
def trained():
    net = initialized(convolutional())
    net.hybridize()
    with autograd.record():
        net(X).sum().backward()  # moves the running statistics
    net(X)
    return net


@pytest.fixture(params=["save_parameters", "export"])
def file(request, tmp_path, trained):
    path = str(tmp_path / "a-0000.params")
    if request.param == "export":
        trained.export(str(tmp_path / "a"))
    else:
        trained.save_parameters(path)
    return path


@pytest.mark.parametrize("contexts", [ONE, TWO])
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("prefix", [None, "mine_"])
def test_all_parameters_are_loaded_on_all_contexts(trained, file, contexts, seen, prefix):
    net = initialized(convolutional(prefix=prefix), ctx=contexts)
    if seen:
        net(X)
    report = weights.init_from(net, file)
    assert len(report.loaded) == 8 and not report.new and not report.unused
    for context in contexts:
        # Nothing is computed in between: the outputs are the same bits.
        np.testing.assert_array_equal(net(X.as_in_context(context)).asnumpy(), trained(X).asnumpy())
    for name, parameter in weights.parameters(net).items():
        for copy in parameter.list_data():
            np.testing.assert_array_equal(copy.asnumpy(), weights.parameters(trained)[name].data().asnumpy())


@pytest.mark.parametrize("contexts", [ONE, TWO])
def test_a_head_for_other_classes_stays_new_and_is_logged(trained, file, contexts, caplog):
    net = initialized(convolutional(classes=3), mx.init.One(), ctx=contexts)
    with caplog.at_level(logging.INFO, "mxtrain"):
        report = weights.init_from(net, file)
    assert report.new == ["4.weight", "4.bias"]
    assert f"loaded 6 of 8 parameters from {file}; new: 4.weight, 4.bias" in caplog.text
    assert "4.bias (10,) for (3,)" in caplog.text
    for context in contexts:
        net(X.as_in_context(context))
        assert (net[4].weight.data(context).asnumpy() == 1).all()
        loaded = net[0].weight.data(context).asnumpy()
        np.testing.assert_array_equal(loaded, trained[0].weight.data().asnumpy())


def test_what_is_in_the_file_only_is_named(tmp_path, trained):
    arrays = {**trained._collect_params_with_prefix(), "9.weight": trained[0].weight}
    path = str(tmp_path / "a.params")
    mx.nd.save(path, {name: parameter.data() for name, parameter in arrays.items()})
    assert weights.init_from(initialized(convolutional()), path).unused == ["9.weight"]


def test_a_shared_parameter_is_one_and_is_found_under_each_name(tmp_path):
    def tied():
        net = nn.HybridSequential()
        first = nn.Dense(4, in_units=4)
        net.add(first, nn.Dense(4, in_units=4, params=first.params))
        return initialized(net)

    source, net, path = tied(), tied(), str(tmp_path / "a.params")
    source.save_parameters(path, deduplicate=True)
    assert len(weights.read(path)) == 2
    assert weights.init_from(net, path).loaded == ["0.weight", "0.bias"]
    np.testing.assert_array_equal(net[1].weight.data().asnumpy(), source[0].weight.data().asnumpy())


def test_values_are_cast_to_the_networks_type(tmp_path, trained):
    path = str(tmp_path / "a.params")
    mx.nd.save(path, {name: parameter.data().astype("float64") for name, parameter in
                      weights.parameters(trained).items()})
    net = initialized(convolutional())
    weights.init_from(net, path)
    assert net(X).dtype == np.float32


def test_a_file_that_fits_nothing_is_refused(tmp_path):
    path = str(tmp_path / "a.params")
    mx.nd.save(path, {"other": mx.nd.ones((7, 7))})
    with pytest.raises(UserError, match="none of its 1 parameters fits the network's 8; it has other, the"):
        weights.init_from(initialized(convolutional()), path)


@pytest.mark.parametrize("content", [None, b"", b"<html></html>", "half", "folder"])
def test_a_bad_file_is_named(tmp_path, trained, content):
    path = tmp_path / "bad.params"
    if content == "folder":
        path.mkdir()
    elif content == "half":
        trained.save_parameters(str(path))
        path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="bad.params: ") as error:
        weights.init_from(initialized(convolutional()), str(path))
    assert "\n" not in str(error.value)


@pytest.fixture
def store(monkeypatch, tmp_path):
    """A zoo's folder with weights of cifar_resnet20_v1 for 10 classes."""
    model_store = pytest.importorskip("gluoncv.model_zoo.model_store")
    net = initialized(zoo.create("cifar_resnet20_v1", 10))
    net(mx.nd.ones((1, 3, 16, 16)))
    net.save_parameters(str(tmp_path / "made"))
    content = (tmp_path / "made").read_bytes()
    sha1 = hashlib.sha1(content).hexdigest()
    monkeypatch.setitem(model_store._model_sha1, "cifar_resnet20_v1", sha1)
    monkeypatch.delenv("MXNET_HOME", raising=False)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / f"cifar_resnet20_v1-{sha1[:8]}.params").write_bytes(content)
    return tmp_path


def test_pretrained_weights_come_from_the_folder(store, monkeypatch):
    net = initialized(zoo.create("cifar_resnet20_v1", 3))
    report = weights.pretrained(net, "cifar_resnet20_v1", str(store / "models"))
    assert report.new == ["output.weight", "output.bias"]
    monkeypatch.setenv("MXNET_HOME", str(store))
    assert len(weights.pretrained(net, "cifar_resnet20_v1").loaded) > 50


def test_missing_or_damaged_pretrained_weights_say_what_is_needed(store):
    net = initialized(zoo.create("cifar_resnet20_v1", 3))
    with pytest.raises(UserError) as error:
        weights.pretrained(net, "resnet18_v1", str(store / "models"))
    sha1 = "a0666292f0a30ff61f857b0b66efc0228eb6a54b"
    file_name = f"resnet18_v1-{sha1[:8]}"
    for part in (str(store / "models" / f"{file_name}.params"), sha1, f"{file_name}.zip"):
        assert part in str(error.value)
    (path,) = (store / "models").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="is damaged or another file"):
        weights.pretrained(net, "cifar_resnet20_v1", str(store / "models"))


@pytest.mark.parametrize("name", ["digits", "my:net", "resnet50_v1e"])
def test_names_without_pretrained_weights(name):
    with pytest.raises(UserError, match=f"no weights for --model {name}"):
        weights.pretrained(initialized(small.digits(10)), name)


def train(net, steps=2):
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1})
    for _ in range(steps):
        with autograd.record():
            loss = (net(X) ** 2).mean()
        loss.backward()
        trainer.step(1)


def values(net):
    return {name: parameter.data().asnumpy() for name, parameter in weights.parameters(net).items()}


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("patterns, frozen", [
    (["^0", "1"], {"0.weight", "0.bias", "1.gamma", "1.beta", "1.running_mean", "1.running_var"}),
    ([r"^1\.gamma$"], {"1.gamma"}),
    (["running"], {"1.running_mean", "1.running_var"}),
    (["^0", "weight"], {"0.weight", "0.bias", "4.weight"}),
])
def test_frozen_parameters_keep_their_bits_and_the_others_move(patterns, frozen, hybrid):
    net = initialized(convolutional())
    if hybrid:
        net.hybridize()
    train(net, 1)  # a graph is traced before freezing
    before = values(net)
    assert set(weights.freeze(net, patterns)) == frozen
    train(net)
    after = values(net)
    assert {name for name in before if np.array_equal(before[name], after[name])} == frozen


def test_a_layer_with_kept_statistics_normalizes_with_them():
    net = initialized(convolutional())
    net(X)
    weights.freeze(net, ["running"])
    with autograd.train_mode():
        training = net(X).asnumpy()
    np.testing.assert_array_equal(training, net(X).asnumpy())


def test_freezing_works_before_initialization():
    net = convolutional()
    weights.freeze(net, ["^0"])
    initialized(net)(X)
    assert net[0].weight.grad_req == "null" and net[4].weight.grad_req == "write"


@pytest.mark.parametrize("patterns, message", [
    (["features"], "--freeze features: no parameter has such a name, as 0.weight"),
    (["weight", "nothing"], "--freeze nothing: no parameter"),
    ([""], "nothing is left to train"),
    (["weight", "bias", "gamma", "beta"], "nothing is left to train"),
])
def test_patterns_that_freeze_nothing_or_everything_are_refused(patterns, message):
    net = convolutional()
    with pytest.raises(UserError, match=message):
        weights.freeze(net, patterns)
    assert net[0].weight.grad_req == "write"


@pytest.mark.parametrize("when", ["before", "deferred", "after"])
@pytest.mark.parametrize("name, blocks", [
    ("cifar_resnet20_v1", 9), ("resnet18_v1b", 8), ("se_resnet18_v1", 8)])
def test_zero_gamma_makes_residual_blocks_the_identity(name, blocks, when):
    net = zoo.create(name, 3)
    x = mx.nd.random.uniform(shape=(1, 3, 32, 32))
    if when != "before":
        initialized(net, ctx=TWO)
    if when == "after":
        net(x)
    zeroed = weights.zero_gamma(net)
    if when == "before":
        initialized(net, ctx=TWO)
    net(x)
    assert len(zeroed) == blocks
    for name, parameter in weights.parameters(net).items():
        if name.endswith("gamma"):
            for copy in parameter.list_data():
                assert (copy.asnumpy() == (0 if name in zeroed else 1)).all()
    stage = net.layer1 if hasattr(net, "layer1") else next(
        block for block in net.features if isinstance(block, nn.HybridSequential))
    block = stage[1]  # keeps shape and has no projection
    y = mx.nd.random.uniform(shape=(1, weights.parameters(block)[_last(zeroed, block)].shape[0], 8, 8))
    np.testing.assert_array_equal(block(y).asnumpy(), y.asnumpy())  # y >= 0, so the last ReLU leaves it alone


def _last(zeroed, block):
    """The zeroed gamma of a block, by its name in the block."""
    (name,) = [name for name in weights.parameters(block) if any(z.endswith(f"1.{name}") for z in zeroed)]
    return name


@pytest.mark.parametrize("name", ["digits", "resnet18_v2", "mobilenetv2_0.25"])
def test_zero_gamma_without_such_blocks_is_refused(name):
    with pytest.raises(UserError, match="--zero-gamma: .* has no residual block"):
        weights.zero_gamma(zoo.create(name, 3))
