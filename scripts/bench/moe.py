#!/usr/bin/env python3
"""Tokens per second of mixtures of experts against dense layers, and how the ways to route train on a text.

    python scripts/bench/moe.py                                   # both cases; about fifteen minutes on a CPU
    python scripts/bench/moe.py --case layer --widths 512 --experts 8 --rounds 15
    python scripts/bench/moe.py --case text --data book.txt --updates 400 --rounds 3 --json

layer: forward and backward of one layer over --tokens tokens, compiled, on one device. The experts' room is just their
even share (--capacity-factor 1), so that `top1` and `expert_choice` compute as much as `dense`, a hidden layer of four
times the width, and `top2` as much as `dense2`, which is twice as wide; the router comes on top. The competitors take
turns; a ratio is the median over the rounds of that within a round (above 1: the first is faster), since a busy machine
slows a whole round. `CPU` is the same by the time that all threads of the process use, which others disturb less.

text: train.py trains the same small GPT, dense or with experts in every other block, with as many updates on the same
text (by default the sources of Python's standard library); each round has another seed, the same for all. Told are
medians over the rounds: tokens per second in training, the loss of validation at the end, the largest load of an expert
in even shares, and the share of choices that found no room (of tokens that no expert took), both over about the last
hundred updates. The loss of `expert_choice` is no measure of a language model: it sees what it is to foretell.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mxtrain import compat  # noqa: E402  (before mxnet)
from mxtrain.models.experts_settings import ExpertsConfig  # noqa: E402
from mxtrain.models.gpt_settings import GPTConfig  # noqa: E402

ROUTINGS = {"top1": "top1", "top2": "top2", "expert_choice": "expert-choice"}
LAYER_RATIOS = [("top1", "dense"), ("top2", "dense2"), ("expert_choice", "dense"), ("expert_choice", "top1")]
TEXT_RATIOS = [("top1", "dense"), ("top2", "dense"), ("expert_choice", "dense"), ("expert_choice", "top1"),
               ("expert_choice", "top2")]
TEXT_VALUES = {"tokens per second": ("train", "tokens_per_second"), "loss": ("val", "loss"),
               "load spread": ("train", "load_spread"), "dropped": ("train", "dropped")}
CONTEXT, BATCH = 128, 16
SHAPE = ["--layers", "4", "--heads", "4", "--width", "128", "--context", str(CONTEXT), "--batch-size", str(BATCH),
         "--optimizer", "adamw", "--lr", "0.002", "--clip-norm", "1"]


def main() -> None:
    options = _options()
    compat.set_threads(options.threads)
    output, ratios = {}, {}
    for width in options.widths if "layer" in options.case else ():
        wall, cpu = measure_layer(width, options)
        name = f"layer of width {width}, tokens per second"
        output[name] = {key: statistics.median(rates) for key, rates in wall.items()}
        for a, b in LAYER_RATIOS:
            for kind, found in (("", wall), (" CPU", cpu)):
                ratios[f"layer {width} {a}/{b}{kind}"] = statistics.median(x / y for x, y in zip(found[a], found[b]))
    if "text" in options.case:
        found = measure_text(options)
        for name in TEXT_VALUES:
            output[f"text, {name}"] = {key: statistics.median(row[name] for row in rows)
                                       for key, rows in found.items() if name in rows[0]}
        for a, b in TEXT_RATIOS:
            ratios[f"text {a}/{b} tokens per second"] = statistics.median(
                x["tokens per second"] / y["tokens per second"] for x, y in zip(found[a], found[b]))
    output["ratios"] = ratios
    if options.json:
        print(json.dumps(output))
        return
    for case, values in output.items():
        print(case)
        for name, value in values.items():
            print(f"  {name:42}{value:12.5g}")


def _options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=("layer", "text"), default=["layer", "text"])
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512], help="of layers")
    parser.add_argument("--tokens", type=int, default=2048, help="that a layer gets at once")
    parser.add_argument("--rounds", type=int, help="that are counted (default: 11 of layers, 3 of texts)")
    parser.add_argument("--warm-up", type=int, default=3, help="rounds of layers that are not counted")
    parser.add_argument("--data", help="text file")
    parser.add_argument("--updates", type=int, default=300, help="per training on a text")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def measure_layer(width: int, options):
    """Tokens per second of each competitor in each round: by the clock, and by the processor's time."""
    import mxnet as mx
    from mxnet import autograd

    from mxtrain.models.experts import Mixture
    from mxtrain.models.gpt import hidden_layer

    mx.random.seed(0)
    compat.keep_memory()
    x = mx.nd.random.normal(shape=(1, options.tokens, width))
    x.attach_grad()
    make = functools.partial(hidden_layer, GPTConfig(width=width))
    layers = {"dense": make("dense_"), "dense2": hidden_layer(GPTConfig(width=width), "dense2_", hidden=8 * width)}
    for name, routing in ROUTINGS.items():
        config = ExpertsConfig(experts=options.experts, routing=routing, capacity_factor=1.0)
        layers[name] = Mixture(config, width, make, 0.02, prefix=f"{name}_")
    for layer in layers.values():
        layer.initialize()
        layer.hybridize(static_alloc=True, static_shape=True)
    wall, cpu = ({name: [] for name in layers} for _ in range(2))
    for number in range(options.warm_up + (options.rounds or 11)):
        for name in _turned(list(layers), number):
            mx.nd.waitall()
            began, used = time.perf_counter(), time.process_time()
            with autograd.record():
                output = layers[name](x)
            output.backward()
            mx.nd.waitall()
            if number >= options.warm_up:
                wall[name].append(options.tokens / (time.perf_counter() - began))
                cpu[name].append(options.tokens / (time.process_time() - used))
    return wall, cpu


def measure_text(options) -> dict:
    """For each competitor what is told of each round: name -> value."""
    competitors = {"dense": [], **{name: ["--experts", str(options.experts), "--routing", routing]
                                   for name, routing in ROUTINGS.items()}}
    competitors["expert_choice"].append("--allow-leak")
    found = {name: [] for name in competitors}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_bytes(_text(options)[:(options.updates * BATCH * CONTEXT) * 10 // 9 + 1])
        for number in range(options.rounds or 3):
            for name in _turned(list(competitors), number):
                out = Path(folder, f"{name}-{number}")
                subprocess.run(
                    [sys.executable, str(ROOT / "scripts" / "train.py"), "--task", "lm", "--data", str(text),
                     "--val-split", "0.1", "--epochs", "1", *SHAPE, *competitors[name], "--seed", str(number), "--cpus",
                     "1", "--threads", str(options.threads), "--no-plots", "--no-tensorboard", "--no-progress",
                     "--out", str(out)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                found[name].append(_told(out))
    return found


def _text(options) -> bytes:
    if options.data:
        return Path(options.data).read_bytes()
    return b"\n".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))


def _told(run: Path) -> dict:
    with open(run / "metrics.csv", newline="") as file:
        rows = {row["split"]: row for row in csv.DictReader(file)}
    rows["train"]["tokens_per_second"] = float(rows["train"]["samples_per_second"]) * CONTEXT
    return {name: float(rows[split][column]) for name, (split, column) in TEXT_VALUES.items()
            if rows[split].get(column, "") != ""}


def _turned(names: list, number: int) -> list:
    """Nobody should always follow the same one."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


if __name__ == "__main__":
    main()
