#!/usr/bin/env python3
"""Images per second of two processes against one, and against what the machine has for two that never talk.

    python scripts/bench/scaling.py                                    # ResNet-18, 224x224; about ten minutes
    python scripts/bench/scaling.py --image-size 64 --batch-size 32 --steps 10 --rounds 5
    python scripts/bench/scaling.py --torch-python /path/to/env/bin/python --json

Each competitor is a set of processes of its own, one thread each, that train on the same kind of batch in memory
(`--batch-size` images per process): after --warm-up steps they wait for each other, then time --steps more, until all
is done. In each round each has its turn, in another order.

    one       mxtrain in one process
    apart     two such, which never talk: the ceiling of this machine
    horovod   mxtrain in two processes over Horovod
    server    mxtrain in two processes over one parameter server (dist_sync), a third process on the same cores
    horovod-fp16, horovod-2bit, server-fp16, server-2bit
              the same with --compression; only when named by --only
    trainer   Horovod's DistributedTrainer in two processes, in a loop as its users write it
    ddp       PyTorch's DistributedDataParallel over Gloo in two processes; needs --torch-python, the interpreter of an
              environment with PyTorch

`efficiency` is images per second over twice those of `one`, and over those of `apart`; `not hidden` is the time of a
step over that of `apart`: what the sum and waiting for each other add to it. Ratios and differences are medians over
the rounds of those within a round, since a busy machine slows a whole round; they mean little while others use the
machine, or where there are fewer cores than processes. `CPU a step` is what all threads of a training process use: it
is less disturbed by others, but does not see waiting. `MB sent` is what went over the loopback device in a step, from
one of two processes to another: half of it is what each of two has sent over Horovod; over a parameter server a quarter
is what each worker has sent to it, and as much came back.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, str(ROOT / "scripts" / "launch.py")]
MODELS = ("resnet18", "small")
CLASSES, RATE, MOMENTUM, DECAY = 1000, 0.01, 0.9, 1e-4
SECONDS = 600  # that a set of processes may take


def main() -> None:
    options = _options()
    if options.worker:
        WORKERS[options.worker](options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and end what was started
    found, parameters, failed = measure(options)
    output = {"images_per_second": {name: statistics.median(images(turn, options) for turn in turns)
                                    for name, turns in found.items()},
              "seconds_per_step": {name: statistics.median(map(seconds, turns)) for name, turns in found.items()},
              "cpu_seconds_per_step": {name: statistics.median(seconds(said, "cpu_seconds") for said in turns)
                                       for name, turns in found.items()},
              **compare(found, options),
              "bytes_per_step": {name: statistics.median(max(one["bytes"] for one in said) for said in turns)
                                 for name, turns in found.items()},
              "parameters": parameters,
              "load_before": options.load,
              "failed_turns": failed}
    if options.json:
        print(json.dumps(output))
        return
    print(f"{options.model}, {options.image_size}x{options.image_size}, {options.batch_size} images a process and "
          f"step, median of {options.rounds} rounds; load before: {options.load:.2f}")
    print(f"{'':13}{'images/s':>9}{'from':>9}{'to':>9}{'of 2 x one':>12}{'of apart':>10}"
          f"{'not hidden':>12}{'CPU a step':>12}{'MB sent':>9}")
    for name, turns in found.items():
        rates = [images(turn, options) for turn in turns]
        shares = "".join(f"{100 * output[key][name]:{width - 1}.1f}%" if name in output.get(key, {}) else " " * width
                         for key, width in (("of_twice_one", 12), ("of_apart", 10)))
        late, used = output["seconds_not_hidden"].get(name), output["cpu_seconds_per_step"][name]
        print(f"{name:13}{statistics.median(rates):9.2f}{min(rates):9.2f}{max(rates):9.2f}{shares}"
              + (" " * 12 if late is None else f"{1000 * late:9.0f} ms") + f"{1000 * used:9.0f} ms"
              + f"{output['bytes_per_step'][name] / 1e6:9.2f}")
    for name, count in failed.items():
        print(f"{name} failed {count} times, and was run again")


def _options():
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--model", choices=MODELS, default="resnet18", help="small: four convolutions")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=16, help="images per process (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are not counted, in each turn")
    parser.add_argument("--steps", type=int, default=5, help="steps that are counted, in each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=COMPETITORS, help="who runs")
    parser.add_argument("--torch-python", metavar="PATH", help="interpreter of an environment with PyTorch")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    # How this script starts itself as one of the processes: what it is, its number, how many, where to meet.
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=int(os.environ.get("MXTRAIN_RANK", 0)), help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--kvstore", help=argparse.SUPPRESS)
    parser.add_argument("--compression", default="none", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, least in (("image_size", 32), ("batch_size", 1), ("warm_up", 1), ("steps", 1), ("rounds", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {least}")
    if options.only is None:
        options.only = [name for name in COMPETITORS if "-" not in name and (name != "ddp" or options.torch_python)]
    elif "ddp" in options.only and not options.torch_python:
        parser.error("--only ddp: needs --torch-python")
    options.load = os.getloadavg()[0]
    return options


def measure(options):
    """What the processes of each competitor say in each round, the number of parameters, and how often who failed."""
    found, failed = {name: [] for name in options.only}, dict.fromkeys(options.only, 0)
    for number in range(options.rounds):
        first = number % len(found)  # nobody should always follow the same one
        for name in [*options.only[first:], *options.only[:first]]:
            found[name].append(_insist(name, options, failed))
    counts = {said["parameters"] for turns in found.values() for one in turns for said in one}
    if len(counts) != 1:
        sys.exit(f"the networks differ: they have {sorted(counts)} parameters")
    return found, counts.pop(), {name: count for name, count in failed.items() if count}


def _insist(name, options, failed):
    """A turn; one that fails is run again, so that one crash does not cost all that was measured, and is counted."""
    for last in (False, False, True):
        try:
            return turn(name, options)
        except Failed as error:
            if last:
                sys.exit(str(error))
            failed[name] += 1
            print(f"{error}\n{name} is run again", file=sys.stderr)


class Failed(Exception):
    """A process of a turn has failed."""


def turn(name, options):
    """Runs the processes of a competitor -> what each says: seconds and CPU seconds per step, parameters."""
    with tempfile.TemporaryDirectory() as folder:
        given = [f"--{flag}={getattr(options, flag.replace('-', '_'))}"
                 for flag in ("model", "image-size", "batch-size", "warm-up", "steps")]
        commands, size = COMPETITORS[name](options, [*given, f"--folder={folder}"])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with contextlib.ExitStack() as stack:
            running = []
            for number, (command, variables) in enumerate(commands):
                log = stack.enter_context(open(os.path.join(folder, f"log.{number}"), "w+b"))
                process = subprocess.Popen(command, env={**environment, **variables}, stdout=log, stderr=log)
                stack.callback(_end, process)
                running.append((process, log))
            until = time.monotonic() + SECONDS
            # When one has failed, another may be waiting for it.
            while any(process.poll() is None for process, _ in running):
                if any(process.poll() for process, _ in running) or time.monotonic() > until:
                    break
                time.sleep(0.05)
            for process, log in running:
                if process.poll() not in (0, None) or time.monotonic() > until:
                    log.seek(0)
                    text = log.read().decode(errors="replace")
                    raise Failed(f"{name} failed, or took more than {SECONDS} s:\n{text}")
        return [json.loads(Path(folder, f"report.{rank}").read_text()) for rank in range(size)]


def _end(process) -> None:
    """Ends a process that is still there; the launcher needs a moment to end what it has started."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()


