"""generate.py: its draws against hand counts, the sliding window, and the program."""

import io
import json
import sys

import mxnet as mx
import numpy as np
import pytest

from mxtrain.errors import UserError
from mxtrain.inference import export, generate, predict
from mxtrain.inference.generate import choose, scorer
from mxtrain.inference.load import load
from mxtrain.inference.settings import GenerateConfig, RunConfig
from mxtrain.train.main import main as train

SCORES = np.log(np.array([0.1, 0.4, 0.1, 0.4], "float32")) + 7
CONTEXT = 16


@pytest.mark.parametrize("uniform, token", [
    (0.0, 1), (0.39, 1), (0.41, 3), (0.79, 3), (0.81, 0), (0.91, 2), (1 - 1e-12, 2)])
def test_each_token_is_drawn_as_often_as_its_probability(uniform, token):
    assert choose(SCORES, 1.0, None, uniform) == token  # the likeliest first: 1, 3, 0, 2


def test_a_border_belongs_to_the_token_after_it():
    assert choose(np.zeros(2, "float32"), 1.0, None, 0.5) == 1


def test_temperature_and_top_k():
    # At temperature 0.5 the probabilities are squared: 0.16 / 0.34 = 0.4706 for 1 and 3.
    assert [choose(SCORES, 0.5, None, u) for u in (0.47, 0.472, 0.94, 0.942, 0.98)] == [1, 3, 3, 0, 2]
    assert [choose(SCORES, 1.0, 3, u) for u in (0.44, 0.45, 0.88, 0.89, 0.999)] == [1, 3, 3, 0, 0]
    assert {choose(SCORES, 1.0, 1, u) for u in (0.0, 0.5, 0.999)} == {1}
    assert {choose(SCORES, 0, None, u) for u in (0.0, 0.5, 0.999)} == {1}
    assert choose(1e30 * SCORES, 1.0, None, 0.4) == 1 and choose(SCORES, 1e-30, None, 0.4) == 1  # nothing overflows


def test_draws_follow_the_seed_alone():
    def follow(seed, score=lambda tokens: np.roll(SCORES, len(tokens))):
        return list(generate.generate(score, [0], GenerateConfig(length=50, temperature=1.0, seed=seed)))

    assert follow(1) == follow(1) != follow(2)
    expected, random = [], np.random.RandomState(1)
    for n in range(50):
        expected.append(choose(np.roll(SCORES, 1 + n), 1.0, None, random.random_sample()))
    assert follow(1) == expected


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Knows a letter of two bytes and one of one byte, which take turns. (3 does not divide the context: each sequence
    begins with another byte than the one before it.)"""
    root = tmp_path_factory.mktemp("language")
    (root / "turns.txt").write_text("\u00e9x" * 2000)
    assert train(["--data", str(root / "turns.txt"), "--layers", "2", "--heads", "2", "--width", "16", "--context",
                  str(CONTEXT), "--batch-size", "16", "--epochs", "4", "--optimizer", "adamw", "--lr", "0.02",
                  "--out", str(root / "run"), "--no-progress", "--no-plots", "--no-tensorboard"]) == 0
    return root / "run"


def program(capsys, run, *arguments):
    capsys.readouterr()
    assert generate.main(["--run", str(run), *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_it_goes_on_with_what_it_learned_beyond_its_context(run, capsys):
    assert program(capsys, run, "--prompt", "\u00e9x", "--length", 57, "--temperature", 0) == "\u00e9x" * 20 + "\n"
    for prompt in ("\u00e9x", "\u00e9x" * 20):
        found = json.loads(program(capsys, run, "--prompt", prompt, "--length", 6, "--top-k", 1, "--json"))
        assert (found["text"], found["prompt"], found["tokens"]) == ("\u00e9x" * 2, prompt, 6)


def test_a_letter_that_is_cut_in_two(run, capsys):
    text = json.loads(program(capsys, run, "--prompt", "\u00e9x", "--length", 4, "--temperature", 0, "--json"))["text"]
    assert text == "\u00e9x\N{REPLACEMENT CHARACTER}"


def test_the_seed_gives_the_same_text(run, capsys):
    wild = ["--prompt", "\u00e9", "--length", 40, "--temperature", 50]
    one, again, other = (program(capsys, run, *wild, "--seed", seed) for seed in (1, 1, 2))
    assert one == again != other


def test_the_window_is_filled_up_behind_and_slides(run):
    trained = load(RunConfig(str(run)), [mx.cpu()])
    score = scorer(trained, mx.cpu())
    tokens = np.random.RandomState(0).randint(0, 256, 3 * CONTEXT).tolist()
    for count in (1, 5, CONTEXT, CONTEXT + 3, 3 * CONTEXT):
        seen = tokens[:count][-CONTEXT:]
        alone = trained.net(mx.nd.array([seen], dtype="int32"))[0, -1].asnumpy()
        np.testing.assert_allclose(score(tokens[:count]), alone, rtol=1e-4, atol=1e-5)


def test_a_prompt_from_the_standard_input(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\u00e9x".encode())))
    assert program(capsys, run, "--length", 6, "--temperature", 0) == "\u00e9x" * 3 + "\n"
    for given in (b"", None):
        monkeypatch.setattr(sys, "stdin", given if given is None else io.TextIOWrapper(io.BytesIO(given)))
        with pytest.raises(UserError, match="--prompt is (empty|missing)"):
            generate.main(["--run", str(run)])


@pytest.mark.parametrize("given, says", [
    (["--length", "0"], "--length 0: must be 1 or more"),
    (["--temperature", "-1"], "--temperature -1.0: must be a number"),
    (["--top-k", "0"], "--top-k 0: must be 1 or more"),
    (["--top-k", "257"], "--top-k 257: the vocabulary has 256 tokens"),
    (["--top-k", "5", "--temperature", "0"], "--top-k 5: has no effect with --temperature 0"),
    (["--seed", "-1"], "--seed -1: must be from 0"), (["--prompt", ""], "--prompt is empty"),
    (["--cpus", "2"], "one device is enough"),
])
def test_mistakes(run, given, says):
    with pytest.raises(UserError, match=says):
        generate.main(["--run", str(run), "--prompt", "x", *given])


def test_programs_for_the_other_kind_of_run(run, digits_run, tmp_path):
    for main, arguments in ((predict.main, ["x.png"]), (export.main, ["--out", str(tmp_path / "net")])):
        with pytest.raises(UserError, match="is a language model, .*generate.py --run"):
            main(["--run", str(run), *arguments])
    with pytest.raises(UserError, match="is a classifier of images, and no language model: predict.py"):
        generate.main(["--run", str(digits_run), "--prompt", "x"])


def test_settings_that_are_about_classes_are_refused(run):
    from mxtrain.inference import evaluate

    for given in (["--per-class"], ["--confusion", "x.csv"], ["--label-column", "x"], ["--encoding", "cp1252"]):
        with pytest.raises(UserError, match=f"{given[0]}.*: the run is a language model"):
            evaluate.main(["--run", str(run), *given])
