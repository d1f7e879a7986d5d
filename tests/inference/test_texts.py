"""evaluate.py, predict.py and export.py for a run on texts."""

import csv
import io
import json
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from mxtrain.data.bags import Features, TextDataset, encode
from mxtrain.errors import UserError
from mxtrain.inference import evaluate, export, predict
from mxtrain.inference.load import load
from mxtrain.inference.settings import RunConfig
from mxtrain.train.main import main as train

ROWS = [("spam" if i % 3 == 0 else "ham", f'{"win" if i % 3 == 0 else "see"} "{i}", you') for i in range(60)]


def write(path, rows, header=("label", "text")):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    assert train(["--data", write(folder / "mails.csv", ROWS), "--buckets", "50", "--max-tokens", "8", "--epochs", "3",
                  "--val-split", "0.3", "--optimizer", "adam", "--lr", "0.01", "--out", str(folder / "run"),
                  "--no-progress", "--no-plots", "--no-tensorboard"]) == 0
    return str(folder / "run")


def json_of(capsys, program, *argv):
    capsys.readouterr()
    assert program.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def probabilities(run, texts):
    """From the network itself, operator by operator."""
    trained = load(RunConfig(run), [mx.cpu()])
    count = len(texts)
    x, _ = TextDataset(encode(texts, Features(2, 50, 8)), np.zeros(count, np.int32), 8).rows(np.arange(count))
    return mx.nd.softmax(trained.net(mx.nd.array(x))).asnumpy()


def test_evaluation_gives_the_numbers_of_the_training(run, capsys):
    with open(Path(run) / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "val"]
    latest = json_of(capsys, evaluate, "--run", run, "--checkpoint", "latest", "--per-class", "--batch-size", "5",
                     "--cpus", "2")
    assert (latest["accuracy"], latest["f1"]) == (float(rows[-1]["accuracy"]), float(rows[-1]["f1"]))
    assert latest["loss"] == pytest.approx(float(rows[-1]["loss"]), rel=1e-6)  # law 3's bound
    spam = latest["classes"][1]
    assert spam["class"] == "spam" and spam["f1"] == latest["f1"] and spam["recall"] == spam["accuracy"]


def test_evaluation_on_another_table(run, tmp_path, capsys, caplog):
    other = write(tmp_path / "other.csv", [("see you", " spam "), ("win", "spam")], ("text", "label"))  # swapped
    caplog.set_level("INFO")
    found = json_of(capsys, evaluate, "--run", run, "--data", other, "--per-class")
    assert f"{other}: no texts of class 'ham'" in caplog.messages
    expected = probabilities(run, ["see you", "win"])
    assert found["samples"] == 2 and found["accuracy"] == (expected.argmax(axis=1) == 1).mean()
    assert found["loss"] == pytest.approx(-np.log(expected[:, 1]).mean(), rel=1e-5)
    named = write(tmp_path / "named.csv", [("see you", "spam"), ("win", "spam")], ("v1", "v2"))
    assert json_of(capsys, evaluate, "--run", run, "--data", named, "--text-column", "v1", "--label-column",
                   "v2")["loss"] == found["loss"]
    with pytest.raises(UserError, match="line 2: label 'phish' is none of the classes"):
        evaluate.main(["--run", run, "--data", write(tmp_path / "x.csv", [("phish", "a")])])
    evaluate.main(["--run", run, "--data", write(tmp_path / "long.csv", [("ham", "a b c d e f"), ("spam", "a")])])
    assert "1 of 2 evaluated texts have more than --max-tokens 8 features and are cut" in caplog.messages


def test_texts_of_the_command_line(run, capsys):
    capsys.readouterr()
    texts = ["win a prize", "see you", ""]
    assert predict.main(["--run", run, "--text", *texts, "--top", "2"]) == 0
    found = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["row"], row["text"], row["rank"]) for row in found] == [
        (str(number), text, rank) for number, text in enumerate(texts, 1) for rank in "12"]
    for row, p in zip(found[::2], probabilities(run, texts)):
        assert row["class"] == ["ham", "spam"][p.argmax()]
        assert float(row["probability"]) == pytest.approx(p.max(), rel=1e-5)  # six digits are printed


