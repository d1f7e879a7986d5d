"""generate.py: a language model goes on with a text."""

from __future__ import annotations

import codecs
import logging
import sys
from typing import TYPE_CHECKING, Callable, Iterator, List, Optional, Sequence

import numpy as np

from mxtrain import cli, config
from mxtrain.devices import DeviceConfig
from mxtrain.errors import TrainingError, UserError
from mxtrain.inference import description, program
from mxtrain.inference.settings import GenerateConfig, RunConfig
from mxtrain.train import checkpoint

if TYPE_CHECKING:  # it imports mxnet
    from mxtrain.inference.load import Trained

_log = logging.getLogger("mxtrain")

_SECTIONS = {"run": RunConfig, "generate": GenerateConfig, "devices": DeviceConfig}


def main(argv: List[str]) -> int:
    """Generates as the command line says; returns the exit code."""
    parser = config.parser("generate.py", "Let a language model of train.py --task lm go on with a text.")
    settings = program.parse(parser, _SECTIONS, argv)
    kind = description.read(checkpoint.find(settings.run.run)[0]).kind
    if kind != "lm":
        raise UserError(f"--run {settings.run.run}: is a classifier of {kind}s, and no language model: predict.py uses "
                        "it")
    prompt = _prompt(settings.generate.prompt)
    contexts = program.open_contexts(settings.devices)
    if len(contexts) > 1:
        raise UserError(f"{', '.join(map(str, contexts))}: one device is enough to generate; give one")

    from mxtrain.data.tokens import encode
    from mxtrain.inference.load import load

    run = load(settings.run, contexts)
    how = settings.generate
    if how.top_k is not None and how.top_k > len(run.classes):
        raise UserError(f"--top-k {how.top_k}: the vocabulary has {len(run.classes)} tokens")
    tokens = encode(prompt).tolist()
    if len(tokens) > run.input.context:
        _log.info("of the %d tokens of the prompt the last %d are seen, which is the run's --context", len(tokens),
                  run.input.context)
    pieces = _letters(generate(scorer(run, contexts[0]), tokens, how))
    if settings.json:
        text = "".join(pieces)
        cli.print_json({**run.origin(), "prompt": _shown(prompt), "text": text, "tokens": how.length, "seed": how.seed,
                        "temperature": how.temperature, "top_k": how.top_k})
        return 0
    print(_shown(prompt), end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def generate(score: Callable[[Sequence[int]], np.ndarray], prompt: Sequence[int], how: GenerateConfig) -> Iterator[int]:
    """Yields `how.length` tokens that follow a prompt of at least one.

    score: tokens -> (vocabulary,) scores of the one that follows. Every draw takes one number of numpy's generator
    RandomState(how.seed), so that the device plays no part in it.
    """
    random, tokens = np.random.RandomState(how.seed), list(prompt)
    for _ in range(how.length):
        tokens.append(choose(score(tokens), how.temperature, how.top_k, random.random_sample()))
        yield tokens[-1]


def choose(scores: np.ndarray, temperature: float, top_k: Optional[int], uniform: float) -> int:
    """The token that a number of [0, 1) falls on, when each takes a part of it as large as its probability.

    scores: (vocabulary,), any float; probabilities are the softmax of scores / temperature over the top_k largest. At
    temperature 0 it is the largest score's, of equal ones the first.
    """
    order = np.argsort(-scores, kind="stable")[:top_k]
    if temperature == 0:
        return int(order[0])
    scores = scores[order].astype(np.float64)
    ends = np.cumsum(np.exp((scores - scores[0]) / temperature))
    return int(order[np.searchsorted(ends, uniform * ends[-1], side="right")])


def scorer(run: Trained, ctx) -> Callable[[Sequence[int]], np.ndarray]:
    """What gives the scores of the token after some tokens, of which the last `context` count.

    The network always gets sequences of one length, filled up on the right with what no place before it can see, so
    that MXNet prepares its graph once.
    """
    import mxnet as mx
    from mxnet import autograd

    from mxtrain.parallel.program import compile_chain

    block, context = compile_chain([run.net], static=True), run.input.context

    def score(tokens: Sequence[int]) -> np.ndarray:
        window = list(tokens[-context:])
        ids = np.zeros((1, context), np.int32)
        ids[0, :len(window)] = window
        with autograd.pause(train_mode=False):
            scores = block(mx.nd.array(ids, ctx=ctx, dtype="int32"))[0, len(window) - 1].asnumpy()
        if not np.isfinite(scores).all():
            raise TrainingError(f"{run.checkpoint}: the network's output is not finite")
        return scores

    return score


def _prompt(given: Optional[str]) -> str:
    """The prompt, with bytes that are no UTF-8 as Python's surrogates."""
    if given is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise UserError("--prompt is missing: give a text to go on with, or send one to the standard input")
        given = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    if not given:
        raise UserError("--prompt is empty: give at least one character to go on with")
    return given


def _shown(prompt: str) -> str:
    return prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _letters(tokens: Iterator[int]) -> Iterator[str]:
    """The text of bytes, letters as soon as they are complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield decoder.decode(bytes([token]))
    yield decoder.decode(b"", final=True)
