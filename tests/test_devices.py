"""Device lists, bad ones above all, on machines with 0, 1 and 4 GPUs, as the tests pretend."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mxtrain import compat, devices
from mxtrain.devices import DeviceConfig, contexts, parse_gpus
from mxtrain.errors import UserError


def names(config, visible, reason="no driver"):
    return [str(c) for c in contexts(config, probe=lambda: (visible, "" if visible else reason))]


@pytest.mark.parametrize(
    "text, ids",
    [("0", [0]), ("1,0", [1, 0]), ("0, 1", [0, 1]), (" 2 ", [2]), ("07", [7]), ("all", None), ("ALL ", None)],
)
def test_parse(text, ids):
    assert parse_gpus(text) == ids


@pytest.mark.parametrize(
    "text, named",
    [
        ("", "empty"),
        ("  ", "empty"),
        ("0,", "''"),
        (",", "''"),
        ("0,,1", "''"),
        ("0,a", "'a'"),
        ("a", "'a'"),
        ("-1", "'-1'"),
        ("0 1", "'0 1'"),
        ("1.0", "'1.0'"),
        ("0x1", "'0x1'"),
        ("\u0661", "'\u0661'"),  # a digit, but not an ASCII one
        ("all,0", "'all'"),
        ("0,0", "GPU 0 is named twice"),
        ("1,0,01", "GPU 1 is named twice"),
    ],
)
def test_lists_that_are_refused(text, named):
    for refuse in (parse_gpus, lambda t: DeviceConfig(gpus=t)):
        with pytest.raises(UserError) as error:
            refuse(text)
        assert "--gpus" in str(error.value) and named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "kwargs, named",
    [
        (dict(cpus=0), "--cpus 0"),
        (dict(cpus=-1), "--cpus -1"),
        (dict(threads=0), "--threads 0"),
        (dict(gpus="0", cpus=2), "--gpus '0' and --cpus 2 exclude each other"),
        (dict(gpus="all", cpus=1), "exclude each other"),
    ],
)
def test_settings_that_are_refused(kwargs, named):
    with pytest.raises(UserError, match=named):
        DeviceConfig(**kwargs)


def test_an_id_from_yaml_is_an_int():
    assert names(DeviceConfig(gpus=1), 4) == ["gpu(1)"]
    with pytest.raises(UserError, match="--gpus '-1'"):
        DeviceConfig(gpus=-1)


def test_settings_are_checked_without_mxnet():
    code = "import sys\nfrom mxtrain.devices import DeviceConfig, UserError\ntry: DeviceConfig(gpus='0,a')\n"
    code += "except UserError: print('mxnet' in sys.modules)"
    env = dict(os.environ, PYTHONPATH=str(Path(devices.__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "gpus, visible, expected",
    [
        ("0", 1, ["gpu(0)"]),
        ("1", 4, ["gpu(1)"]),
        ("1,0", 4, ["gpu(1)", "gpu(0)"]),
        ("0, 3", 4, ["gpu(0)", "gpu(3)"]),
        ("all", 1, ["gpu(0)"]),
        ("all", 4, ["gpu(0)", "gpu(1)", "gpu(2)", "gpu(3)"]),
    ],
)
def test_gpus_in_the_order_given(gpus, visible, expected):
    assert names(DeviceConfig(gpus=gpus), visible) == expected


@pytest.mark.parametrize(
    "gpus, visible, expected",
    [
        ("0", 0, "--gpus '0': there is no GPU 0, 0 GPUs are visible: no driver"),
        ("0,1", 0, "--gpus '0,1': there is no GPU 0, 1, 0 GPUs are visible: no driver"),
        ("all", 0, "--gpus 'all': there is no GPU, 0 GPUs are visible: no driver"),
        ("1,0", 1, "--gpus '1,0': there is no GPU 1, 1 GPU is visible"),
        ("99", 4, "--gpus '99': there is no GPU 99, 4 GPUs are visible (0 to 3)"),
    ],
)
def test_gpus_that_are_not_visible(monkeypatch, gpus, visible, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError) as error:
        names(DeviceConfig(gpus=gpus), visible)
    assert str(error.value) == expected


def test_the_mask_is_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(UserError, match="1 GPU is visible with CUDA_VISIBLE_DEVICES=3"):
        names(DeviceConfig(gpus="3"), 1)


@pytest.mark.parametrize(
    "visible, expected, said",
    [
        (0, "cpu(0)", "devices: cpu(0), threads per context 1; no GPU is visible"),
        (1, "gpu(0)", "devices: gpu(0); 1 GPU is visible, --gpus chooses"),
        (4, "gpu(0)", "devices: gpu(0); 4 GPUs are visible (0 to 3), --gpus chooses"),
    ],
)
def test_default_device_is_said(monkeypatch, caplog, visible, expected, said):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with caplog.at_level("INFO", "mxtrain"):
        assert names(DeviceConfig(), visible) == [expected]
    assert caplog.messages == [said]


def test_cpus_do_not_look_for_gpus():
    def probe():
        raise AssertionError("asked")

    assert [str(c) for c in contexts(DeviceConfig(cpus=3), probe)] == ["cpu(0)", "cpu(1)", "cpu(2)"]


def test_cpus_that_would_hang_are_refused(monkeypatch):
    monkeypatch.setattr(compat, "threads", lambda: 2)
    with pytest.raises(UserError, match="2 CPU contexts with 2 threads each"):
        contexts(DeviceConfig(cpus=2))


class FakeMXNet:
    """As much of mxnet as visible_gpus asks."""

    class base:
        MXNetError = RuntimeError

    def __init__(self, cuda, answer):
        self.runtime = self.context = self
        self.Features = lambda: self
        self.is_enabled = lambda feature: cuda and feature == "CUDA"
        self.answer = answer

    def num_gpus(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "cuda, answer, expected",
    [
        (False, AssertionError("asked"), (0, "mxnet-cu112 is the build for NVIDIA GPUs")),
        (True, 4, (4, "")),
        (True, 0, (0, "nvidia-smi")),
        (True, RuntimeError("Traceback:\n  File x\nCUDA: driver too old\n"), (0, "CUDA: driver too old")),
    ],
)
def test_visible_gpus(monkeypatch, cuda, answer, expected):
    monkeypatch.setitem(sys.modules, "mxnet", FakeMXNet(cuda, answer))
    count, reason = devices.visible_gpus()
    assert count == expected[0] and reason.endswith(expected[1]) and "\n" not in reason
