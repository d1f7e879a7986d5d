"""evaluate.py, predict.py and export.py as processes: exit codes, what goes to which stream, what is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from mxtrain.train.main import main as train

ROOT = Path(__file__).parents[2]


def start(*command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=environment, timeout=120)


def test_help_needs_no_mxnet():
    """What takes the time of --help are imports. All in one process."""
    done = start("-c", "import sys\n"
                 "from mxtrain.inference import evaluate, export, generate, predict\n"
                 "for program in (evaluate, export, generate, predict):\n"
                 "    try:\n"
                 "        program.main(['--help'])\n"
                 "    except SystemExit as end:\n"
                 "        assert not end.code\n"
                 "slow = {'mxnet', 'cv2', 'sklearn', 'gluoncv', 'matplotlib'} & set(sys.modules)\n"
                 "assert not slow, slow")
    assert done.returncode == 0, done.stderr
    for text in ("evaluate.py", "export.py", "predict.py", "--run RUN", "--per-class", "--format {symbol,onnx}",
                 "--top TOP", "generate.py", "--temperature TEMPERATURE"):
        assert text in done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    assert train(["--model", "mlp", "--epochs", "1", "--out", str(out), "--no-progress", "--no-plots", "--no-tensorboard"]) == 0
    return out


def test_the_scripts_as_processes(run, tmp_path):
    scripts = ROOT / "scripts"
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((8, 8), "uint8"))
    (tmp_path / "b.png").write_text("broken")

    done = start(scripts / "evaluate.py", "--run", run, "--json")
    assert done.returncode == 0 and done.stdout.count("\n") == 1
    assert json.loads(done.stdout)["samples"] == 355 and "evaluating on 355 images" in done.stderr

    done = start(scripts / "predict.py", "--run", run, tmp_path)
    assert done.returncode == 1
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == ["file", str(tmp_path / "a.png")]
    assert "b.png" in done.stderr and "Traceback" not in done.stderr

    done = start(scripts / "export.py", "--run", run, "--out", tmp_path / "net", "--json")
    assert done.returncode == 0 and len(json.loads(done.stdout)["files"]) == 4

    done = start(scripts / "predict.py", "--run", tmp_path / "gone", tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1] == f"predict.py: error: {tmp_path / 'gone'}: no such run folder"
