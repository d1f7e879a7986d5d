"""Two small trained runs: grey digits with a network that numpy can compute, and a folder of colored images."""

import cv2
import numpy as np
import pytest

from mxtrain.train.main import main as train

QUIET = ["--no-progress", "--no-plots", "--no-tensorboard"]
COLORS = {"1": (200, 40, 40), "10": (40, 200, 40), "2": (40, 40, 200)}  # BGR


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """Three dense layers, two epochs."""
    run = tmp_path_factory.mktemp("digits") / "run"
    assert train(["--model", "mlp", "--epochs", "2", "--out", str(run), *QUIET]) == 0
    return run


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """train/ and val/ with the classes 1, 2 and 10, images of all kinds of sizes."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.RandomState(0)
    for part, count in (("train", 8), ("val", 5)):
        for name, color in COLORS.items():
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                noise = rng.randint(-40, 40, (30 + 7 * i, 50 - 5 * i, 3))
                cv2.imwrite(str(root / part / name / f"{i}.png"), (noise + color).clip(0, 255).astype("uint8"))
    return root


@pytest.fixture(scope="session")
def folder_run(tmp_path_factory, images):
    """Convolutions and normalizations; trained on two contexts."""
    run = tmp_path_factory.mktemp("folder") / "run"
    assert train(["--data", str(images), "--image-size", "16", "--model", "digits", "--epochs", "2", "--batch-size", "16",
                  "--cpus", "2", "--lr", "0.05", "--out", str(run), *QUIET]) == 0
    return run
