"""Predictions: the same as the evaluation's, for files of all kinds, and what happens to broken ones."""

import csv
import io
import json
import os

import cv2
import mxnet as mx
import numpy as np
import pytest

from mxtrain.data.settings import DataConfig
from mxtrain.data.sources import open_data
from mxtrain.errors import TrainingError, UserError
from mxtrain.inference.evaluate import evaluate
from mxtrain.inference.load import load
from mxtrain.inference.predict import find_files, main, predict
from mxtrain.inference.samples import open_samples
from mxtrain.inference.settings import BatchConfig, RunConfig


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def predictions(run, files, contexts=1, top=1, **batches):
    contexts = [mx.cpu(i) for i in range(contexts)]
    return list(predict(load(RunConfig(str(run)), contexts), files, contexts, BatchConfig(**batches), top, {}))


@pytest.fixture(scope="module")
def digit_files(tmp_path_factory):
    """The validation digits as PNG files, and their labels."""
    folder, val = tmp_path_factory.mktemp("files"), open_data(DataConfig()).val
    for i, image in enumerate(val.x):
        cv2.imwrite(str(folder / f"{i:04d}.png"), np.rint(image * (255 / 16)).astype("uint8"))
    return folder, val.y


@pytest.fixture
def broken(digit_files, tmp_path):
    """Two good files, then one of each way to be broken, and one that is no image."""
    content = (digit_files[0] / "0000.png").read_bytes()
    for name in ("a.png", "z.png"):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "cut.png").write_bytes(content[:len(content) // 2])
    (tmp_path / "text.jpg").write_text("hello")
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden.png").write_bytes(content)
    return tmp_path


def test_they_are_the_evaluations(digits_run, digit_files):
    folder, labels = digit_files
    trained = load(RunConfig(str(digits_run)), [mx.cpu()])
    expected = evaluate(trained, open_samples(None, trained), [mx.cpu()], BatchConfig()).confusion
    found = np.zeros_like(expected)
    for label, one in zip(labels, predictions(digits_run, find_files([str(folder)]))):
        found[label, int(one.classes[0])] += 1
    np.testing.assert_array_equal(found, expected)


def test_they_are_the_evaluations_on_a_folder_of_colored_images(folder_run, images):
    trained = load(RunConfig(str(folder_run)), [mx.cpu()])
    expected = evaluate(trained, open_samples(None, trained), [mx.cpu()], BatchConfig()).confusion
    found = np.zeros_like(expected)
    for one in predictions(folder_run, find_files([str(images / "val")])):
        true = os.path.basename(os.path.dirname(one.source["file"]))
        found[trained.classes.index(true), trained.classes.index(one.classes[0])] += 1
    np.testing.assert_array_equal(found, expected)


def test_probabilities_are_a_softmax_in_falling_order(digits_run, digit_files):
    trained = load(RunConfig(str(digits_run)), [mx.cpu()])
    x = (open_data(DataConfig()).val.x[:5].transpose(0, 3, 1, 2) / 16 - 0.5) / 0.5
    scores = trained.net(mx.nd.array(x)).asnumpy().astype("float64")
    expected = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    for row, one in zip(expected, predictions(digits_run, find_files([str(digit_files[0])])[:5], top=99)):
        order = np.argsort(-row)
        assert one.classes == [str(k) for k in order]
        np.testing.assert_allclose(one.probabilities, row[order], rtol=1e-4, atol=1e-7)  # a softmax in float32


@pytest.mark.parametrize("contexts, batch_size, workers", [(1, 1, 0), (2, 7, 0), (3, 64, 2), (3, 1, 0)])
def test_contexts_batches_and_workers_change_nothing(digits_run, digit_files, contexts, batch_size, workers):
    files = find_files([str(digit_files[0])])[:71]
    expected = predictions(digits_run, files)
    found = predictions(digits_run, files, contexts, batch_size=batch_size, workers=workers)
    assert [one.source["file"] for one in found] == files
    assert [one.classes for one in found] == [one.classes for one in expected]
    np.testing.assert_allclose([one.probabilities for one in found], [one.probabilities for one in expected], atol=1e-6)


@pytest.mark.parametrize("kind", ["color", "alpha", "16 bit", "jpeg", "larger"])
def test_all_kinds_of_files_of_one_picture_are_the_same_digit(digits_run, digit_files, tmp_path, kind):
    path, grey = tmp_path / ("x.jpg" if kind == "jpeg" else "x.png"), cv2.imread(str(digit_files[0] / "0003.png"), 0)
    image = {"color": cv2.cvtColor(grey, cv2.COLOR_GRAY2BGR), "alpha": cv2.cvtColor(grey, cv2.COLOR_GRAY2BGRA),
             "16 bit": grey.astype("uint16") * 257, "jpeg": grey,
             "larger": np.kron(grey, np.ones((10, 10), "uint8"))}[kind]
    assert cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, 100])
    (plain,), (other,) = (predictions(digits_run, [str(f)]) for f in (digit_files[0] / "0003.png", path))
    assert other.classes == plain.classes
    if kind != "jpeg":
        np.testing.assert_allclose(other.probabilities, plain.probabilities, atol=1e-6)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_broken_files_are_named_and_counted_and_do_not_stop_the_rest(digits_run, broken, capsys, caplog, workers):
    assert main(["--run", str(digits_run), str(broken), "--batch-size", "2", "--workers", workers]) == 1
    rows = rows_of(capsys.readouterr().out)
    assert [row["file"] for row in rows] == [str(broken / "a.png"), str(broken / "z.png")]
    assert rows[0]["class"] == rows[1]["class"] and rows[0]["probability"] == rows[1]["probability"]
    assert f"image {broken / 'cut.png'}" in caplog.text and f"image {broken / 'text.jpg'}" in caplog.text
    assert "2 of 4 files could not be read" in caplog.text


