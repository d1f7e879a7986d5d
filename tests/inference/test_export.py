"""Exported networks: loaded elsewhere they give the same, and what cannot be exported leaves nothing behind."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import Block, HybridBlock, nn

from mxtrain.data.settings import DataConfig
from mxtrain.data.sources import open_data
from mxtrain.errors import TrainingError, UserError
from mxtrain.inference import graph
from mxtrain.inference.export import export, main
from mxtrain.inference.load import load
from mxtrain.inference.settings import ExportConfig, RunConfig


def opened(run):
    return load(RunConfig(str(run)), [mx.cpu()])


def imported(prefix):
    return mx.gluon.SymbolBlock.imports(f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params")


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_the_files_and_the_description_are_enough_to_predict(digits_run, tmp_path, capsys):
    """Inputs are prepared by what PREFIX-input.json says, with numpy alone."""
    prefix = tmp_path / "models" / "net"
    assert main(["--run", str(digits_run), "--out", str(prefix), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert names(tmp_path / "models") == ["net-0000.params", "net-classes.txt", "net-input.json", "net-symbol.json"]
    assert [Path(file).name for file in told["files"]] == names(tmp_path / "models")
    assert 0 <= told["difference"] <= told["tolerance"] == 1e-5
    assert set(mx.nd.load(f"{prefix}-0000.params")) == {f"arg:{p}" for p in opened(digits_run).net.collect_params()}

    says, images = json.loads(Path(f"{prefix}-input.json").read_text()), open_data(DataConfig()).val.x
    assert says["classes"] == Path(f"{prefix}-classes.txt").read_text().split() == [str(digit) for digit in range(10)]
    x = ((images.transpose(0, 3, 1, 2) / says["peak"] - says["mean"][0]) / says["std"][0]).astype("float32")
    assert list(x.shape[1:]) == says["input"]["shape"][1:]
    expected = opened(digits_run).net(mx.nd.array(x)).asnumpy()
    np.testing.assert_allclose(imported(prefix)(mx.nd.array(x)).asnumpy(), expected, rtol=1e-5, atol=1e-5)


def test_normalizations_and_colors(folder_run, tmp_path):
    """Running statistics come along; trained on two contexts, loaded on one."""
    run = opened(folder_run)
    files, difference = export(run, tmp_path / "net", "symbol")
    assert difference <= 1e-5 and len(files) == 4
    saved = mx.nd.load(str(tmp_path / "net-0000.params"))
    assert sum(name.startswith("aux:") for name in saved) == 6  # mean and variance of three normalizations
    x, expected = graph.samples(run, 5)
    np.testing.assert_allclose(imported(tmp_path / "net")(mx.nd.array(x)).asnumpy(), expected, rtol=1e-5, atol=1e-5)
    says = json.loads((tmp_path / "net-input.json").read_text())
    assert (says["classes"], says["peak"], len(says["mean"])) == (["1", "10", "2"], 255, 3)
    assert says["image"]["resize"] == 18  # 8/7 of 16 pixels


def test_a_process_that_knows_only_mxnet_loads_it(folder_run, tmp_path):
    run = opened(folder_run)
    export(run, tmp_path / "net", "symbol")
    x, expected = graph.samples(run, 5)
    np.save(tmp_path / "x.npy", x)
    program = ("import mxtrain.compat, sys, numpy as np, mxnet as mx\n"
               "net = mx.gluon.SymbolBlock.imports('net-symbol.json', ['data'], 'net-0000.params')\n"
               "np.save('y.npy', net(mx.nd.array(np.load('x.npy'))).asnumpy())\n"
               "assert not [name for name in sys.modules if name.startswith('mxtrain.') and name.count('.') > 1]")
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True,
                   env={**os.environ, "PYTHONPATH": str(Path(graph.__file__).parents[2])})
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=1e-5, atol=1e-5)


class TwoOutputs(HybridBlock):
    """The main output, an auxiliary one, and a layer that nothing uses."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.main, self.auxiliary, self.unused = (
                nn.Dense(10, in_units=64), nn.Dense(10, in_units=64), nn.Dense(3, in_units=2))

    def hybrid_forward(self, F, x):
        return self.main(x), self.auxiliary(x)


