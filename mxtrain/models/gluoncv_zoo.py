"""Which of gluoncv's networks classify images, and how each family is told the number of classes.

A constructor is never called to find out: those of detectors download a backbone.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple

from gluoncv.model_zoo import model_zoo
from mxnet.gluon import Block, nn

# By the module below gluoncv.model_zoo that a constructor lives in: its name for the number of classes, and
# what else it must be told.
_PLAIN = ("classes", {})
_IMAGE_FAMILIES: Dict[str, Tuple[Optional[str], dict]] = {
    **dict.fromkeys(
        (
            "alexnet cifarresnet cifarresnext cifarwideresnet densenet dla inception mobilenet mobilenetv3 "
            "nasnet residual_attentionnet resnest resnet resnetv1b senet shufflenet squeezenet vgg xception "
            "yolo.darknet"
        ).split(),
        _PLAIN,
    ),
    "googlenet": ("classes", {"pretrained_base": False}),
    "hrnet": ("num_classes", {}),
    "pruned_resnet.resnetv1b_pruned": (None, {}),  # always 1000
    "resnext": ("classes", {"pretrained": False}),  # two of them look it up without a default
}

# Their GroupNorm reads shapes in a way that MXNet 1.9.1 cannot compile, so they would fail at the first
# batch.
_BROKEN = ("resnet50_v1b_gn", "resnet101_v1b_gn")

# The first part of the module's name, for all others.
_OTHER_FAMILIES = {
    "action_recognition": "a network for videos",
    "alpha_pose": "a pose network",
    "center_net": "an object detector",
    "hrnet": "a segmentation network",
    "monodepthv2": "a depth network",
    "quantized": "an 8-bit network, for prediction only",
    "rcnn": "an object detector",
    "siamrpn": "a tracker",
    "simple_pose": "a pose network",
    "ssd": "an object detector",
    "yolo": "an object detector",
}


def names() -> List[str]:
    """The names of all networks that classify images."""
    return [name for name in model_zoo._models if _is_classifier(name)]


def refusal(name: str) -> Optional[str]:
    """What a network of gluoncv that is not in `names()` is; None for all other names."""
    if name not in model_zoo._models or _is_classifier(name):
        return None
    if name in _BROKEN:
        return "a network that MXNet 1.9.1 cannot compile (its GroupNorm)"
    return _OTHER_FAMILIES.get(_family(name).partition(".")[0], "a segmentation network")


def create(name: str, classes: int) -> Block:
    """One of `names()`, not initialized."""
    keyword, others = _IMAGE_FAMILIES[_family(name)]
    net = model_zoo._models[name](**others, **({keyword: classes} if keyword else {}))
    if not keyword:
        _replace_head(net, classes)
    for parameter in net.collect_params().values():
        _uninitialize(parameter)
    return net


def _family(name: str) -> str:
    return model_zoo._models[name].__module__.partition("gluoncv.model_zoo.")[2]


def _is_classifier(name: str) -> bool:
    if _family(name) == "hrnet" and not name.endswith("_c"):
        return False
    return _family(name) in _IMAGE_FAMILIES and name not in _BROKEN


def _replace_head(net: Block, classes: int) -> None:
    """The pruned ResNets take their shapes from a file that says 1000 classes."""
    old = net.fc
    with net.name_scope():
        net.fc = nn.Dense(classes, in_units=old.weight.shape[1], prefix=old.prefix[len(net.prefix):])


def _uninitialize(parameter) -> None:
    """Some constructors initialize a layer, on the CPU alone, where no later initialize() would reach it."""
    parameter._data = parameter._grad = None
    parameter._deferred_init = ()
