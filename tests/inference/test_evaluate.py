"""Evaluation against plain numpy, for all sizes of batches and numbers of contexts, on own and other data."""

import csv
import json
import shutil

import cv2
import mxnet as mx
import numpy as np
import pytest
import yaml

from mxtrain.data.settings import DataConfig
from mxtrain.data.sources import open_data
from mxtrain.errors import TrainingError, UserError
from mxtrain.inference.evaluate import evaluate, main
from mxtrain.inference.load import load
from mxtrain.inference.samples import open_samples
from mxtrain.inference.settings import BatchConfig, RunConfig
from mxtrain.train.checkpoint import read


def result(run, data=None, contexts=1, **batches):
    contexts = [mx.cpu(i) for i in range(contexts)]
    trained = load(RunConfig(str(run)), contexts)
    return evaluate(trained, open_samples(data and str(data), trained), contexts, BatchConfig(**batches))


def by_numpy(run):
    """Scores (355, 10) and labels (355,) of the validation digits, computed in float64."""
    best = (run / "checkpoints" / "best").read_text().strip()
    w = read(run / "checkpoints" / best).arrays
    val = open_data(DataConfig()).val
    x = (val.x.reshape(len(val.x), -1) / 16 - 0.5) / 0.5
    for layer in "123":
        x = x @ w[f"weights/{layer}.weight"].astype("float64").T + w[f"weights/{layer}.bias"]
        x = np.maximum(x, 0) if layer != "3" else x
    return x, val.y


def write_digits(folder, x, y):
    """The digits as files in one folder per class, or in one folder where y is None."""
    for i, image in enumerate(x):
        place = folder if y is None else folder / str(y[i])
        place.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(place / f"{i:04d}.png"), np.rint(image * (255 / 16)).astype("uint8"))
    return folder


@pytest.mark.parametrize("contexts", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000])
def test_everything_agrees_with_numpy(digits_run, batch_size, contexts):
    scores, labels = by_numpy(digits_run)
    found = result(digits_run, contexts=contexts, batch_size=batch_size)
    loss = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(labels)), labels]
    ranks = (scores > scores[np.arange(len(labels)), labels][:, None]).sum(axis=1)
    confusion = np.zeros((10, 10), int)
    for true, predicted in zip(labels, scores.argmax(axis=1)):
        confusion[true, predicted] += 1
    assert found.samples == len(labels) == 355
    # MXNet's float32 log_softmax on a CPU is off by up to 4e-6 a row, and to one side: measured on these scores, the
    # largest of which is 20. That is the same for all batches and contexts, which is what the second line is about.
    assert found.means["loss"] == pytest.approx(loss.mean(), abs=5e-6)
    assert found.means["loss"] == pytest.approx(result(digits_run, batch_size=64).means["loss"], abs=1e-6)
    assert found.means["accuracy"] == np.mean(ranks == 0) and 0.5 < found.means["accuracy"] < 1
    assert found.means["top5"] == np.mean(ranks < 5)
    np.testing.assert_array_equal(found.confusion, confusion)


def test_it_is_what_the_training_saw(digits_run, folder_run):
    for run in (digits_run, folder_run):
        with open(run / "metrics.csv") as file:
            rows = [row for row in csv.DictReader(file) if row["split"] == "val"]
        best = (run / "checkpoints" / "best").read_text().strip()
        row = next(row for row in rows if int(row["update"]) == int(best[-8:]))
        found = result(run, batch_size=5)
        assert found.samples == int(row["samples"])
        assert found.means["loss"] == pytest.approx(float(row["loss"]), abs=1e-6)
        assert found.means["accuracy"] == float(row["accuracy"])


def test_there_is_no_top5_of_three_classes_and_workers_change_nothing(folder_run):
    plain, threads = result(folder_run), result(folder_run, workers=2, batch_size=4)
    assert set(plain.means) == {"loss", "accuracy"}
    assert threads.means["loss"] == pytest.approx(plain.means["loss"], abs=1e-6)
    np.testing.assert_array_equal(threads.confusion, plain.confusion)


def test_the_same_digits_as_files_give_the_same(digits_run, tmp_path):
    val = open_data(DataConfig()).val
    own, files = result(digits_run), result(digits_run, write_digits(tmp_path / "png", val.x, val.y))
    assert files.means["loss"] == pytest.approx(own.means["loss"], abs=1e-6)
    np.testing.assert_array_equal(files.confusion, own.confusion)


def test_a_folder_of_classes_is_evaluated_whole_and_one_with_parts_by_its_validation_part(folder_run, images, tmp_path):
    own = result(folder_run)
    shutil.copytree(images / "val", tmp_path / "classes")
    shutil.copytree(images / "train", tmp_path / "parts" / "train")
    shutil.copytree(images / "val", tmp_path / "parts" / "Test")
    shutil.copytree(images / "val", tmp_path / "only" / "val")
    for data in (tmp_path / "classes", tmp_path / "parts", tmp_path / "only", images / "val", images):
        found = result(folder_run, data)
        assert found.samples == 15
        assert found.means["loss"] == pytest.approx(own.means["loss"], abs=1e-6)
        np.testing.assert_array_equal(found.confusion, own.confusion)


