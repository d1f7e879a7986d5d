"""What the README shows is run as it stands there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from mxtrain import config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DATA = (ROOT / "docs" / "data.md").read_text()


def blocks(language, text=README):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def place(tmp_path):
    """A checkout with the README's folder of images: three classes told apart by color."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    rng = np.random.RandomState(0)
    for channel, name in enumerate(("blue", "green", "red")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(100):
            image = rng.randint(0, 150, (rng.randint(70, 140), rng.randint(70, 140), 3))
            image[..., channel] += 100
            cv2.imwrite(str(tmp_path / "images" / name / f"{i}.jpg"), image.astype("uint8"))
    return tmp_path


def run(arguments, place):
    done = subprocess.run(arguments, cwd=place, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_commands(place):
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("python ")]
    assert {Path(shlex.split(c)[1]).stem for c in commands} == {"train", "evaluate", "predict", "export"}
    output = [run([sys.executable, *shlex.split(command)[1:]], place) for command in commands]
    assert "run folder: runs/first" in output[0]
    # Colors as far apart as these are learned: what is shown is a training that works.
    assert float(re.search(r"best accuracy: ([\d.]+)", output[0])[1]) > 0.8
    assert (place / "exported" / "first-symbol.json").exists()


def test_commands_about_data(place):
    rows = [f"{'spam' if i % 3 else 'ham'}\tmessage {i} {'win a prize' if i % 3 else 'see you'}\n" for i in range(60)]
    (place / "messages.tsv").write_text("label\ttext\n" + "".join(rows))
    commands = [line for block in blocks("sh", DATA) for line in block.splitlines()]
    assert {Path(shlex.split(c)[1]).stem for c in commands} == {"make_records", "train", "check_data", "predict"}
    output = [run([sys.executable, *shlex.split(command)[1:]], place) for command in commands]
    assert "Win a prize now" in output[-1]


def test_library_example(place):
    (example,) = blocks("python")
    assert len(example.splitlines()) <= 15
    (place / "example.py").write_text(example)
    epoch, accuracy = run([sys.executable, "example.py"], place).split()
    assert 1 <= int(epoch) <= 10 and float(accuracy) > 0.85


@pytest.mark.parametrize("path", sorted((ROOT / "scripts" / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_load(path):
    given = config.parse(["--config", str(path)]).given
    assert given
    settings = config.flatten(config.build(given))
    assert {name: settings[name] for name in given} == given