# Each competitor gives the commands to run at once, with what they find in their environment, and how many report.

def _python(options, *arguments, interpreter=sys.executable):
    return [interpreter, str(Path(__file__).resolve()), *map(str, arguments)]


def one(options, given):
    return [(_python(options, "--worker=mxtrain", *given), {})], 1


def apart(options, given):
    return [(_python(options, "--worker=mxtrain", f"--rank={rank}", *given, "--size=2"), {}) for rank in (0, 1)], 2


def over_horovod(options, given, compression="none"):
    program = _python(options, "--worker=mxtrain", "--kvstore=horovod", f"--compression={compression}", "--size=2",
                      *given)
    return [([*LAUNCH, "--transport", "horovod", "-n", "2", "--", *program], {})], 2


def over_server(options, given, compression="none"):
    program = _python(options, "--worker=mxtrain", "--kvstore=dist_sync", f"--compression={compression}", "--size=2",
                      *given)
    return [([*LAUNCH, "-n", "2", "-s", "1", "--", *program], {})], 2


def distributed_trainer(options, given):
    program = _python(options, "--worker=trainer", "--size=2", *given)
    return [([*LAUNCH, "--transport", "horovod", "-n", "2", "--", *program], {})], 2


def ddp(options, given):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [(_python(options, "--worker=ddp", f"--rank={rank}", "--size=2", *given, interpreter=options.torch_python),
             {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"})
            for rank in (0, 1)], 2


COMPETITORS = {"one": one, "apart": apart, "horovod": over_horovod, "server": over_server,
               "trainer": distributed_trainer, "ddp": ddp,
               **{f"{name}-{kind}": functools.partial(over, compression=kind)
                  for name, over in (("horovod", over_horovod), ("server", over_server)) for kind in ("fp16", "2bit")}}


def seconds(said, kind="seconds") -> float:
    """Of a step: the mean over the processes of a turn."""
    return statistics.mean(one[kind] for one in said)


def images(said, options) -> float:
    """Per second, of all processes of a turn together."""
    return sum(options.batch_size / one["seconds"] for one in said)


def compare(found, options):
    """Efficiencies and the time that is not hidden: medians over the rounds of what is compared within a round."""
    def over(name, base, times):
        return statistics.median(images(mine, options) / (times * images(theirs, options))
                                 for mine, theirs in zip(found[name], found[base]))

    two = [name for name in found if name != "one"]
    talking = [name for name in two if name != "apart"]
    return {"of_twice_one": {name: over(name, "one", 2) for name in two} if "one" in found else {},
            "of_apart": {name: over(name, "apart", 1) for name in talking} if "apart" in found else {},
            "seconds_not_hidden": {name: statistics.median(seconds(mine) - seconds(theirs) for mine, theirs in
                                                           zip(found[name], found["apart"]))
                                   for name in talking} if "apart" in found else {}}


# What follows runs in the processes that are measured.

class Clock:
    """Times the steps that count: `step` is called before each step, `stop` after the last; `finish` waits until the
    work is done. All processes begin to count together."""

    def __init__(self, options, finish):
        self._options, self._finish, self._number = options, finish, 0

    def step(self) -> None:
        if self._number == self._options.warm_up:
            self._finish()
            folder, rank, size = self._options.folder, self._options.rank, self._options.size
            (folder / f"ready.{rank}").touch()
            while len(list(folder.glob("ready.*"))) < size:
                time.sleep(0.002)
            self._began, self._used, self._sent = time.perf_counter(), time.process_time(), loopback_bytes()
        self._number += 1

    def stop(self) -> None:
        self._finish()
        self.seconds = (time.perf_counter() - self._began) / self._options.steps
        self.cpu_seconds = (time.process_time() - self._used) / self._options.steps  # of all threads
        self.bytes = (loopback_bytes() - self._sent) / self._options.steps

    def report(self, parameters: int) -> None:
        said = {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds, "bytes": self.bytes, "parameters": parameters}
        (self._options.folder / f"report.{self._options.rank}").write_text(json.dumps(said))


def loopback_bytes() -> int:
    """Sent over the loopback device since the machine was started, by everybody."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def mxtrain_process(options) -> None:
    """mxtrain.fit, over what --kvstore says."""
    sys.path.insert(0, str(ROOT))
    import mxtrain  # before mxnet
    import mxnet as mx

    net = mxnet_network(options)
    count, rows = options.warm_up + options.steps, options.batch_size
    if options.kvstore:
        rows *= options.size  # of the global batch, of which each process takes its part
    batch = mxnet_batch(options, rows)

    class Batches:
        def __len__(self):
            return count

        def __iter__(self):
            self.clock = Clock(options, mx.nd.waitall)  # a new one, as fit looks at the first batch in front of it all
            for _ in range(count):
                self.clock.step()
                yield batch
            self.clock.stop()

    batches = Batches()
    mxtrain.fit(net, batches, kvstore=options.kvstore or "auto", schedule="constant", lr=RATE, momentum=MOMENTUM,
                weight_decay=DECAY, compression=options.compression)
    batches.clock.report(size_of(net))


def trainer_process(options) -> None:
    """A loop of Gluon with Horovod's DistributedTrainer."""
    sys.path.insert(0, str(ROOT))
    import mxtrain  # noqa: F401  (before mxnet)
    import horovod.mxnet as hvd
    import mxnet as mx
    from mxnet import autograd, gluon

    hvd.init()
    net, (x, y) = mxnet_network(options), mxnet_batch(options, options.batch_size)
    net.hybridize()
    parameters = net.collect_params()
    hvd.broadcast_parameters(parameters, root_rank=0)
    trainer = hvd.DistributedTrainer(parameters, "sgd", {"learning_rate": RATE, "momentum": MOMENTUM, "wd": DECAY})
    loss_function, clock = gluon.loss.SoftmaxCrossEntropyLoss(), Clock(options, mx.nd.waitall)
    for _ in range(options.warm_up + options.steps):
        clock.step()
        with autograd.record():
            loss = loss_function(net(x), y)
        loss.backward()
        trainer.step(len(x))
    clock.stop()
    clock.report(size_of(net))
    hvd.shutdown()


def mxnet_network(options):
    """A new network. It has not run yet: once it has, Horovod may be unable to broadcast weights that oneDNN has put
    into a layout of its own."""
    import mxnet as mx
    from mxnet.gluon import nn
    from mxnet.gluon.model_zoo import vision

    if options.model == "resnet18":
        net = vision.resnet18_v1(classes=CLASSES)
    else:
        net = nn.HybridSequential()
        for width in (32, 64, 128, 256):
            net.add(nn.Conv2D(width, 3, strides=2, padding=1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.GlobalAvgPool2D(), nn.Dense(CLASSES))
    net.initialize(mx.init.Xavier(magnitude=2.0))
    return net


def mxnet_batch(options, rows):
    import mxnet as mx

    return (mx.nd.random.normal(shape=(rows, 3, options.image_size, options.image_size)),
            mx.nd.random.randint(0, CLASSES, shape=(rows,)).astype("float32"))


def size_of(net) -> int:
    """Parameters of a Gluon network that have gradients."""
    import numpy as np

    return int(sum(np.prod(p.shape) for p in net.collect_params().values() if p.grad_req != "null"))


def ddp_process(options) -> None:
    """A loop of PyTorch with DistributedDataParallel."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(torch_network(options))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    x = torch.randn(options.batch_size, 3, options.image_size, options.image_size)
    y = torch.randint(0, CLASSES, (options.batch_size,))
    # On CPUs PyTorch has done the work when a call returns.
    loss_function, clock = nn.CrossEntropyLoss(), Clock(options, lambda: None)
    for _ in range(options.warm_up + options.steps):
        clock.step()
        optimizer.zero_grad()
        loss_function(model(x), y).backward()
        optimizer.step()
    clock.stop()
    clock.report(sum(p.numel() for p in model.parameters() if p.requires_grad))
    torch.distributed.destroy_process_group()


def torch_network(options):
    """The same networks in PyTorch."""
    from torch import nn

    def convolution(before, width, size, stride):
        layer = nn.Conv2d(before, width, size, stride, padding=size // 2, bias=False)
        return layer, nn.BatchNorm2d(width)

    class Residual(nn.Module):
        def __init__(self, before, width, stride):
            super().__init__()
            self.body = nn.Sequential(*convolution(before, width, 3, stride), nn.ReLU(inplace=True),
                                      *convolution(width, width, 3, 1))
            same = stride == 1 and before == width
            self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(before, width, 1, stride))

        def forward(self, x):
            return nn.functional.relu(self.body(x) + self.shortcut(x), inplace=True)

    if options.model == "resnet18":
        layers, before = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)], 64
        for width in (64, 128, 256, 512):
            layers += [Residual(before, width, 1 if width == before else 2), Residual(width, width, 1)]
            before = width
    else:
        layers, before = [], 3
        for width in (32, 64, 128, 256):
            layers += [*convolution(before, width, 3, 2), nn.ReLU(inplace=True)]
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


WORKERS = {"mxtrain": mxtrain_process, "trainer": trainer_process, "ddp": ddp_process}

if __name__ == "__main__":
    main()
