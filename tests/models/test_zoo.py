"""Networks by name: every name makes a network of the right size or says in one line why not."""

import importlib.abc
import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

from mxtrain import UserError
from mxtrain.models import small, zoo

gluoncv_zoo = pytest.importorskip("mxtrain.models.gluoncv_zoo")


@pytest.mark.parametrize("name, shape", [
    ("digits", (1, 8, 8)),
    ("digits", (3, 9, 7)),
    ("lenet", (1, 28, 28)),
    ("mlp", (2, 5, 5)),
    ("cifar_resnet20_v2", (3, 16, 16)),
    ("resnet18_v1b_0.89", (3, 32, 32)),  # pruned: its shapes come from a file that says 1000 classes
    ("mobilenetv2_0.25", (3, 32, 32)),
])
def test_output_has_one_number_per_class(name, shape):
    net = zoo.create(name, classes=7, channels=shape[0])
    net.initialize()
    assert net(mx.nd.ones((2, *shape))).shape == (2, 7)


@pytest.mark.parametrize("name", ["digits", "resnet18_v1b_0.89", "resnext101e_64x4d"])
def test_a_new_network_is_not_initialized(name):
    # A parameter that its constructor initialized would stay on the CPU whatever contexts the run has.
    for parameter in zoo.create(name, 3).collect_params().values():
        with pytest.raises(RuntimeError, match="not been initialized"):
            parameter.list_ctx()


def test_every_name_of_gluoncv_is_a_classifier_or_refused_with_its_kind():
    from gluoncv.model_zoo import get_model_list

    kinds = {name: gluoncv_zoo.refusal(name) for name in get_model_list()}
    classifiers = {name for name, kind in kinds.items() if kind is None}
    assert classifiers == set(gluoncv_zoo.names()) < set(zoo.names())
    assert len(classifiers) == 127
    assert kinds["ssd_300_vgg16_atrous_voc"] == kinds["yolo3_darknet53_coco"] == "an object detector"
    assert kinds["hrnet_w48_s"] == kinds["fcn_resnet50_voc"] == "a segmentation network"
    assert kinds["vgg16_ucf101"] == "a network for videos"
    assert kinds["darknet53"] is None


def test_what_is_no_classifier_is_refused_without_building_it():
    # Its constructor would download a backbone.
    with pytest.raises(UserError, match="--model ssd_512_resnet50_v1_custom is an object detector"):
        zoo.create("ssd_512_resnet50_v1_custom", 2)


@pytest.mark.parametrize("name, expected", [("resnet50v1", "resnet50_v1"), ("ResNet50_V1", "resnet50_v1"),
                                            ("digit", "digits")])
def test_an_unknown_name_gets_the_nearest(name, expected):
    with pytest.raises(UserError, match=f"--model {name}: no such network; .*{expected}"):
        zoo.create(name, 2)


def test_the_zoo_takes_color_and_small_networks_take_anything():
    assert zoo.wants_channels("resnet18_v1") == 3
    assert zoo.wants_channels("digits") is zoo.wants_channels("my:net") is None
    with pytest.raises(UserError, match="resnet18_v1 takes images of 3 channels, these have 1"):
        zoo.create("resnet18_v1", 2, channels=1)


def test_the_default_grows_with_the_images():
    names = [zoo.default_name((side, side, 3)) for side in (8, 28, 32, 224)]
    assert names == ["digits", "lenet", "cifar_resnet20_v1", "resnet18_v1"]


@pytest.fixture
def forget_gluoncv(monkeypatch):
    """As if nothing had imported gluoncv yet."""
    monkeypatch.delattr("mxtrain.models.gluoncv_zoo")
    for name in list(sys.modules):
        if name == "mxtrain.models.gluoncv_zoo" or name.split(".")[0] == "gluoncv":
            monkeypatch.delitem(sys.modules, name)


def test_without_gluoncv_gluons_own_are_left(forget_gluoncv, monkeypatch):
    class NotInstalled(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == "gluoncv":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [NotInstalled(), *sys.meta_path])
    assert {"digits", "resnet18_v1", "squeezenet1.1"} < set(zoo.names())
    assert zoo.create("squeezenet1.1", 4).output[0].weight.shape[0] == 4
    assert zoo.default_name((32, 32, 3)) == "resnet18_v1"
    with pytest.raises(UserError, match="pip install gluoncv=="):
        zoo.create("resnet18_v1b", 4)


def test_a_gluoncv_that_cannot_be_imported_shows_the_cause(forget_gluoncv, monkeypatch, tmp_path):
    (tmp_path / "gluoncv.py").write_text(
        "try:\n    import no_such_module\nexcept ImportError as e:\n    raise ImportError('unable') from e\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="gluoncv cannot be imported: No module named 'no_such_module'"):
        zoo.names()


def test_gluons_names_are_all_gluoncvs_too():
    assert set(zoo._GLUON) < set(gluoncv_zoo.names())


USER_FILE = """
from mxnet.gluon import nn
def net(classes, width=4): return nn.Dense(classes)
def no_classes(n): return nn.Dense(n)
def no_block(classes): return classes
def fails(classes): return 1 / 0
"""


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    (tmp_path / "user_networks.py").write_text(USER_FILE)
    (tmp_path / "user_broken.py").write_text("import there_is_no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("user_networks", None)


def test_a_users_function_is_called_with_the_classes(user_file):
    assert zoo.create("user_networks:net", 5, channels=1).weight.shape[0] == 5


@pytest.mark.parametrize("name, message", [
    ("user_nowhere:net", "cannot import user_nowhere .*No module named 'user_nowhere'"),
    ("user_broken:net", "cannot import user_broken .*there_is_no_such_module"),
    ("user_networks:ne", "no function 'ne', only .*'net'"),
    ("user_networks:no_classes", "called with classes=5"),
    ("user_networks:no_block", "must return a gluon Block, got int"),
    ("user_networks:fails", "ZeroDivisionError"),
    (":net", "cannot import"),
])
def test_a_users_mistake_is_one_line(user_file, name, message):
    with pytest.raises(UserError, match=message) as error:
        zoo.create(name, 5)
    assert "\n" not in str(error.value)


def test_digits_learns_the_digits():
    """The promise of the default run; measured: 98.9% to 99.7% for six seeds and two optimizers."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    x = (x.reshape(-1, 1, 8, 8) / 8 - 1).astype("float32")
    held_out = np.arange(len(x)) % 5 == 0
    mx.random.seed(0)
    order = np.random.RandomState(0)
    net = small.digits(10)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for _ in range(15):
        for rows in np.array_split(order.permutation(np.flatnonzero(~held_out)), 22):
            with autograd.record():
                losses = loss(net(mx.nd.array(x[rows])), mx.nd.array(y[rows]))
            losses.backward()
            trainer.step(len(rows))
    right = net(mx.nd.array(x[held_out])).asnumpy().argmax(1) == y[held_out]
    assert right.mean() > 0.975
