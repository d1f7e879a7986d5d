"""Training a language model: the laws on a tiny GPT, perplexity in all places, what it learns, and what is refused."""

import json
import math
import re

import numpy as np
import pytest
from trainings import QUIET, arrays, assert_close, assert_same_bits, metrics, one_line, rows, train_program

from mxtrain.inference import evaluate
from mxtrain.tasks.language import with_perplexity
from mxtrain.train import loop

TINY = ["--layers", "2", "--heads", "2", "--width", "16", "--context", "16"]
SMALL = [*TINY, "--batch-size", "20", "--epochs", "2", "--optimizer", "adamw", "--lr", "0.01", "--clip-norm", "1",
         *QUIET]
"""Three updates an epoch; the last batch is of 5 sequences."""

train = pytest.fixture(train_program)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """50 sequences of 16 bytes, of which 5 are held out, and 7 bytes more."""
    path, random = tmp_path_factory.mktemp("text") / "words.txt", np.random.RandomState(4)
    path.write_text(" ".join(random.choice(["once", "upon", "a", "time", "there", "was"], 400))[:50 * 16 + 8])
    return path


@pytest.fixture(scope="module")
def exact_run(text, tmp_path_factory):
    from mxtrain.train.main import main

    run = tmp_path_factory.mktemp("exact") / "run"
    assert main(["--data", str(text), "--exact", "--dropout", "0.1", *SMALL, "--out", str(run)]) == 0
    return run


@pytest.mark.parametrize("layout", [["--cpus", "2"], ["--cpus", "3", "--kvstore", "local"], ["--recompute", "blocks"],
                                    ["--cpus", "3", "--recompute", "2", "--kvstore", "none"]])
def test_exact_runs_have_the_same_bits_in_every_layout(train, text, exact_run, tmp_path, layout):
    assert train("--data", text, "--exact", "--dropout", "0.1", *SMALL, *layout, "--out", tmp_path / "run")[0] == 0
    assert_same_bits(arrays(tmp_path / "run"), arrays(exact_run))
    assert rows(tmp_path / "run") == rows(exact_run)


