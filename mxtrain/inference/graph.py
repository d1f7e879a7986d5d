"""A network as a graph in files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Dict, NamedTuple, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import HybridBlock

from mxtrain.errors import UserError
from mxtrain.inference.load import Trained
from mxtrain.tasks.heads import first
from mxtrain.tasks.pixels import preprocess

_OPSET = 13
"""The newest version of ONNX's operators that MXNet 1.9.1's converters know."""


class Graph(NamedTuple):
    """The graph of a network's main output; its input is called "data"."""

    symbol: mx.sym.Symbol
    arguments: Dict[str, mx.nd.NDArray]
    """Parameters by name."""
    auxiliary: Dict[str, mx.nd.NDArray]
    """Running statistics by name."""


def samples(run: Trained, rows: int) -> Tuple[np.ndarray, np.ndarray]:
    """(inputs, outputs) of the network itself, run operator by operator, for made-up images or texts."""
    random = np.random.RandomState(0)
    if run.kind == "text":
        # As float32, which is the only type that SymbolBlock.imports and ONNX take for granted.
        width = run.input.max_tokens
        ids = random.randint(1, run.input.buckets + 1, (rows, width))
        x = mx.nd.array(ids * (np.arange(width) < random.randint(1, width + 1, (rows, 1))))  # of several lengths
    else:
        images = random.randint(0, run.input.peak + 1, (rows, *run.input.shape)).astype(np.uint8)
        x = preprocess(run.input)(mx.nd.array(images, dtype=np.uint8))
    with autograd.pause(train_mode=False):
        return x.asnumpy(), first(run.net(x)).asnumpy()


def write_symbol(graph: Graph, prefix: Path) -> None:
    """PREFIX-symbol.json and PREFIX-0000.params, for SymbolBlock.imports and Module.load."""
    graph.symbol.save(f"{prefix}-symbol.json")
    named = {**{f"arg:{name}": array for name, array in graph.arguments.items()},
             **{f"aux:{name}": array for name, array in graph.auxiliary.items()}}
    mx.nd.save(f"{prefix}-0000.params", named)


def write_onnx(graph: Graph, shape: Sequence[int], path: Path) -> None:
    """An ONNX file for any number of images or texts. shape: of one input, such as (channels, height, width)."""
    import onnx
    from mxnet.onnx import export_model

    # The exporter logs by the root logger, which would then get a handler that prints all of our lines too.
    logging.getLogger().addHandler(logging.NullHandler())
    context = onnx.checker.DEFAULT_CONTEXT
    # MXNet claims the newest version that the package knows, whatever its converters write, and is checked
    # by it.
    newest, context.opset_imports = context.opset_imports, {"": _OPSET}
    try:
        export_model(graph.symbol, [graph.arguments, graph.auxiliary], [(1, *shape)], np.float32, str(path),
                     dynamic=True, dynamic_input_shapes=[("batch", *shape)])
        model = onnx.load(str(path))
        model.opset_import[0].version = _OPSET
        onnx.checker.check_model(model)
    except (AttributeError, NotImplementedError, ValueError, TypeError,
            onnx.checker.ValidationError) as error:
        raise UserError(f"--format onnx: the network cannot be written as ONNX ({_line(error)})") from error
    finally:
        context.opset_imports = newest
    onnx.save(model, str(path))


def trace(run: Trained) -> Graph:
    """The graph of a network that is on cpu(0). Raises UserError when it has none.

    Unlike HybridBlock.export, without parameters that the output does not depend on.
    """
    model = run.settings.model.model
    if not isinstance(run.net, HybridBlock):
        raise UserError(f"--model {model}: is a {type(run.net).__name__}, which has no graph; only a HybridBlock, "
                        "such as HybridSequential, can be exported")
    try:
        with autograd.pause(train_mode=False):
            symbol = first(run.net(mx.sym.var("data")))
    except Exception as error:  # whatever a user's network does that only an array can
        text = f"--model {model}: cannot be hybridized, and so not exported: {_line(error)}"
        raise UserError(text) from error
    values = {p.name: p.data(mx.cpu()) for p in run.net.collect_params().values()}
    return Graph(symbol, {name: values[name] for name in symbol.list_arguments() if name != "data"},
                 {name: values[name] for name in symbol.list_auxiliary_states()})


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