def test_classes_are_matched_by_name(folder_run, images, tmp_path, caplog):
    """A single class, which would be number 0 by itself, is number 2 of 1, 10, 2."""
    shutil.copytree(images / "val" / "2", tmp_path / "some" / "2")
    caplog.set_level("INFO", "mxtrain")
    np.testing.assert_array_equal(result(folder_run, tmp_path / "some").confusion.sum(axis=1), [0, 0, 5])
    assert "no validation images of class '1', '10'" in caplog.text
    shutil.copytree(images / "val" / "2", tmp_path / "some" / "zebra")
    with pytest.raises(UserError, match="'zebra'"):
        result(folder_run, tmp_path / "some")


def test_arrays_of_another_kind_are_adapted_and_unknown_classes_refused(digits_run, folder_run):
    with pytest.raises(UserError, match="--data digits: the network does not know the class '0'; it knows '1', '10', '2'"):
        result(folder_run, "digits")
    with pytest.raises(UserError, match="--data /gone: does not exist"):
        result(digits_run, "/gone")


def changed(run, to, **values):
    """A copy of a run with another configuration."""
    shutil.copytree(run, to)
    saved = yaml.safe_load((to / "config.yaml").read_text())
    (to / "config.yaml").write_text(yaml.safe_dump({**saved, **values}))
    return to


def test_validation_samples_that_do_not_exist_or_have_changed_are_told(digits_run, tmp_path, caplog):
    with pytest.raises(UserError, match="trained without validation samples"):
        result(changed(digits_run, tmp_path / "a", val_split=0.0))
    assert result(changed(digits_run, tmp_path / "b", val_split=0.5)).samples > 800
    assert "digits has changed since the run was trained" in caplog.text
    with pytest.raises(UserError, match="its images are 10x10x1 now, the run was trained on 8x8x1"):
        result(changed(digits_run, tmp_path / "c", image_size=10))


def test_a_loss_that_is_not_finite_is_no_result(digits_run):
    trained = load(RunConfig(str(digits_run)), [mx.cpu()])
    trained.net[3].bias.set_data(mx.nd.full((10,), float("nan")))
    with pytest.raises(TrainingError, match="the loss over 355 samples is nan"):
        evaluate(trained, open_samples(None, trained), [mx.cpu()], BatchConfig())


def test_json_and_the_confusion_matrix(digits_run, tmp_path, capsys):
    file = tmp_path / "confusion.csv"
    assert main(["--run", str(digits_run), "--per-class", "--confusion", str(file), "--json", "--cpus", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = json.loads(lines[-1])
    assert len(lines) == 1
    with open(file) as content:
        header, *rows = list(csv.reader(content))
    matrix = np.array([row[1:] for row in rows], int)
    assert header[1:] == [row[0] for row in rows] == [str(digit) for digit in range(10)]
    np.testing.assert_array_equal(matrix, result(digits_run).confusion)
    assert (told["samples"], told["run"], told["confusion"]) == (355, str(digits_run), str(file))
    for k, row in enumerate(told["classes"]):
        assert row == {"class": str(k), "samples": matrix[k].sum(), "correct": matrix[k, k],
                       "accuracy": matrix[k, k] / matrix[k].sum()}
    assert told["accuracy"] == matrix.trace() / 355
    assert [entry.name for entry in tmp_path.iterdir()] == ["confusion.csv"]


def test_the_text_for_people(folder_run, images, capsys):
    shutil.rmtree(images.parent / "two", ignore_errors=True)
    for name in ("1", "2"):
        shutil.copytree(images / "val" / name, images.parent / "two" / name)
    assert main(["--run", str(folder_run), "--data", str(images.parent / "two"), "--per-class"]) == 0
    first, _, *classes = capsys.readouterr().out.splitlines()
    assert first.startswith("10 samples: loss ")
    assert [line.split()[:2] for line in classes] == [["1", "5"], ["10", "0"], ["2", "5"]]
    assert classes[1].split()[-1] == "-"


def test_mistakes_in_the_command_are_found_before_the_work(digits_run, tmp_path):
    for argv, text in [([], "--run is missing"), (["--batch-size", "0"], "--batch-size 0"), (["--workers", "-1"], "--workers -1"),
                       (["--confusion", str(tmp_path)], "is a folder"), (["--confusion", "/gone/c.csv"], "folder /gone does not"),
                       (["--per-clas"], "--per-clas: no such setting; did you mean --per-class"),
                       (["--batch-size", "many"], "--batch-size many: must be a whole number"), (["--gpus", "0,0"], "twice")]:
        with pytest.raises(UserError, match=text):
            main(([] if not argv else ["--run", str(digits_run)]) + argv)
