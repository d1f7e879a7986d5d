"""Runs an exported network as its users would, without mxtrain's code: `python -m mxtrain.inference.check`.

Arguments: symbol or onnx, the prefix of the files, a .npy file of inputs, and the .npy file to write.
"""

from __future__ import annotations

import sys

import numpy as np


def _symbol(prefix: str, x: np.ndarray) -> np.ndarray:
    import mxnet as mx  # mxtrain, imported as the package of this file, has prepared numpy for it

    net = mx.gluon.SymbolBlock.imports(f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params")
    return net(mx.nd.array(x)).asnumpy()


def _onnx(prefix: str, x: np.ndarray) -> np.ndarray:
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    session = onnxruntime.InferenceSession(f"{prefix}.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {"data": x})[0]


if __name__ == "__main__":
    kind, prefix, inputs, outputs = sys.argv[1:]
    x = np.load(inputs)
    run = {"symbol": _symbol, "onnx": _onnx}[kind]
    # In two parts, so that a graph that only takes the number of rows it was made with is found out.
    np.save(outputs, np.concatenate([run(prefix, x[:1]), run(prefix, x[1:])]))
