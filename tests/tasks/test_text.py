"""Training on texts: the laws on a made-up table, F1 in all places, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from trainings import QUIET, arrays, assert_close, assert_same_bits, metrics, one_line, rows, train_program

from mxtrain.train import loop
from mxtrain.train.folder import read_classes

SMS = Path(__file__).parents[3] / "shared" / "data" / "sms_spam.tsv"
CONFIG = Path(__file__).parents[2] / "scripts" / "configs" / "spam.yaml"
SMALL = ["--buckets", "60", "--max-tokens", "6", "--batch-size", "20", "--epochs", "3", "--optimizer", "adam",
         "--lr", "0.01", *QUIET]
"""Nine updates; the last batch of an epoch is short."""

train = pytest.fixture(train_program)


@pytest.fixture(scope="module")
def mails(tmp_path_factory):
    """60 texts, a third of them spam, which has a word of its own more often than not."""
    path, random = tmp_path_factory.mktemp("mails") / "mails.tsv", np.random.RandomState(3)
    lines = ["text\tlabel"]
    for i in range(60):
        spam = i % 3 == 0
        own = random.choice(["win", "prize"]) if spam == (random.rand() < 0.85) else "see"
        lines.append(" ".join([own, *random.choice(list("abcdefghij"), random.randint(0, 6))]) + f" {i}\t"
                     + ("spam" if spam else "ham"))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def exact_run(mails, tmp_path_factory):
    from mxtrain.train.main import main

    run = tmp_path_factory.mktemp("exact") / "run"
    assert main(["--data", str(mails), "--exact", *SMALL, "--out", str(run)]) == 0
    return run


@pytest.mark.parametrize("layout", [["--cpus", "2"], ["--cpus", "3", "--kvstore", "local"], ["--recompute", "2"],
                                    ["--cpus", "3", "--recompute", "blocks", "--kvstore", "none"], ["--workers", "2"]])
def test_exact_runs_have_the_same_bits_in_every_layout(train, mails, exact_run, tmp_path, layout):
    assert train("--data", mails, "--exact", *SMALL, *layout, "--out", tmp_path / "run")[0] == 0
    assert_same_bits(arrays(tmp_path / "run"), arrays(exact_run))
    assert rows(tmp_path / "run") == rows(exact_run)


def test_float_sums_are_close(train, mails, tmp_path):
    found = []
    for count in (1, 2, 3):
        run = tmp_path / str(count)
        flags = ["--optimizer", "sgd", "--shards", 6, "--cpus", count, "--out", run]
        assert train("--data", mails, *SMALL, *flags)[0] == 0
        found.append((arrays(run), [(row["accuracy"], row["f1"]) for row in rows(run)]))
    for other, counts in found[1:]:
        assert_close(other, found[0][0])
        assert counts == found[0][1]


@pytest.mark.parametrize("point", [1, 2, 4, 5, 8])  # in an epoch, before its evaluation, and between epochs
def test_a_stopped_run_goes_on_to_the_same_bits(train, mails, exact_run, tmp_path, monkeypatch, point):
    calls, agree = [], loop.agree

    def agree_to_stop(*arguments, **options):
        calls.append(arguments)
        agreed = agree(*arguments, **options)
        return agreed._replace(signal=15) if len(calls) == point else agreed

    with monkeypatch.context() as patch:
        patch.setattr(loop, "agree", agree_to_stop)
        assert train("--data", mails, "--exact", *SMALL, "--out", tmp_path / "run")[0] == 128 + 15
    assert train("--resume", tmp_path / "run", "--cpus", 2)[0] == 0
    assert_same_bits(arrays(tmp_path / "run"), arrays(exact_run))
    assert rows(tmp_path / "run") == rows(exact_run)


def test_f1_is_counted_logged_and_saved(train, mails, tmp_path):
    run = tmp_path / "run"
    code, out, err = train("--data", mails, *SMALL[:-1], "--monitor", "f1", "--val-split", "0.3", "--out", run)
    assert code == 0 and "F1 is that of class 'spam', the rarer one" in err
    best = max(float(row["f1"]) for row in metrics(run) if row["split"] == "val")
    assert f"best f1: {best:.4f}" in out and " f1 " in err
    assert all(row["f1"] == "" for row in metrics(run) if row["split"] == "train")
    says = json.loads((run / "input.json").read_text())
    assert says == {"kind": "text", "ngrams": 2, "buckets": 60, "max_tokens": 6, "text_column": "text",
                    "label_column": "label", "positive": "spam"}
    assert read_classes(run) == ["ham", "spam"]


def test_of_classes_that_are_equally_frequent_none_is_called_the_rarer(train, tmp_path):
    (tmp_path / "two.csv").write_text("text,label\n" + "".join(f"{'ab'[i % 2]} {i},{'xy'[i % 2]}\n" for i in range(20)))
    val = tmp_path / "val.csv"
    val.write_text("text,label\nc,x\nd,y\n")
    code, _, err = train("--data", tmp_path / "two.csv", *SMALL, "--val", val, "--out", tmp_path / "run")
    assert code == 0 and "F1 is that of class 'y', as frequent as the other" in err


def test_classes_of_which_none_is_positive(train, tmp_path):
    path, run = tmp_path / "three.csv", tmp_path / "run"
    path.write_text("text,label\n" + "".join(f"{'abc'[i % 3]} {i},{'xyz'[i % 3]}\n" for i in range(60)))
    code, out, err = train("--data", path, *SMALL, "--val-split", "0.3", "--out", run)
    assert code == 0 and "F1 is" not in err
    assert all(0 <= float(row["f1"]) <= 1 for row in metrics(run) if row["split"] == "val")
    assert json.loads((run / "input.json").read_text())["positive"] is None
    code, _, err = train("--data", path, *SMALL, "--positive", "x", "--out", tmp_path / "other")
    assert code == 2 and "--positive x: has no effect with 3 classes" in one_line(err)


@pytest.mark.parametrize("flags, says", [
    (["--positive", "eggs"], "--positive eggs: must be one of ham, spam"),
    (["--model", "lenet"], "--model lenet: is a network for images"),
    (["--val-split", "0", "--monitor", "f1"], "--monitor f1: no such value"),
    (["--augment", "crop"], "--augment crop: has no effect on texts"),
    (["--text-column", "body"], "--text-column body"),
])
def test_what_is_refused(train, mails, tmp_path, flags, says):
    code, _, err = train("--data", mails, *SMALL, *flags, "--out", tmp_path / "run")
    assert code == 2 and says in one_line(err) and not (tmp_path / "run").exists()


def test_a_network_with_too_few_vectors_is_refused(train, mails, tmp_path, monkeypatch):
    (tmp_path / "own_texts.py").write_text(
        "from mxnet.gluon import nn\nfrom mxtrain.models.text import EmbeddingMean\n\n\n"
        "def net(classes):\n    net = nn.HybridSequential()\n    net.add(EmbeddingMean(40, 3), nn.Dense(classes))\n"
        "    return net\n")
    monkeypatch.chdir(tmp_path)
    code, _, err = train("--data", mails, *SMALL, "--model", "own_texts:net", "--out", "run")
    assert code == 2 and "vectors for 41 ids, from 0 to 40; --buckets 60" in one_line(err)
    assert train("--data", mails, *SMALL, "--model", "own_texts:net", "--buckets", 40, "--out", "run")[0] == 0


def test_changed_texts_and_settings_are_refused_on_resume(train, mails, tmp_path):
    path, run = tmp_path / "mails.tsv", tmp_path / "run"
    path.write_bytes(mails.read_bytes())
    assert train("--data", path, *SMALL, "--epochs", 1, "--out", run)[0] == 0
    code, _, err = train("--resume", run, "--buckets", 61)
    assert code == 2 and "--buckets 61: the run was started with 60" in one_line(err)
    path.write_text(path.read_text().replace("see", "sea"))
    code, _, err = train("--resume", run, "--epochs", 2)
    assert code == 2 and "the data have changed" in one_line(err)


@pytest.mark.slow
@pytest.mark.skipif(not SMS.exists(), reason="the folder shared/data with sms_spam.tsv is not here")
def test_the_configuration_for_spam_reaches_its_aim(train, tmp_path):
    assert train("--config", CONFIG, "--data", SMS, *QUIET, "--out", tmp_path / "run")[0] == 0
    best = max((row for row in metrics(tmp_path / "run") if row["split"] == "val"), key=lambda row: float(row["f1"]))
    assert float(best["accuracy"]) >= 0.98 and float(best["f1"]) >= 0.93
    assert int(best["epoch"]) < 20  # stopped early