def test_an_output_that_is_not_finite_is_no_prediction(digits_run, broken):
    trained = load(RunConfig(str(digits_run)), [mx.cpu()])
    trained.net[3].bias.set_data(mx.nd.full((10,), float("nan")))
    with pytest.raises(TrainingError, match="output is not finite"):
        list(predict(trained, [str(broken / "a.png")], [mx.cpu()], BatchConfig(), 1, {}))


def test_json_tells_all(digits_run, broken, capsys):
    assert main(["--run", str(digits_run), str(broken), "--top", "3", "--json"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert (told["run"], told["files"]) == (str(digits_run), 4)
    assert [os.path.basename(one["file"]) for one in told["predictions"]] == ["a.png", "z.png"]
    assert [len(one["classes"]) for one in told["predictions"]] == [3, 3]
    assert [os.path.basename(one["file"]) for one in told["failed"]] == ["cut.png", "text.jpg"]


def test_files_to_write(digits_run, broken, tmp_path_factory, capsys):
    out, files = tmp_path_factory.mktemp("out"), [str(broken / name) for name in ("z.png", "a.png")]
    common = ["--run", str(digits_run), "--top", "2", *files]
    assert main([*common, "--out", str(out / "p.csv")]) == 0
    assert capsys.readouterr().out == ""
    assert main([*common, "--out", str(out / "p.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == str(out / "p.json")
    rows, objects = rows_of((out / "p.csv").read_text()), json.loads((out / "p.json").read_text())
    assert [(row["file"], row["rank"]) for row in rows] == [(file, rank) for file in files for rank in "12"]
    flat = [entry for one in objects for entry in one["classes"]]
    assert [row["class"] for row in rows] == [entry["class"] for entry in flat]
    # Six digits are written.
    np.testing.assert_allclose([float(row["probability"]) for row in rows], [e["probability"] for e in flat], rtol=1e-5)
    assert sorted(entry.name for entry in out.iterdir()) == ["p.csv", "p.json"]


def test_a_name_that_is_no_text_comes_out_as_it_went_in(digits_run, broken, tmp_path_factory):
    name = os.fsencode(broken) + b"/n\xff.png"
    os.rename(broken / "a.png", name)
    out = tmp_path_factory.mktemp("out") / "p.csv"
    assert main(["--run", str(digits_run), os.fsdecode(name), "--out", str(out)]) == 0
    assert name in out.read_bytes()


def test_mistakes_are_found_before_the_network_is_loaded(broken):
    empty, run = broken / "empty", broken / "run without checkpoints"
    for folder in (empty, run):
        folder.mkdir()
    for name, content in (("config.yaml", ""), ("classes.txt", "a\nb\n"), ("input.json", "{}")):
        (run / name).write_text(content)
    for argv, text in [([], "no file is given"), ([str(broken / "gone.png")], "gone.png: no such file"),
                       ([str(empty)], "no images; looked for"), (["--out", "p.txt", "x"], "must end in .csv or .json"),
                       (["--out", "/gone/p.csv", "x"], "/gone does not exist"), (["--top", "0", "x"], "--top 0"),
                       (["x", "--top", "2", "y"], "y: unexpected; give all files in one place")]:
        with pytest.raises(UserError, match=text):
            main(["--run", str(run), *argv])