@pytest.mark.parametrize("routing", [["--routing", "top2"], ["--routing", "expert-choice", "--allow-leak"]])
def test_experts_obey_the_laws(train, text, tmp_path, monkeypatch, routing):
    given = ["--data", text, "--experts", "3", *routing, "--dropout", "0.1", *SMALL]
    calls, agree = [], loop.agree

    def stop(*arguments):
        calls.append(None)
        return agree(*arguments)._replace(signal=15) if len(calls) == 2 else agree(*arguments)

    exact = [tmp_path / name for name in ("one", "two", "three", "stopped")]
    for run, layout in zip(exact, ([], ["--cpus", "2"], ["--cpus", "3", "--recompute", "blocks"])):
        assert train(*given, "--exact", *layout, "--out", run)[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(loop, "agree", stop)
        assert train(*given, "--exact", "--out", exact[-1])[0] == 128 + 15
    assert train("--resume", exact[-1], "--cpus", "2")[0] == 0
    for run in exact[1:]:
        assert_same_bits(arrays(run), arrays(exact[0]))
        assert rows(run) == rows(exact[0])
    told = ("load_spread", "dropped", "router_entropy", "balance_loss", "router_z_loss")
    assert all(bool(row[name]) == (row["split"] == "train") for row in metrics(exact[0]) for name in told)
    close = [tmp_path / name for name in ("four", "four-two")]
    for run, layout in zip(close, ([], ["--cpus", "2"])):
        assert train(*given, "--optimizer", "sgd", "--shards", "4", *layout, "--out", run)[0] == 0
    assert_close(arrays(close[1]), arrays(close[0]))


def test_experts_learn_and_are_evaluated(train, tmp_path, capsys):
    path = tmp_path / "pattern.txt"
    path.write_text("the cat sat on the mat. " * 200)
    code, _, err = train("--data", path, *TINY, "--experts", "4", "--batch-size", "16", "--epochs", "6", "--optimizer",
                         "adamw", "--lr", "0.02", "--out", tmp_path / "run", *QUIET)
    assert code == 0 and "batch normalization" not in err
    last = metrics(tmp_path / "run")[-1]
    assert float(last["loss"]) < 0.5
    capsys.readouterr()
    assert evaluate.main(["--run", str(tmp_path / "run"), "--checkpoint", "latest", "--json"]) == 0
    # Shards are of other sizes, and so is the room of an expert: a few tokens more or fewer find none.
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(float(last["loss"]), rel=0.2)


@pytest.mark.parametrize("point", [2, 4])  # within an epoch, and before the validation
def test_a_stopped_run_goes_on_to_the_same_bits(train, text, exact_run, tmp_path, monkeypatch, point):
    calls, agree = [], loop.agree

    def stop(*arguments):
        calls.append(None)
        return agree(*arguments)._replace(signal=15) if len(calls) == point else agree(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "agree", stop)
        assert train("--data", text, "--exact", "--dropout", "0.1", *SMALL, "--out", tmp_path / "run")[0] == 128 + 15
    code, _, err = train("--resume", tmp_path / "run", "--cpus", "2")
    assert code == 0 and "resumed after update" in err
    assert_same_bits(arrays(tmp_path / "run"), arrays(exact_run))
    assert rows(tmp_path / "run") == rows(exact_run)


def test_float_sums_and_accumulation_are_close(train, text, tmp_path):
    found = []
    for name, layout in (("one", ["--shards", "4"]), ("two", ["--shards", "4", "--cpus", "2"]),
                         ("pieces", ["--micro-batch", "5"]), ("whole", [])):
        run = tmp_path / name
        # With plain descent and small steps: adam's first ones divide a gradient by its own size.
        assert train("--data", text, *SMALL, "--optimizer", "sgd", *layout, "--out", run)[0] == 0
        found.append(run)
    assert_same_bits(arrays(found[2]), arrays(found[0]))
    assert_close(arrays(found[1]), arrays(found[0]))
    # A product of 20 rows and four of 5 may round otherwise, besides the sums: law 1 asks for as many shards.
    for name, array in arrays(found[3]).items():
        np.testing.assert_allclose(array, arrays(found[0])[name], rtol=0, atol=1e-4 * np.abs(array).max(), err_msg=name)
    losses = [[float(row["loss"]) for row in metrics(run)] for run in found]
    np.testing.assert_allclose(losses, losses[:1] * 4, rtol=1e-5)


def test_perplexity_is_that_of_the_mean_over_tokens(exact_run):
    for row in metrics(exact_run):
        assert float(row["perplexity"]) == pytest.approx(math.exp(float(row["loss"])), rel=1e-12)
        assert row["accuracy"] == "" and row["samples"] == {"train": "45", "val": "5"}[row["split"]]
    assert with_perplexity({"loss": math.log(2)}) == {"loss": math.log(2), "perplexity": pytest.approx(2)}
    assert with_perplexity({}) == {} and with_perplexity({"loss": 1e9})["perplexity"] == math.inf


def test_it_learns_and_the_best_is_that_of_the_smallest_loss(train, tmp_path):
    path = tmp_path / "pattern.txt"
    path.write_text("the cat sat on the mat. " * 200)
    code, out, err = train("--data", path, *TINY, "--batch-size", "16", "--epochs", "8", "--optimizer", "adamw",
                           "--lr", "0.02", "--out", tmp_path / "run", "--no-plots", "--no-tensorboard", "--json")
    assert code == 0
    losses = [float(row["loss"]) for row in metrics(tmp_path / "run") if row["split"] == "val"]
    # Bytes at random take log(256) = 5.5 nats each, and only the first few of a sequence cannot be foretold.
    assert losses[-1] < 0.5
    result = json.loads(out)
    assert result["monitor"] == "loss" and result["best"] == pytest.approx(min(losses))
    assert "tokens: 4,800 bytes, a token each; sequences of 16: 270 for training, the last 29 of the file" in err
    assert "its last 15 bytes are not used" in err
    assert re.search(r"epoch 8/8  train loss \S+ perplexity \S+  val loss \S+ perplexity", err)


def test_other_texts_are_evaluated(exact_run, text, tmp_path, capsys):
    def values(*arguments):
        capsys.readouterr()
        assert evaluate.main(["--run", str(exact_run), "--checkpoint", "latest", "--json", *map(str, arguments)]) == 0
        return json.loads(capsys.readouterr().out)

    own, last = values(), metrics(exact_run)[-1]
    assert (own["samples"], own["tokens"]) == (5, 80) and own["loss"] == pytest.approx(float(last["loss"]), rel=1e-6)
    (tmp_path / "other.txt").write_bytes(text.read_bytes()[-(5 * 16 + 8):])
    other = values("--data", tmp_path / "other.txt", "--batch-size", "2", "--cpus", "2")
    # The held out sequences end 7 bytes before the file does.
    assert other["samples"] == 5 and other["perplexity"] == pytest.approx(math.exp(other["loss"]))
    (tmp_path / "other.txt").write_bytes(text.read_bytes()[-(5 * 16 + 8):-7])
    assert values("--data", tmp_path / "other.txt", "--batch-size", "2")["loss"] == pytest.approx(own["loss"], rel=1e-6)


@pytest.mark.parametrize("given, says", [
    (["--label-smoothing", "0.1"], "--label-smoothing 0.1: has no effect on language"),
    (["--image-size", "8"], "--image-size 8: has no effect on language (--task lm)"),
    (["--on-bad-sample", "skip"], "--on-bad-sample skip: has no effect on language"),
    (["--ngrams", "1"], "--ngrams 1: has no effect on language"),
    (["--pretrained"], "--pretrained: is for networks of images"),
    (["--heads", "3"], "--heads 3: must divide --width 128"),
    (["--context", "1000"], "has 808 bytes; a sequence of --context 1000 needs 1001"),
    (["--model", "bag"], "--model bag: is a classifier of texts; for language there are gpt"),
    (["--model", "resnet18_v1"], "--model resnet18_v1: is a network for images; for language there are gpt"),
    (["--model", "own:net", "--layers", "2"], "--layers 2: has no effect on --model own:net, only on gpt"),
    ([*TINY, "--monitor", "accuracy"], "--monitor accuracy: no such value; allowed are auto, loss"),
    ([*TINY, "--monitor", "perplexity"], "--monitor perplexity: no such value"),
    ([*TINY, "--experts", "2", "--routing", "expert-choice"], "--routing expert-choice: an expert takes or leaves"),
    (["--experts", "2", "--capacity-factor", "3"], "--capacity-factor 3.0: makes room for more tokens than a shard"),
    (["--routing", "top2"], "--routing top2: has no effect without --experts"),
    (["--model", "own:net", "--experts", "2"], "--experts 2: has no effect on --model own:net, only on gpt"),
    (["--check-data"], "is a text for --task lm"),
])
def test_mistakes_are_one_line(train, text, given, says):
    code, _, err = train("--data", text, "--task", "lm", *given)
    assert code == 2 and says in one_line(err)


def test_other_tasks_refuse_the_shape(train):
    for given in (["--layers", "2"], ["--context", "64"], ["--dropout", "0.1"], ["--experts", "4"]):
        code, _, err = train(*given)
        assert code == 2 and f"{' '.join(given)}: has no effect on images (--task image)" in one_line(err)
    assert "is a language model (--task lm)" in one_line(train("--model", "gpt")[2])


def test_a_network_of_ones_own(train, text, tmp_path, monkeypatch):
    (tmp_path / "own_language.py").write_text(
        "from mxnet.gluon import nn\n"
        "def bigram(classes):\n"
        "    net = nn.HybridSequential()\n"
        "    net.add(nn.Embedding(classes, 8), nn.Dense(classes, flatten=False))\n"
        "    return net\n"
        "def classifier(classes):\n"
        "    net = nn.HybridSequential()\n"
        "    net.add(nn.Embedding(classes, 8), nn.Dense(classes))\n"
        "    return net\n")
    monkeypatch.chdir(tmp_path)
    common = ["--data", text, "--context", "16", "--batch-size", "20", "--epochs", "1", *QUIET]
    assert train(*common, "--model", "own_language:bigram", "--out", "run")[0] == 0
    code, _, err = train(*common, "--model", "own_language:classifier")
    assert code == 2 and "gives scores of shape (256,) for a sequence; (16, 256) is needed" in one_line(err)


def test_a_resumed_run_keeps_its_shape(train, exact_run):
    code, _, err = train("--resume", exact_run, "--layers", "3")
    assert code == 2 and "--layers 3: the run was started with 2" in one_line(err)
