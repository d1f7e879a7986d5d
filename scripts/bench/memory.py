#!/usr/bin/env python3
"""Memory and time of training steps: plain and recomputed, with ZeRO, and in the stages of a pipeline, on CPU contexts.

    python scripts/bench/memory.py                             # everything, about two minutes on one core
    python scripts/bench/memory.py --part recompute --case gpt --rounds 9
    python scripts/bench/memory.py --json

recompute: bytes that a step takes at most besides weights, gradients and optimizer states (the activations' peak), and
    its seconds, each way in turns. Bytes are measured in a process of their own for each way, since workspaces of
    operators stay as large as they ever were; they are counted by MXNet's storage. What was predicted is beside them.
zero: the most bytes of weights, gradients and Adam's states that one of --contexts contexts holds, against equal shares.
pipeline: bytes of activations of each of --contexts stages with the micro-batches in flight that its schedule asks for,
    against what --plan computes.

Ratios of time mean little while others use the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mxtrain import compat  # noqa: E402  (before mxnet)

CASES = ("gpt", "convs")
WAYS = ("none", "8", "blocks")
PARTS = ("recompute", "zero", "pipeline")


def main() -> None:
    options = _options()
    if options.threads:
        compat.set_threads(options.threads)
    logging.getLogger("mxtrain").setLevel(logging.ERROR)
    compat.keep_memory()
    if options.bytes_of:
        kind, way = options.bytes_of
        print({"measured": measured, "predicted": predicted, "held": held}[kind](options.case[0], way, options.contexts))
        return
    output = {}
    for case in options.case:
        for part in options.part:
            {"recompute": recompute, "zero": zero, "pipeline": pipeline}[part](case, options, output)
    output["ratios"] = output.pop("ratios")  # last
    if options.json:
        print(json.dumps(output))
        return
    for name, numbers in output.items():
        print(name)
        for key, value in numbers.items():
            print(f"  {key:44}{value:14.6g}")


def _options():
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--contexts", type=int, default=4, help="for zero and pipeline (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that are not counted (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are counted (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="OpenMP threads (default: OMP_NUM_THREADS, or 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--bytes-of", nargs=2, help=argparse.SUPPRESS)  # for this script's own processes
    return parser.parse_args()


class Network:
    """A network of a dozen blocks with the same activations, and a batch."""

    def __init__(self, case: str):
        import mxnet as mx
        import numpy as np
        from mxnet import gluon
        from mxnet.gluon import nn

        from mxtrain.models import plan
        from mxtrain.models.gpt import GPT
        from mxtrain.models.gpt_settings import GPTConfig
        from mxtrain.tasks.heads import heads_for
        from mxtrain.tasks.language import TokenLoss

        numbers = np.random.RandomState(0)
        if case == "gpt":
            self.net, loss, classes = GPT(256, GPTConfig(layers=12, heads=4, width=128, context=128)), TokenLoss(), None
            self.batch = [numbers.randint(0, 256, (16, 128)).astype("int32") for _ in range(2)]
        else:
            self.net, loss, classes = nn.HybridSequential(), gluon.loss.SoftmaxCrossEntropyLoss(), 10
            self.net.add(*[_block() for _ in range(12)], nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(10, in_units=32))
            self.batch = [numbers.rand(32, 32, 32, 32).astype("float32"), numbers.randint(0, 10, 32).astype("int32")]
        self.net.initialize(mx.init.Xavier(), ctx=mx.cpu())
        self.heads, self.segments = heads_for(loss, classes), plan.segments(self.net)
        self.inputs, self.label = (mx.nd.array(x[:2], dtype=x.dtype) for x in self.batch)
        self.net(self.inputs)

    @property
    def sample(self) -> tuple:
        """The first arguments of parallel.measure.measure."""
        return self.segments, self.heads[0], [self.inputs], self.label

    def layout(self, contexts=None, shards: int = 1, **settings):
        import mxnet as mx

        from mxtrain.parallel.layout import Layout

        contexts = contexts or [mx.cpu()]
        if len(settings.get("stages", [0])) == 1:
            self.net.collect_params().reset_ctx(contexts)
        return Layout(self.net, *self.heads, contexts, shards, sample=[self.inputs], **settings)

    def step(self, layout) -> None:
        layout.forward_backward(self.batch, 0)
        layout.finish(layout.shards)


def _block():
    """Two convolutions with normalization around which the input goes, too."""
    from mxnet.gluon import HybridBlock, nn

    class Block(HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.body = nn.HybridSequential()
                for _ in range(2):
                    self.body.add(nn.Conv2D(32, 3, padding=1, use_bias=False, in_channels=32),
                                  nn.BatchNorm(in_channels=32), nn.Activation("relu"))

        def hybrid_forward(self, F, x):
            return x + self.body(x)

    return Block()


def recompute(case: str, options, output: dict) -> None:
    """Bytes and seconds of a step, by the way to recompute."""
    found = {kind: {way: _in_a_process(case, kind, way, 1) for way in WAYS} for kind in ("measured", "predicted")}
    seconds = _seconds_of_steps(case, options.warm_up, options.rounds)
    output[f"{case} activations' peak, bytes"], output[f"{case} predicted bytes"] = found.values()
    output[f"{case} seconds"] = {way: statistics.median(times) for way, times in seconds.items()}
    for way in WAYS:
        ratios = {"predicted bytes": found["predicted"][way] / found["measured"][way]}
        if way != "none":
            ratios["peak"] = found["measured"][way] / found["measured"]["none"]
            ratios["time"] = statistics.median(a / b for a, b in zip(seconds[way], seconds["none"]))
        for name, ratio in ratios.items():
            output.setdefault("ratios", {})[f"{case} {way} {name}"] = ratio


def _in_a_process(case: str, kind: str, way: str, contexts: int) -> float:
    command = [sys.executable, __file__, "--case", case, "--contexts", str(contexts), "--bytes-of", kind, way]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measured(case: str, way: str, _) -> float:
    """Bytes of a step at most, besides weights and gradients; of the second and third, when workspaces have grown."""
    import mxnet as mx

    from mxtrain.parallel.counting import counting, live, peak

    with counting():
        network = Network(case)
        layout = network.layout(recompute=way)
        weights = live(mx.cpu())
        network.step(layout)
        return max(peak(mx.cpu(), lambda: network.step(layout))[1] for _ in range(2)) - weights


def predicted(case: str, way: str, _) -> float:
    """The same, computed from what the segments take."""
    from mxtrain.parallel.measure import measure
    from mxtrain.parallel.memory import activations, group_peak
    from mxtrain.parallel.program import group_starts

    network = Network(case)
    starts = group_starts(network.net, network.segments, way)
    costs = measure(*network.sample, len(network.batch[0]), starts, static=way == "none")
    taken = group_peak(costs.segments, True, True) if way == "none" else activations(costs.segments, starts)
    return taken + costs.workspace + sum(x.nbytes for x in network.batch)


def _seconds_of_steps(case: str, warm_up: int, rounds: int) -> dict:
    """Seconds of a step in each round, the ways in turns."""
    import mxnet as mx

    found = {way: [] for way in WAYS}
    networks = {way: Network(case) for way in WAYS}
    layouts = {way: network.layout(recompute=way) for way, network in networks.items()}
    for number in range(warm_up + rounds):
        first = number % len(WAYS)  # nobody should always follow the same one
        for way in [*WAYS[first:], *WAYS[:first]]:
            mx.nd.waitall()
            began = time.perf_counter()
            networks[way].step(layouts[way])
            mx.nd.waitall()
            if number >= warm_up:
                found[way].append(time.perf_counter() - began)
    return found


def zero(case: str, options, output: dict) -> None:
    """The most bytes that a context holds between steps, by the stage of ZeRO; and in theory."""
    found = {stage: _in_a_process(case, "held", str(stage), options.contexts) for stage in (0, 1, 2)}
    parameters = [p for p in Network(case).net.collect_params().values()]
    all_of_them = 4 * sum(p.data().size for p in parameters)
    trained = 4 * sum(p.data().size for p in parameters if p.grad_req != "null")
    shared = trained / options.contexts
    theory = {0: all_of_them + 3 * trained, 1: all_of_them + trained + 2 * shared, 2: all_of_them + 3 * shared}
    output[f"{case} held by each of {options.contexts} contexts, bytes"] = {f"zero {z}": found[z] for z in found}
    output[f"{case} in theory, bytes"] = {f"zero {z}": theory[z] for z in theory}
    for z in found:
        output.setdefault("ratios", {})[f"{case} zero {z} held/theory"] = found[z] / theory[z]


def held(case: str, stage: str, contexts: int) -> float:
    """Most bytes of weights, gradients and Adam's states that one of the contexts holds after a step."""
    import mxnet as mx

    from mxtrain.optim.optimizer import Optimizer
    from mxtrain.optim.settings import OptimConfig
    from mxtrain.parallel.counting import counting, live

    there = [mx.cpu(i) for i in range(contexts)]
    with counting():
        network = Network(case)
        # Recomputed, so that no graph holds memory of its own.
        layout = network.layout(there, contexts, zero=int(stage), recompute="blocks")
        optimizer = Optimizer(OptimConfig(optimizer="adam"), {p.name: p for p in layout.parameters}, layout.held)
        network.step(layout)
        optimizer.update(0, 0.001, 1 / 16)
        layout.share()
        network.inputs = network.label = None
        with_all = [live(ctx) for ctx in there]
        del network, layout, optimizer
        gc.collect()
        return max(before - live(ctx) for before, ctx in zip(with_all, there))