def test_texts_of_a_table(run, tmp_path, capsys):
    path = write(tmp_path / "new.csv", [("1", "win,\n\na prize"), ("2", "see")], ("id", "text"))
    found = json_of(capsys, predict, "--run", run, path, "--batch-size", "1")
    assert [(one["row"], one["text"]) for one in found["predictions"]] == [(1, "win,\n\na prize"), (2, "see")]
    assert found["texts"] == 2 and found["failed"] == []
    given = json_of(capsys, predict, "--run", run, "--text", "win, a prize", "see")
    assert [one["classes"] for one in given["predictions"]] == [one["classes"] for one in found["predictions"]]
    out = tmp_path / "out.csv"
    assert predict.main(["--run", run, path, "--text-column", "ID", "--out", str(out)]) == 0
    assert [row["text"] for row in csv.DictReader(out.open())] == ["1", "2"]


def test_what_is_refused(run, digits_run, tmp_path):
    image, table = tmp_path / "cat.png", write(tmp_path / "bare.csv", [["see you"]], ["win"])
    image.write_bytes(b"")
    for argv, says in [
        ([run], "no text is given"), ([run, str(image)], "cat.png: the run was trained on texts"),
        ([run, str(tmp_path / "gone.csv")], "gone.csv: does not exist"), ([run, table], "its only column is 'win'"),
        ([run, table, "--text", "a"], "--text: the texts are given"), ([run, table, table], "give one table"),
        ([str(digits_run), "--text", "a"], "--text: the run was trained on images"),
        ([str(digits_run), "--text-column", "a", str(image)], "--text-column: the run was trained on images"),
    ]:
        with pytest.raises(UserError) as error:
            predict.main(["--run", *argv])
        assert says in str(error.value)
    with pytest.raises(UserError, match="--text-column a: the run was trained on images"):
        evaluate.main(["--run", str(digits_run), "--text-column", "a"])


def test_runs_from_before_there_were_texts_are_images(digits_run, tmp_path):
    import shutil

    old = tmp_path / "old"
    shutil.copytree(digits_run, old)
    values = json.loads((old / "input.json").read_text())
    assert values.pop("kind") == "image"
    (old / "input.json").write_text(json.dumps(values))
    assert load(RunConfig(str(old)), [mx.cpu()]).input == load(RunConfig(str(digits_run)), [mx.cpu()]).input


@pytest.mark.parametrize("kind", ["symbol", pytest.param("onnx")])
def test_an_export_does_the_same_in_a_fresh_process(run, tmp_path, kind):
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnx")
    trained = load(RunConfig(run), [mx.cpu()])
    files, difference = export.export(trained, tmp_path / "net", kind)
    assert difference <= export.TOLERANCE[kind] and Path(files[0]).name in ("net-0000.params", "net-classes.txt")
    says = json.loads((tmp_path / "net-input.json").read_text())
    assert (says["ngrams"], says["buckets"], says["max_tokens"]) == (2, 50, 8)
    assert says["classes"] == ["ham", "spam"] and says["input"]["shape"] == [None, 8]


def test_the_description_of_an_export_is_enough_to_use_it(run, tmp_path):
    """Features made by what net-input.json says, with the standard library alone."""
    import re
    import unicodedata
    import zlib

    export.export(load(RunConfig(run), [mx.cpu()]), tmp_path / "net", "symbol")
    says = json.loads((tmp_path / "net-input.json").read_text())
    words = re.findall(says["text"]["words"], unicodedata.normalize("NFKC", "WIN a ﬁne prize!").lower())
    runs = [" ".join(words[i:i + n]) for n in range(1, says["ngrams"] + 1) for i in range(len(words) - n + 1)]
    ids = [1 + zlib.crc32(one.encode()) % says["buckets"] for one in runs][:says["max_tokens"]]
    x = mx.nd.array([ids + [0] * (says["max_tokens"] - len(ids))])
    net = mx.gluon.SymbolBlock.imports(str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params"))
    np.testing.assert_allclose(mx.nd.softmax(net(x)).asnumpy(), probabilities(run, ["WIN a ﬁne prize!"]), rtol=1e-5)
