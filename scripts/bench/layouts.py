#!/usr/bin/env python3
"""How far the weights of the same training are apart in other layouts: a table.

    python scripts/bench/layouts.py                                # all that this machine can run; minutes
    python scripts/bench/layouts.py --network gpt --transport none # contexts of one process alone
    python scripts/bench/layouts.py --only "pp 2" --updates 3 --json

Two small networks are trained, each from the same start and by the same updates, in every layout: `conv` (convolutions,
batch normalization, dropout, dense layers) and `gpt` (a decoder whose embedding and output are one weight). Batches
are cut into 8 shards, so that gradients are accumulated, and clipped by their global norm.

Compared with one context of one process is all that the last checkpoint holds: weights, running statistics and the
optimizer's states. With float sums, and with --exact where the bits are not equal, the table has the difference of the
array that is the furthest off: max |difference| / max |value|.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mxtrain  # noqa: E402  (before mxnet)
import numpy as np  # noqa: E402
from mxtrain import compat  # noqa: E402

SHARDS, BATCH = 8, 24


class Case(NamedTuple):
    contexts: int
    """Of each process."""
    settings: dict
    processes: int = 1
    transport: str = "none"

    @property
    def name(self) -> str:
        flags = ", ".join(f"{key} {value}" for key, value in self.settings.items()) or "replicas"
        contexts = f"{self.contexts} context{'s' * (self.contexts > 1)}"
        if self.transport == "none":
            return f"{contexts}: {flags}"
        return f"{self.processes} processes x {contexts}, {self.transport}: {flags}"


CASES = [
    Case(2, {}),
    Case(4, {}),
    Case(2, dict(pp=2)),
    Case(2, dict(pp=2, pp_schedule="gpipe")),
    Case(4, dict(pp=4)),
    Case(4, dict(dp=2, pp=2)),
    Case(2, dict(zero=1)),
    Case(3, dict(zero=2)),
    Case(3, dict(zero=3)),
    Case(4, dict(dp=2, pp=2, zero=1)),
    Case(4, dict(dp=2, pp=2, zero=2)),
    Case(4, dict(dp=2, pp=2, zero=3)),
    Case(1, dict(recompute="blocks")),
    Case(4, dict(pp=4, recompute="blocks")),
    Case(3, dict(zero=2, recompute="blocks")),
    Case(4, dict(dp=2, pp=2, zero=2, recompute="blocks")),
    Case(1, {}, 2, "horovod"),
    Case(1, dict(pp=2), 2, "horovod"),
    Case(1, dict(zero=1), 2, "horovod"),
    Case(1, dict(zero=2), 2, "horovod"),
    Case(1, dict(zero=3), 2, "horovod"),
    Case(2, dict(pp=4), 2, "horovod"),
    Case(2, dict(dp=2, pp=2, zero=2), 2, "horovod"),
    Case(2, dict(pp=4, recompute="blocks"), 2, "horovod"),
    Case(1, dict(pp=3), 3, "horovod"),
    Case(1, dict(zero=2), 3, "horovod"),
    Case(1, dict(pp=4), 4, "horovod"),
    Case(1, dict(dp=2, pp=2, zero=1), 4, "horovod"),
    Case(1, dict(dp=2, pp=2, zero=2, recompute="blocks"), 4, "horovod"),
    Case(2, dict(dp=2, pp=4, zero=2), 4, "horovod"),
    Case(1, dict(dp=2, pp=2, zero=3), 4, "horovod"),
    Case(1, dict(zero=2), 2, "dist_sync"),
    Case(1, dict(zero=3), 2, "dist_sync"),
    Case(2, dict(dp=2, pp=2, zero=1), 2, "dist_sync"),
    Case(2, dict(dp=2, pp=2, zero=2, recompute="blocks"), 2, "dist_sync"),
]


def main() -> None:
    options = _options()
    if options.worker:
        _train_all(Path(options.worker), options)
        return
    cases = [case for case in CASES if case.transport in options.transport
             and (not options.only or any(part in case.name for part in options.only))]
    if importlib.util.find_spec("horovod") is None:
        cases = [case for case in cases if case.transport != "horovod"]
    if not cases:
        sys.exit(f"layouts.py: error: --only {' '.join(options.only)}: no layout is named so")
    found = measure(cases, options)
    if options.json:
        print(json.dumps(found))
        return
    sums = {"float": "float sums", "exact": "`--exact`"}
    columns = [(network, key) for network in options.network for key in sums]
    print("| " + " | ".join(["layout", *(f"{network}, {sums[key]}" for network, key in columns)]) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for case in cases:
        print("| " + " | ".join([case.name, *(in_words(found[network][case.name][key]) for network, key in columns)]) + " |")


def _options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--transport", nargs="+", choices=("none", "horovod", "dist_sync"),
                        default=["none", "horovod", "dist_sync"], help="none: contexts of one process")
    parser.add_argument("--only", nargs="+", default=[], help="layouts whose names, as printed, contain one of these")
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(cases: List[Case], options) -> Dict[str, Dict[str, Dict[str, Optional[float]]]]:
    """network -> layout -> sums (float, exact) -> difference, None for equal bits."""
    with tempfile.TemporaryDirectory() as folder:
        starts = dict.fromkeys((case.transport, case.processes) for case in cases)
        for transport, processes in dict.fromkeys([("none", 1), *starts]):
            _start(Path(folder), transport, processes, [CASES.index(case) for case in cases
                                                        if (case.transport, case.processes) == (transport, processes)],
                   options)
        return {network: {case.name: {sums: difference(_arrays(Path(folder, f"{network}-{sums}-{CASES.index(case)}")),
                                                       _arrays(Path(folder, f"{network}-{sums}-one")))
                                      for sums in ("float", "exact")} for case in cases}
                for network in options.network}


def _start(folder: Path, transport: str, processes: int, numbers: List[int], options) -> None:
    """Trains layouts that go over as many processes, one after the other."""
    (folder / "todo.json").write_text(json.dumps(numbers))
    command = [sys.executable, __file__, "--worker", folder, "--network", *options.network, "--updates", options.updates]
    if transport != "none":
        how = ["--transport", "horovod"] if transport == "horovod" else ["-s", 1]
        command = [sys.executable, ROOT / "scripts" / "launch.py", "-n", processes, *how, "--", *command]
    done = subprocess.run(list(map(str, command)), env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"layouts.py: error: {transport}, {processes} processes: {done.stderr}")


def difference(one: Dict[str, np.ndarray], other: Dict[str, np.ndarray]) -> Optional[float]:
    """Of the array that is the furthest off: max |difference| / max |other|; None where all bits are equal."""
    if one.keys() != other.keys():
        raise ValueError("checkpoints with other names")
    if all(one[name].tobytes() == array.tobytes() for name, array in other.items()):
        return None
    return max(float(np.abs(one[name] - array).max() / max(np.abs(array).max(), 1e-30))
               for name, array in other.items() if array.size)


def in_words(value: Optional[float]) -> str:
    return "equal bits" if value is None else f"{value:.1e}"


def _arrays(run: Path) -> Dict[str, np.ndarray]:
    from mxtrain.train import checkpoint

    return checkpoint.Folder(run / "checkpoints", reads_only=True).newest().arrays


# In the processes that train.

def _train_all(folder: Path, options) -> None:
    """Trains what todo.json names, and in a single process one context."""
    import mxnet as mx
    from mxtrain.parallel.world import world

    kvstore = "dist_sync" if "DMLC_ROLE" in os.environ else None
    alone = not world(kvstore).several
    named = {number: CASES[number] for number in json.loads((folder / "todo.json").read_text())}
    for network in options.network:
        for sums in ("float", "exact"):
            for name, case in {**({"one": Case(1, {})} if alone else {}), **named}.items():
                mx.random.seed(0)
                np.random.seed(0)
                net, data, loss, settings = NETWORKS[network](options.updates)
                mxtrain.fit(net, data, loss=loss, ctx=[mx.cpu(c) for c in range(case.contexts)],
                            kvstore=kvstore or "auto", batch_size=BATCH, shards=SHARDS, exact=sums == "exact",
                            clip_norm=0.5, plots=False, tensorboard=False, out=str(folder / f"{network}-{sums}-{name}"),
                            **settings, **case.settings)


def conv(updates: int):
    """(network, data, loss, settings) of so many updates."""
    from mxnet import gluon
    from mxnet.gluon import nn

    smooth = "softrelu"  # a relu's gradient jumps: a rounding that sends one value over the edge is seen everywhere
    net = nn.HybridSequential(prefix="")
    net.add(nn.Conv2D(8, 3, use_bias=False), nn.BatchNorm(), nn.Activation(smooth), nn.Dropout(0.2),
            nn.Conv2D(16, 3, strides=2, use_bias=False), nn.BatchNorm(), nn.Activation(smooth), nn.Flatten(),
            nn.Dense(32, activation=smooth), nn.Dropout(0.3), nn.Dense(10))
    random = np.random.RandomState(1)
    x = random.rand(BATCH * updates, 1, 12, 12).astype("float32")
    y = (x[:, 0, :6, :6].mean(axis=(1, 2)) * 50).astype("int32") % 10
    return net, gluon.data.ArrayDataset(x, y), None, {"lr": 0.05, "momentum": 0.9}


def gpt(updates: int):
    """The same; the tokens follow each other by a rule with exceptions."""
    from mxnet import gluon
    from mxtrain.models.gpt import GPT
    from mxtrain.models.gpt_settings import GPTConfig
    from mxtrain.tasks.language import TokenLoss

    vocabulary, context = 64, 32
    net = GPT(vocabulary, GPTConfig(layers=3, heads=2, width=32, context=context, dropout=0.1, tied=True))
    random = np.random.RandomState(1)
    steps = random.choice([1, 5], (BATCH * updates, context + 1), p=[0.8, 0.2])
    tokens = (np.cumsum(steps, axis=1) % vocabulary).astype("int32")
    return net, gluon.data.ArrayDataset(tokens[:, :-1], tokens[:, 1:]), TokenLoss(), {"lr": 0.5, "momentum": 0.9}


NETWORKS = {"conv": conv, "gpt": gpt}

if __name__ == "__main__":
    compat.set_threads(1)
    main()
