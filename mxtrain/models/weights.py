"""Starting weights: from a file, from the zoo's own, and which parameters are kept as they are.

Parameters are named by structure here, "features.0.weight", as save_parameters does: these names do not
depend on what else was made in the process.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Dict, List, NamedTuple, Optional, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, HybridBlock, Parameter

from mxtrain.errors import UserError, nearest
from mxtrain.models import params_file
from mxtrain.models.match import match

Arrays = Dict[str, np.ndarray]

_log = logging.getLogger("mxtrain")

# The pruned networks: gluoncv names them by the share of weights left, and their files by the speed-up.
_PRUNED = {
    "resnet18_v1b_0.89": "resnet18_v1b_2.6x",
    "resnet50_v1d_0.86": "resnet50_v1d_1.8x",
    "resnet50_v1d_0.48": "resnet50_v1d_3.6x",
    "resnet50_v1d_0.37": "resnet50_v1d_5.9x",
    "resnet50_v1d_0.11": "resnet50_v1d_8.8x",
    "resnet101_v1d_0.76": "resnet101_v1d_1.9x",
    "resnet101_v1d_0.73": "resnet101_v1d_2.2x",
}


class Loaded(NamedTuple):
    """What became of a network's parameters and of a file's arrays, by name."""

    loaded: List[str]
    new: List[str]
    """Parameters that keep their initialization: the file has none of that name and shape."""
    reshaped: List[str]
    """Those of `new` that the file has in another shape: the name, the file's shape and the network's."""
    unused: List[str]
    """Names in the file that belong to no parameter."""


def parameters(net: Block) -> Dict[str, Parameter]:
    """Name -> parameter, running statistics included. A shared parameter has its first name only."""
    first = {}
    for name, parameter in net._collect_params_with_prefix().items():
        first.setdefault(id(parameter), (name, parameter))
    return dict(first.values())


def read(path: str) -> Arrays:
    """The arrays of a parameter file of save_parameters() or export(), by the names in it.

    Raises UserError, naming the file, when it is missing, damaged or something else.
    """
    try:
        with open(path, "rb") as file:
            arrays = params_file.parse(file.read())
    except OSError as error:
        raise UserError(f"{path}: cannot be read as a parameter file ({error.strerror})") from error
    except params_file.FormatError as error:
        size = os.path.getsize(path)
        raise UserError(f"{path}: no MXNet parameter file, or damaged ({size} bytes; {error})") from error
    if not arrays:
        raise UserError(f"{path}: has no parameters")
    return arrays


def init_from(net: Block, path: str) -> Loaded:
    """Load what fits by name and shape from a parameter file; the rest keeps its initialization, and is
    logged.

    net: initialized, on any contexts; shapes may still be unknown.
    Raises UserError for a file that cannot be read, and when nothing fits.
    """
    return load(net, read(path), path)


def load(net: Block, arrays: Arrays, source: str) -> Loaded:
    """`init_from` for arrays in memory. source: named in the log and in errors."""
    own = parameters(net)
    # A file may have a shared parameter under any of its names.
    every = net._collect_params_with_prefix()

    def fits(name: str, saved: str) -> bool:
        return _compatible(every[name].shape, arrays[saved].shape)

    pairs = match(list(every), [p.name for p in every.values()], net.prefix, arrays, fits)
    found = {id(every[name]): saved for name, saved in pairs.items() if fits(name, saved)}
    if not found:
        raise UserError(f"{source}: none of its {len(arrays)} parameters fits the network's {len(own)}; "
                        f"it has {_brief(list(arrays))}, the network {_brief(list(own))}")
    loaded = [name for name, parameter in own.items() if id(parameter) in found]
    new = [name for name, parameter in own.items() if id(parameter) not in found]
    for name in loaded:
        own[name].set_data(mx.nd.array(arrays[found[id(own[name])]], dtype=own[name].dtype))
    report = Loaded(
        loaded=loaded,
        new=new,
        reshaped=[f"{n} {arrays[pairs[n]].shape} for {own[n].shape}" for n in new if n in pairs],
        unused=sorted(set(arrays) - set(pairs.values())),
    )
    _log.info("%s", describe(report, source))
    return report


def describe(report: Loaded, source: str) -> str:
    """One line for the log."""
    text = f"loaded {len(report.loaded)} of {len(report.loaded) + len(report.new)} parameters from {source}"
    kinds = (("new", report.new), ("of another shape", report.reshaped), ("in the file only", report.unused))
    for title, entries in kinds:
        if entries:
            text += f"; {title}: {_brief(entries)}"
    return text


def pretrained(net: Block, name: str, root: Optional[str] = None) -> Loaded:
    """Load the zoo's own weights for the network `name` into `net`; a head of another size stays new.

    net: as for `init_from`. root: the folder of the files, by default $MXNET_HOME/models or ~/.mxnet/models.
    Nothing is downloaded: raises UserError with the path, checksum and address of the file when it is
    missing.
    """
    file_of = {n: _PRUNED.get(n, re.sub("^(hrnet_.*)_c$", r"\1_cls", n)) for n in _names()}
    store = _store()
    file_name = file_of.get(name)
    if file_name not in store._model_sha1:
        known = [n for n, file in file_of.items() if file in store._model_sha1]
        raise UserError(f"--pretrained: there are no weights for --model {name}; {nearest(name, known)}")
    sha1 = store._model_sha1[file_name]
    file_name = f"{file_name}-{sha1[:8]}"
    path = os.path.join(_model_root(root), f"{file_name}.params")
    address = os.environ.get("MXNET_GLUON_REPO", store.apache_repo_url).rstrip("/")
    get = f"download {address}/gluon/models/{file_name}.zip and unzip it there (sha1 {sha1})"
    if not os.path.isfile(path):
        raise UserError(f"--pretrained: {path} does not exist; {get}")
    if not mx.gluon.utils.check_sha1(path, sha1):
        raise UserError(f"--pretrained: {path} is damaged or another file; {get}")
    return init_from(net, path)


def freeze(net: Block, patterns: Sequence[str]) -> List[str]:
    """Keep parameters as they are, bit for bit; returns their names.

    patterns: regular expressions, found anywhere in a name (re.search). A normalization layer whose running
        mean or variance is kept normalizes with them, in training too.
    Raises UserError for a pattern that is in no name, and when nothing is left to train.
    """
    own = parameters(net)
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in own):
            raise UserError(f"--freeze {pattern}: no parameter has such a name, as {_brief(list(own))}")
    frozen = {name: p for name, p in own.items() if any(re.search(pattern, name) for pattern in patterns)}
    ids = {id(parameter) for parameter in frozen.values()}
    if all(id(p) in ids or p.grad_req == "null" for p in own.values()):
        raise UserError(f"--freeze {' '.join(patterns)}: nothing is left to train")
    for parameter in frozen.values():
        parameter.grad_req = "null"

    def keep_statistics(block: Block) -> None:
        statistics = (getattr(block, "running_mean", None), getattr(block, "running_var", None))
        if any(id(parameter) in ids for parameter in statistics):
            block._kwargs["use_global_stats"] = True
        if isinstance(block, HybridBlock):
            block._clear_cached_op()  # a graph that was traced before has the old setting

    net.apply(keep_statistics)
    return list(frozen)


def zero_gamma(net: Block) -> List[str]:
    """Start each residual block as the identity (Goyal et al., 2017); returns the names of the parameters set
    to 0.

    The last normalization of a block's residual branch gets gamma = 0. Blocks whose branch ends in a
    convolution (ResNet V2) are left alone: behind a ReLU their gamma would get no gradient. Raises UserError
    when the network has no such block.
    """
    last = []
    net.apply(lambda block: last.append(_last_norm(block)))
    gammas = {id(norm.gamma) for norm in last if norm is not None}
    if not gammas:
        kind = type(net).__name__
        raise UserError(f"--zero-gamma: {kind} has no residual block that ends in a normalization")
    zeroed = {name: parameter for name, parameter in parameters(net).items() if id(parameter) in gammas}
    for parameter in zeroed.values():
        parameter.init = "zeros"  # for an initialize() to come
        if parameter._data is not None or parameter._deferred_init:
            parameter.initialize(ctx=parameter.list_ctx(), force_reinit=True)
    return list(zeroed)


def _last_norm(block: Block) -> Optional[Block]:
    """The normalization that ends a residual branch; None for any other block.

    The zoos' residual blocks have a `downsample`, and their branch in `body` or in children that follow each
    other.
    """
    if not hasattr(block, "downsample"):
        return None
    branch = getattr(block, "body", None) or [
        child for name, child in block._children.items() if name not in ("downsample", "se")
    ]
    layers = [layer for layer in branch if hasattr(layer, "gamma") or list(layer.collect_params())]
    return layers[-1] if layers and hasattr(layers[-1], "gamma") else None


def _compatible(shape: Optional[Sequence[int]], saved: Sequence[int]) -> bool:
    """Whether a parameter, some or all of whose sizes may be unknown (0 or -1), can take an array."""
    if not shape:
        return True
    return len(shape) == len(saved) and all(a in (0, -1, b) for a, b in zip(shape, saved))


def _brief(entries: Sequence[str], most: int = 6) -> str:
    more = f" and {len(entries) - most} more" if len(entries) > most else ""
    return ", ".join(entries[:most]) + more


def _names() -> List[str]:
    from mxtrain.models import zoo  # a parameter file can be read without the zoos, which are slow to import

    return zoo.names()


def _store():
    """gluoncv's table of weights, or Gluon's own, which has the same attributes, where gluoncv is not
    installed."""
    try:
        from gluoncv.model_zoo import model_store
    except ModuleNotFoundError:
        from mxnet.gluon.model_zoo import model_store
    return model_store


def _model_root(root: Optional[str]) -> str:
    if root is None:
        root = os.path.join(os.environ.get("MXNET_HOME", os.path.join("~", ".mxnet")), "models")
    return os.path.abspath(os.path.expanduser(root))