def pipeline(case: str, options, output: dict) -> None:
    """Bytes of activations in every stage, with as many micro-batches in flight as its schedule has; and as planned."""
    import mxnet as mx

    from mxtrain.parallel.cut import balanced
    from mxtrain.parallel.measure import measure
    from mxtrain.parallel.memory import activations
    from mxtrain.parallel.schedule import SCHEDULES, most_in_flight

    network, stages, shards = Network(case), options.contexts, 2 * options.contexts
    rows = len(network.batch[0]) // shards
    starts = balanced([1.0] * len(network.segments), stages, case)
    costs = measure(*network.sample, rows, starts)
    x, label = (mx.nd.array(array[:rows], dtype=array.dtype) for array in network.batch)
    inputs = [x]
    for segment in network.segments[:starts[-1]]:
        inputs.append(segment(inputs[-1]))
    layout = network.layout([mx.cpu(i) for i in range(stages)], shards, stages=starts)
    network.step(layout)  # workspaces grow
    for schedule in SCHEDULES:
        for stage, instructions in enumerate(SCHEDULES[schedule](stages, shards)):
            own = costs.segments[starts[stage]:[*starts, None][stage + 1]]
            in_flight, last = most_in_flight(instructions), stage == stages - 1
            taken = _in_flight(layout._runners[stage], inputs[starts[stage]], [label] if last else [], in_flight, stage)
            planned = activations(own, [0], in_flight, recompute=False, first=stage == 0)
            name = f"{schedule} stage {stage}, {in_flight} in flight"
            output.setdefault(f"{case} activations, bytes", {})[name] = taken
            output.setdefault("ratios", {})[f"{case} {name}, planned"] = planned / taken


def _in_flight(runner, x, label: list, in_flight: int, stage: int) -> int:
    """Bytes of that many forwards of a stage and then a backward, at most. Without inputs of the network."""
    import mxnet as mx

    from mxtrain.parallel.counting import counting, live, peak

    def work() -> None:
        gradient = None
        for m in range(in_flight):
            given = [array.as_in_context(runner.ctx) for array in label]
            inputs = x.as_in_context(runner.ctx) if stage == 0 else x.copyto(runner.ctx)
            output = runner.forward(m, [inputs], given, (0, 0, m))
            mx.nd.waitall()
        if not label:
            gradient = mx.nd.ones_like(output)
        del inputs, output
        runner.backward(0, gradient, given, (0, 0, 0))

    with counting():
        runner.begin(True)
        before = live(runner.ctx)
        taken = peak(runner.ctx, work)[1] - before
        runner.begin(True)  # gives up the others
    return taken


if __name__ == "__main__":
    main()
