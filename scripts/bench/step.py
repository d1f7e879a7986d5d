#!/usr/bin/env python3
"""Updates per second of mxtrain and of other ways to train the same Gluon network, and what --exact and --audit cost.

    python scripts/bench/step.py                               # both cases; ResNet-18 takes minutes on a CPU
    python scripts/bench/step.py --case small --rounds 9
    python scripts/bench/step.py --case resnet18 --batch-size 16 --steps 4 --json

All competitors live in one process, start from the same kind of network and are given the same list of
batches, which are in memory. They take turns: in each round each makes one pass over the list. The time of a
pass runs from the moment it asks for the first batch until all its updates are done (`waitall`). For mxtrain
it includes the reading of the metrics, log and progress bar, as for the others whatever they do between
batches; what happens once per epoch (checkpoints, curves) is outside. Rounds of warm-up are not counted.

Ratios are medians over the rounds of the ratio within a round, since a busy machine slows a whole round. All
are ratios of speed (above 1: the first is faster) but "cost", which is one of time. They mean little while
others use the machine: the competitors differ in how well they use a second core.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import queue
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mxtrain import compat  # noqa: E402  (before mxnet)

# case: batch size, passed-over and counted rounds, updates per round
CASES = {"small": (64, 2, 7, 150), "resnet18": (64, 1, 3, 1)}
SHARDS = 8  # of the two competitors that tell the cost of --exact
RATIOS = {"mxtrain/hand": ("mxtrain", "hand"), "mxtrain/hand_accuracy": ("mxtrain", "hand_accuracy"),
          "mxtrain/hand_tuned": ("mxtrain", "hand_tuned"), "mxtrain/estimator": ("mxtrain", "estimator"),
          "mxtrain/module": ("mxtrain", "module"), "exact cost": ("mxtrain_shards", "mxtrain_exact"),
          "audited update, time": ("mxtrain_exact", "mxtrain_audit"),
          "compared update, time": ("mxtrain_two", "mxtrain_two_audit")}
RATE = {"learning_rate": 0.01, "momentum": 0.9, "wd": 1e-4}


def main() -> None:
    options = _options()
    if options.threads:
        compat.set_threads(options.threads)
    results = {case: measure(case, options) for case in options.case}
    output = {case: {name: statistics.median(rates) for name, rates in found.items()}
              for case, found in results.items()}
    output["ratios"] = {f"{case} {name}": statistics.median(x / y for x, y in zip(found[a], found[b]))
                        for case, found in results.items() for name, (a, b) in RATIOS.items()
                        if a in found and b in found}
    if options.json:
        print(json.dumps(output))
        return
    for case in options.case:
        rounds = len(next(iter(results[case].values())))
        print(f"{case}: updates per second, median of {rounds} rounds (from .. to)")
        for name, rates in results[case].items():
            print(f"  {name:16}{statistics.median(rates):10.4g}   ({min(rates):.4g} .. {max(rates):.4g})")
    print("ratios")
    for name, ratio in output["ratios"].items():
        print(f"  {name:32}{ratio:8.3f}")


def _options():
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--only", nargs="+", choices=COMPETITORS, default=list(COMPETITORS), help="who runs")
    parser.add_argument("--batch-size", type=int, help="default: 64")
    parser.add_argument("--warm-up", type=int, help="rounds that are not counted")
    parser.add_argument("--rounds", type=int, help="rounds that are counted")
    parser.add_argument("--steps", type=int, help="updates per round")
    parser.add_argument("--threads", type=int, help="OpenMP threads (default: OMP_NUM_THREADS, or 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def measure(case: str, options) -> dict:
    """Updates per second of each competitor in each round."""
    import mxnet as mx

    defaults = CASES[case]
    given = (options.batch_size, options.warm_up, options.rounds, options.steps)
    batch_size, warm_up, rounds, steps = (b if a is None else a for a, b in zip(given, defaults))
    data = make_batches(case, batch_size, steps)
    mx.random.seed(0)
    logging.getLogger("mxtrain").setLevel(logging.ERROR)  # it warns of small shards
    found = {name: [] for name in options.only}
    with contextlib.ExitStack() as stack, contextlib.redirect_stderr(_Terminal()):
        turns = {name: COMPETITORS[name](make_network(case), data, stack, warm_up + rounds)
                 for name in options.only}
        for number in range(warm_up + rounds):
            first = number % len(turns)  # nobody should always follow the same one
            for name in [*options.only[first:], *options.only[:first]]:
                seconds = turns[name]()
                if number >= warm_up:
                    found[name].append(steps / seconds)
    return found


class _Terminal(io.StringIO):
    """Makes a progress bar believe that it is seen."""

    def isatty(self):
        return True

    def write(self, text):
        return len(text)


def make_network(case: str):
    """A new network, initialized and run once."""
    import mxnet as mx
    from mxnet.gluon import nn
    from mxnet.gluon.model_zoo import vision

    if case == "small":
        net, shape = nn.HybridSequential(), (2, 32)
        net.add(*[nn.Dense(32, activation="relu") for _ in range(20)], nn.Dense(10))
    else:
        net, shape = vision.resnet18_v1(), (2, 3, 224, 224)
    net.initialize(mx.init.Xavier(magnitude=2.0))
    net(mx.nd.zeros(shape))
    return net


def make_batches(case: str, batch_size: int, steps: int):
    """`steps` batches (x, y) as a DataLoader, which the Estimator insists on; at most 8 are different."""
    import mxnet as mx
    from mxnet import gluon

    shape, classes = ((32,), 10) if case == "small" else ((3, 224, 224), 1000)
    different = [(mx.nd.random.normal(shape=(batch_size, *shape)),
                  mx.nd.random.randint(0, classes, shape=(batch_size,)).astype("float32"))
                 for _ in range(min(steps, 8))]

    class Batches(gluon.data.DataLoader):
        """Notes the `seconds` of a pass."""

        def __iter__(self):
            mx.nd.waitall()
            began = time.perf_counter()
            for i in range(steps):
                yield different[i % len(different)]
            mx.nd.waitall()
            self.seconds = time.perf_counter() - began

    return Batches(gluon.data.ArrayDataset(range(steps * batch_size)), batch_size)


# Each competitor is made with a network, the batches, an ExitStack and the number of rounds, and is a
# function that trains for one pass and returns its seconds.

def hand(net, data, stack, rounds, accuracy=False, tuned=False):
    """A loop as an experienced user of Gluon writes it."""
    import mxnet as mx
    from mxnet import autograd, gluon

    loss_function, metric = gluon.loss.SoftmaxCrossEntropyLoss(), mx.metric.Accuracy()
    trainer = gluon.Trainer(net.collect_params(), "sgd", dict(RATE))
    net.hybridize(**({"static_alloc": True, "static_shape": True} if tuned else {}))
    if tuned:
        loss_function.hybridize()
        trainer.optimizer.aggregate_num = 45

    def turn():
        for x, y in data:
            with autograd.record():
                output = net(x)
                loss = loss_function(output, y)
            loss.backward()
            trainer.step(len(x))
            if accuracy:
                metric.update(y, output)
        return data.seconds

    return turn


def hand_accuracy(*arguments):
    """The same, counting the hits."""
    return hand(*arguments, accuracy=True)


def hand_tuned(*arguments):
    """The first with all that one could know of: static memory, hybridized loss, many weights per call."""
    return hand(*arguments, tuned=True)


def estimator(net, data, stack, rounds):
    """Gluon's own trainer, as it comes."""
    import mxnet as mx
    from mxnet import gluon
    from mxnet.gluon.contrib.estimator import Estimator

    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", dict(RATE))
    trained = Estimator(net, gluon.loss.SoftmaxCrossEntropyLoss(), train_metrics=mx.metric.Accuracy(),
                        trainer=trainer, context=mx.cpu(0))
    trained.logger.setLevel(logging.ERROR)

    def turn():
        trained.fit(data, epochs=1)
        return data.seconds

    return turn


