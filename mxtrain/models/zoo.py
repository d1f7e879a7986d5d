"""Networks by name: our own small ones, gluoncv's and Gluon's, or a user's `module:function`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import List, Optional, Sequence

from mxnet.gluon import Block
from mxnet.gluon.model_zoo import vision

from mxtrain.errors import UserError, nearest
from mxtrain.models import gpt, small, text
from mxtrain.models.experts_settings import ExpertsConfig
from mxtrain.models.gpt_settings import GPTConfig

_OWN = {"digits": small.digits, "lenet": small.lenet, "mlp": small.mlp}
_TEXT = {"bag": text.bag}
_LANGUAGE = {"gpt": gpt.GPT}

# gluoncv has all of Gluon's, and they are the same networks: these are what is left without gluoncv.
_GLUON = (
    "alexnet densenet121 densenet161 densenet169 densenet201 inceptionv3 "
    "mobilenet0.25 mobilenet0.5 mobilenet0.75 mobilenet1.0 "
    "mobilenetv2_0.25 mobilenetv2_0.5 mobilenetv2_0.75 mobilenetv2_1.0 "
    "resnet18_v1 resnet34_v1 resnet50_v1 resnet101_v1 resnet152_v1 "
    "resnet18_v2 resnet34_v2 resnet50_v2 resnet101_v2 resnet152_v2 squeezenet1.0 squeezenet1.1 "
    "vgg11 vgg13 vgg16 vgg19 vgg11_bn vgg13_bn vgg16_bn vgg19_bn"
).split()
_WITHOUT_GLUONCV = "gluoncv, which has many more, is not installed: pip install gluoncv==0.10.5.post0"


def names() -> List[str]:
    """All names that `create` takes, sorted; without gluoncv, those of Gluon and our own."""
    gluoncv = _gluoncv()
    return sorted({*_OWN, *(gluoncv.names() if gluoncv else _GLUON)})


def create(name: str, classes: int, channels: int = 3) -> Block:
    """A classifier that is not initialized yet.

    name: one of `names()`, or "module:function", which is called with `classes=classes`; modules are looked
        for in the working directory too.
    classes: number of outputs.
    channels: of the images that it will get; zoo networks take 3.

    Some zoo networks return a tuple, (output, auxiliary output, ...).
    Raises UserError for an unknown name, a network that is no classifier, and other channels than it takes.
    """
    if ":" in name:
        return _from_module(name, classes)
    if name in _TEXT:
        raise UserError(f"--model {name}: is a network for texts; these are images (--task image)")
    if name in _LANGUAGE:
        raise UserError(f"--model {name}: is a language model (--task lm); these are images (--task image)")
    wanted = wants_channels(name)
    if wanted not in (None, channels):
        raise UserError(f"--model {name} takes images of {wanted} channels, these have {channels}")
    if name in _OWN:
        return _OWN[name](classes, channels)
    gluoncv = _gluoncv()
    if gluoncv and name in gluoncv.names():
        return gluoncv.create(name, classes)
    if not gluoncv and name in _GLUON:
        return vision.get_model(name, classes=classes)
    kind = gluoncv and gluoncv.refusal(name)
    if kind:
        raise UserError(f"--model {name} is {kind}; take an image classifier, such as resnet50_v1")
    more = "" if gluoncv else f" ({_WITHOUT_GLUONCV})"
    raise UserError(f"--model {name}: no such network; {nearest(name.lower(), names())}{more}")


def create_text(name: str, classes: int, buckets: int) -> Block:
    """A classifier of bags of words, (rows, length) ids from 0 to buckets, that is not initialized yet.

    name: one of our own, or "module:function" as for `create`. Raises UserError as `create`.
    """
    if ":" in name:
        return _from_module(name, classes)
    if name in _TEXT:
        return _TEXT[name](classes, buckets)
    raise UserError(f"--model {name}: {_fault(name)}; for texts there are {', '.join(_TEXT)} and module:function")


def create_language(name: str, vocabulary: int, shape: GPTConfig, experts: ExpertsConfig) -> Block:
    """A language model, (rows, time) tokens -> (rows, time, vocabulary) scores, that is not initialized yet.

    name: one of our own, or "module:function" as for `create`, for which shape and experts are of no account. Raises
    UserError as `create`.
    """
    if ":" in name:
        return _from_module(name, vocabulary)
    if name in _LANGUAGE:
        return _LANGUAGE[name](vocabulary, shape, experts)
    raise UserError(f"--model {name}: {_fault(name)}; for language there are {', '.join(_LANGUAGE)} and "
                    "module:function")


def _fault(name: str) -> str:
    """Why a name is none of a network for texts, or for language."""
    if name in _TEXT:
        return "is a classifier of texts"
    if name in _LANGUAGE:
        return "is a language model (--task lm)"
    return "is a network for images" if name in names() else "no such network"


def default_text_name() -> str:
    """A network that suits any texts."""
    return "bag"


def default_language_name() -> str:
    """A network that suits any language."""
    return "gpt"


def wants_channels(name: str) -> Optional[int]:
    """Channels of the images that a network takes: 3 for the zoos, None where any number will do."""
    return None if name in _OWN or ":" in name else 3


def default_name(shape: Sequence[int]) -> str:
    """A network that suits images of shape (height, width, channels)."""
    side = max(shape[:2])
    if side <= 16:
        return "digits"
    if side <= 28:
        return "lenet"
    return "cifar_resnet20_v1" if side <= 64 and _gluoncv() else "resnet18_v1"


def _gluoncv():
    """The module that knows gluoncv's networks, or None where gluoncv is not installed."""
    try:
        from mxtrain.models import gluoncv_zoo
    except ModuleNotFoundError as error:
        if error.name == "gluoncv":
            return None
        raise UserError(f"gluoncv cannot be imported: {error}") from error
    except ImportError as error:  # gluoncv's own text about versions hides the cause
        raise UserError(f"gluoncv cannot be imported: {error.__cause__ or error}") from error
    return gluoncv_zoo


def _from_module(name: str, classes: int) -> Block:
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a script's own folder stands there, not the user's
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's file raises while it is executed
        raise UserError(f"--model {name}: cannot import {module_name} ({_said(error)})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [n for n, f in vars(module).items() if callable(f) and f.__module__ == module.__name__]
        raise UserError(f"--model {name}: {module_name} has no function {function_name!r}, only {functions}")
    try:
        inspect.signature(function).bind(classes=classes)
    except TypeError as error:
        raise UserError(f"--model {name}: it is called with classes={classes} ({error})") from None
    try:
        net = function(classes=classes)
    except Exception as error:
        call = f"{function_name}(classes={classes})"
        raise UserError(f"--model {name}: {call} failed ({_said(error)})") from error
    if not isinstance(net, Block):
        raise UserError(f"--model {name}: must return a gluon Block, got {type(net).__name__}")
    return net


def _said(error: Exception) -> str:
    first_line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"
