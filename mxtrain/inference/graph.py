"""A network as a graph in files."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import HybridBlock

from mxtrain.errors import UserError
from mxtrain.inference.load import Trained
from mxtrain.tasks.heads import first
from mxtrain.tasks.image import preprocess

_OPSET = 13
"""The newest version of ONNX's operators that MXNet 1.9.1's converters know."""


def samples(run: Trained, rows: int) -> Tuple[np.ndarray, np.ndarray]:
    """(inputs, outputs) of the network itself, run operator by operator, for made-up images."""
    images = np.random.RandomState(0).randint(0, run.pixels.peak + 1, (rows, *run.pixels.shape)).astype(np.uint8)
    with autograd.pause(train_mode=False):
        x = preprocess(run.pixels)(mx.nd.array(images, dtype=np.uint8))
        return x.asnumpy(), first(run.net(x)).asnumpy()


def write_symbol(run: Trained, shape: Sequence[int], prefix: Path) -> None:
    """PREFIX-symbol.json and PREFIX-0000.params, for SymbolBlock.imports and Module.load. The input is called data."""
    symbol, arguments, auxiliary = trace(run)
    symbol.save(f"{prefix}-symbol.json")
    named = {**{f"arg:{name}": array for name, array in arguments.items()},
             **{f"aux:{name}": array for name, array in auxiliary.items()}}
    mx.nd.save(f"{prefix}-0000.params", named)


def write_onnx(run: Trained, shape: Sequence[int], prefix: Path) -> None:
    """PREFIX.onnx, for any number of images.  shape: of one input (channels, height, width)."""
    import onnx
    from mxnet.onnx import export_model

    symbol, arguments, auxiliary = trace(run)
    path = f"{prefix}.onnx"
    context = onnx.checker.DEFAULT_CONTEXT
    # MXNet claims the newest version that the package knows, whatever its converters write, and is checked by it.
    newest, context.opset_imports = context.opset_imports, {"": _OPSET}
    try:
        export_model(symbol, [arguments, auxiliary], [(1, *shape)], np.float32, path, dynamic=True,
                     dynamic_input_shapes=[("batch", *shape)])
        model = onnx.load(path)
        model.opset_import[0].version = _OPSET
        onnx.checker.check_model(model)
    except (AttributeError, NotImplementedError, ValueError, TypeError, onnx.checker.ValidationError) as error:
        raise UserError(f"--format onnx: {run.settings.model.model} cannot be written as ONNX: {_line(error)}") from error
    finally:
        context.opset_imports = newest
    onnx.save(model, path)


def trace(run: Trained) -> Tuple[mx.sym.Symbol, Dict[str, mx.nd.NDArray], Dict[str, mx.nd.NDArray]]:
    """The graph of the network's main output, and the parameters and running statistics in it.

    Unlike HybridBlock.export, without parameters that the output does not depend on.
    """
    model = run.settings.model.model
    if not isinstance(run.net, HybridBlock):
        raise UserError(f"--model {model}: is a {type(run.net).__name__}, which has no graph; only a HybridBlock, such as "
                        "HybridSequential, can be exported")
    try:
        with autograd.pause(train_mode=False):
            symbol = first(run.net(mx.sym.var("data")))
    except Exception as error:  # whatever a user's network does with a symbol that it can do with an array only
        raise UserError(f"--model {model}: cannot be hybridized, and so not exported: {_line(error)}") from error
    values = {p.name: p.data(mx.cpu()) for p in run.net.collect_params().values()}
    return (symbol, {name: values[name] for name in symbol.list_arguments() if name != "data"},
            {name: values[name] for name in symbol.list_auxiliary_states()})


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
