"""Opening runs: which checkpoint, and what is refused."""

import shutil

import mxnet as mx
import numpy as np
import pytest
import yaml

import mxtrain
from mxtrain.errors import UserError
from mxtrain.inference.load import load
from mxtrain.inference.settings import RunConfig
from mxtrain.train.checkpoint import read


@pytest.fixture
def copy(digits_run, tmp_path):
    """A run that may be damaged."""
    return shutil.copytree(digits_run, tmp_path / "run")


def opened(run, checkpoint=None, contexts=(mx.cpu(0),)):
    return load(RunConfig(str(run), checkpoint), contexts)


def weights(trained, ctx=mx.cpu(0)):
    return {name: p.data(ctx).asnumpy() for name, p in trained.net._collect_params_with_prefix().items()}


@pytest.mark.parametrize("which, name", [(None, "update-00000023"), ("best", "update-00000023"),
                                         ("latest", "update-00000046"), ("update-00000000", "update-00000000")])
def test_the_weights_are_those_of_the_checkpoint(copy, which, name):
    (copy / "checkpoints" / "best").write_text("update-00000023\n")
    trained = opened(copy, which)
    assert trained.checkpoint == copy / "checkpoints" / name
    saved = read(copy / "checkpoints" / name).arrays
    for parameter, value in weights(trained).items():
        np.testing.assert_array_equal(value, saved[f"weights/{parameter}"])
    assert trained.classes == [str(digit) for digit in range(10)]


def test_a_checkpoint_can_be_named_by_its_path(copy):
    path = copy / "checkpoints" / "update-00000000"
    assert opened(path).checkpoint == path
    with pytest.raises(UserError, match="--checkpoint latest: .* give the run folder"):
        opened(path, "latest")


def test_weights_are_on_all_contexts_and_have_no_gradients(folder_run):
    contexts = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
    trained = opened(folder_run, None, contexts)
    for ctx in contexts[1:]:
        for name, value in weights(trained, ctx).items():
            np.testing.assert_array_equal(value, weights(trained)[name])
    assert all(p._grad is None for p in trained.net.collect_params().values())


def test_the_devices_and_data_of_the_training_are_not_needed(copy):
    saved = yaml.safe_load((copy / "config.yaml").read_text())
    saved.update(gpus="0,1,2,3", data="/gone", pretrained=True, pretrained_root="/gone too")
    (copy / "config.yaml").write_text(yaml.safe_dump(saved))
    assert weights(opened(copy)).keys() == weights(opened(copy)).keys() != set()


def test_a_training_that_is_writing_is_not_disturbed(copy):
    (copy / "checkpoints" / ".new-update-00000069").mkdir()
    opened(copy)
    assert (copy / "checkpoints" / ".new-update-00000069").is_dir()


def test_a_run_without_a_best_checkpoint_says_how_to_go_on(copy):
    (copy / "checkpoints" / "best").unlink()
    with pytest.raises(UserError, match="no best checkpoint.*--checkpoint latest"):
        opened(copy)
    assert opened(copy, "latest").checkpoint.name == "update-00000046"


@pytest.mark.parametrize("damage", [
    lambda file: file.write_bytes(file.read_bytes()[:file.stat().st_size // 2]),
    lambda file: file.write_bytes(b""),
    lambda file: file.write_text("<html>not found</html>"),
    lambda file: file.unlink(),
    lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\x01"),
])
def test_a_damaged_checkpoint_is_named_and_the_latest_whole_one_offered(copy, damage, caplog):
    damage(copy / "checkpoints" / "update-00000046" / "arrays.npz")
    (copy / "checkpoints" / "best").write_text("update-00000046\n")
    with pytest.raises(UserError, match="update-00000046/arrays.npz: .*--checkpoint latest"):
        opened(copy)
    assert opened(copy, "latest").checkpoint.name == "update-00000023"
    assert "update-00000046/arrays.npz" in caplog.text


def test_what_is_no_run_is_refused_in_one_line(copy, tmp_path):
    with pytest.raises(UserError, match="--run is missing"):
        RunConfig()
    with pytest.raises(UserError, match="gone: no such run folder"):
        opened(tmp_path / "gone")
    with pytest.raises(UserError, match="not a run folder"):
        opened(copy / "checkpoints")
    with pytest.raises(UserError, match="--checkpoint last: must be one of best, latest, update-00000000, "):
        opened(copy, "last")


def test_a_run_of_fit_is_refused(tmp_path):
    data = mx.gluon.data.ArrayDataset(np.zeros((4, 2), "float32"), np.zeros(4, "int32"))
    out = str(tmp_path / "fit")
    mxtrain.fit(mx.gluon.nn.Dense(2), data, batch_size=2, epochs=1, out=out, tensorboard=False, plots=False)
    with pytest.raises(UserError, match="has no classes.txt; only runs of train.py"):
        opened(out)


def test_weights_of_another_network_are_refused(copy):
    saved = yaml.safe_load((copy / "config.yaml").read_text())
    (copy / "config.yaml").write_text(yaml.safe_dump({**saved, "model": "lenet"}))
    with pytest.raises(UserError, match="belongs to another network"):
        opened(copy)