class NeedsValues(HybridBlock):
    """Looks at numbers, which a graph does not have."""

    def hybrid_forward(self, F, x):
        return x.mean(axis=(2, 3)) * float(x.sum().asscalar() > 0)


class Imperative(Block):
    def forward(self, x):
        return x.mean(axis=(2, 3))


def test_the_main_output_is_exported_without_what_it_does_not_need(digits_run, tmp_path):
    net = TwoOutputs()
    net.initialize()
    export(opened(digits_run)._replace(net=net), tmp_path / "net", "symbol")
    assert len(mx.nd.load(str(tmp_path / "net-0000.params"))) == 2
    x = mx.nd.ones((3, 1, 8, 8))
    np.testing.assert_allclose(imported(tmp_path / "net")(x).asnumpy(), net(x)[0].asnumpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("net, text", [(Imperative(), "is a Imperative, which has no graph"),
                                       (NeedsValues(), "cannot be hybridized, and so not exported: ")])
def test_a_network_without_a_graph_is_refused(digits_run, tmp_path, net, text):
    with pytest.raises(UserError, match=text) as caught:
        export(opened(digits_run)._replace(net=net), tmp_path / "models" / "net", "symbol")
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == []


def wrong_numbers(traced, prefix):
    write_symbol(traced._replace(arguments={name: array + 1e-3 for name, array in traced.arguments.items()}), prefix)


def half_a_file(traced, prefix):
    write_symbol(traced, prefix)
    file = Path(f"{prefix}-0000.params")
    file.write_bytes(file.read_bytes()[:100])


write_symbol = graph.write_symbol


@pytest.mark.parametrize("write, text", [(wrong_numbers, "differs from the trained one by"), (half_a_file, "cannot be run")])
def test_a_failed_check_leaves_what_was_there(digits_run, tmp_path, monkeypatch, write, text):
    (tmp_path / "net-symbol.json").write_text("of an earlier export")
    monkeypatch.setattr(graph, "write_symbol", write)
    with pytest.raises(TrainingError, match=text):
        export(opened(digits_run), tmp_path / "net", "symbol")
    assert names(tmp_path) == ["net-symbol.json"]
    assert (tmp_path / "net-symbol.json").read_text() == "of an earlier export"


def test_places_that_cannot_be_written_are_refused(digits_run, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (None, "", f"{tmp_path}/", str(tmp_path)):
        with pytest.raises(UserError, match="--out.*: give the beginning of the files' names"):
            ExportConfig(out)
    with pytest.raises(UserError, match="file/net: cannot be written"):
        export(opened(digits_run), tmp_path / "file" / "net", "symbol")


def test_onnx_without_its_packages_says_what_to_install(digits_run, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "onnx" else found(name, *rest))
    with pytest.raises(UserError, match=r"--format onnx: onnx.* not installed: pip install 'onnx>="):
        main(["--run", str(digits_run), "--out", str(tmp_path / "net"), "--format", "onnx"])
    assert names(tmp_path) == []


def test_onnx_gives_the_same_for_any_number_of_images(folder_run, tmp_path):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    run = opened(folder_run)
    files, difference = export(run, tmp_path / "net", "onnx")
    assert [Path(file).name for file in files] == names(tmp_path) == ["net-classes.txt", "net-input.json", "net.onnx"]
    assert difference <= 1e-4
    session = runtime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    for rows in (1, 7):
        x, expected = graph.samples(run, rows)
        np.testing.assert_allclose(session.run(None, {"data": x})[0], expected, rtol=1e-4, atol=1e-5)


def test_what_onnx_has_no_operator_for_is_refused(digits_run, tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")

    class Odd(HybridBlock):
        def hybrid_forward(self, F, x):
            return F.erfinv(F.mean(x, axis=(2, 3)) * 0.5)

    with pytest.raises(UserError, match="--format onnx: the network cannot be written as ONNX .*erfinv"):
        export(opened(digits_run)._replace(net=Odd()), tmp_path / "net", "onnx")
    assert names(tmp_path) == []