def module(net, data, stack, rounds):
    """The symbolic interface."""
    import mxnet as mx

    class Iterator(mx.io.DataIter):
        def __init__(self):
            first = next(iter(data))
            super().__init__(len(first[0]))
            self.provide_data = [mx.io.DataDesc("data", first[0].shape)]
            self.provide_label = [mx.io.DataDesc("softmax_label", first[1].shape)]

        def reset(self):
            pass

        def __iter__(self):
            return (mx.io.DataBatch([x], [y], pad=0) for x, y in data)

    symbol = mx.sym.SoftmaxOutput(net(mx.sym.var("data")), name="softmax")
    trained, batches = mx.mod.Module(symbol, context=mx.cpu(0)), Iterator()
    trained.logger = logging.getLogger("bench.module")
    trained.logger.setLevel(logging.ERROR)
    trained.bind(batches.provide_data, batches.provide_label)
    trained.init_params(mx.init.Xavier(magnitude=2.0))
    trained.init_optimizer(optimizer="sgd", optimizer_params=dict(RATE))

    def turn():
        trained.fit(batches, num_epoch=1, eval_metric="acc")
        return data.seconds

    return turn


def mxtrain(net, data, stack, rounds, **settings):
    """mxtrain.fit with accuracy, run folder and progress bar; one epoch is a turn.

    It trains in a thread, which an epoch's end puts to sleep until the next turn.
    """
    from mxtrain.callbacks.base import Callback
    from mxtrain.callbacks.progress import Progress
    from mxtrain.train.fit import fit

    begin, ended = threading.Semaphore(0), queue.Queue()

    class Turns(Callback):
        def epoch(self, rows):
            ended.put(data.seconds)
            begin.acquire()

    def train():
        try:
            begin.acquire()
            fit(net, data, batch_size=data._batch_sampler._batch_size, epochs=rounds, schedule="constant",
                lr=RATE["learning_rate"], momentum=RATE["momentum"], weight_decay=RATE["wd"], out=folder,
                callbacks=[Progress(rounds, len(data)), Turns()], **settings)
        except BaseException as error:
            ended.put(error)

    def turn():
        begin.release()
        seconds = ended.get()
        if isinstance(seconds, BaseException):
            raise seconds
        return seconds

    folder = str(Path(stack.enter_context(tempfile.TemporaryDirectory()), "run"))
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    stack.callback(thread.join, 60)
    stack.callback(begin.release)
    return turn


def mxtrain_shards(*arguments):
    """The same in shards, whose gradients are added in float32."""
    return mxtrain(*arguments, shards=SHARDS)


def mxtrain_exact(*arguments):
    """The same in shards, whose gradients are added exactly."""
    return mxtrain(*arguments, shards=SHARDS, exact=True)


def mxtrain_audit(*arguments):
    """That, and in (almost) every update a shard is run again and the weights are hashed."""
    return mxtrain(*arguments, shards=SHARDS, exact=True, audit=0.999999)


def mxtrain_two(*arguments, **settings):
    """mxtrain on two contexts."""
    import mxnet as mx

    return mxtrain(*arguments, ctx=[mx.cpu(0), mx.cpu(1)], **settings)


def mxtrain_two_audit(*arguments):
    """That, with the weights of both compared after every update."""
    return mxtrain_two(*arguments, audit=1)


COMPETITORS = {f.__name__: f for f in (hand, hand_accuracy, hand_tuned, estimator, module, mxtrain, mxtrain_shards,
                                       mxtrain_exact, mxtrain_audit, mxtrain_two, mxtrain_two_audit)}

if __name__ == "__main__":
    main()
