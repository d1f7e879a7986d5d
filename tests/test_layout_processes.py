"""Law 1 and 2 for pipelines and ZeRO over processes, and over processes and contexts at once.

Everything that could depend on a layout is on: dropout, batch normalization, accumulation (8 shards, some of them empty
in the last batch), clipping, parameters that are cut in pieces.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from launching import TOKEN, processes, variables_of, wait_for
from spread import FLAGS, HOROVOD, NO_HOROVOD, alone, check_chain, launch, prepare, run  # noqa: F401
from trainings import QUIET, SCRIPT, arrays, assert_close, assert_same_bits, metrics, rows

SLOW = pytest.mark.slow
NETWORK = """
from mxnet.gluon import nn
from mxtrain.optim import clipping

clipping.CHUNK = 16  # so that most parameters are in several pieces

def net(classes):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3, use_bias=False), nn.BatchNorm(), nn.Activation("relu"), nn.Dropout(0.3), nn.Flatten(),
            nn.Dense(8, activation="relu"), nn.Dropout(0.2), nn.Dense(classes))
    return net
"""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = prepare(tmp_path_factory.mktemp("layouts"))
    (place / "network.py").write_text(NETWORK)
    return place


PLAIN = ["--pp", 1, "--zero", 0, "--recompute", "none"]
# Transport, workers, servers, contexts of each; what is not said stays as it was.
LONG = [("alone", 1, 0, 1),
        ("horovod", 2, 0, 1, "--pp", 2),
        ("horovod", 2, 0, 2, "--pp", 2, "--zero", 2),
        ("ps", 2, 1, 1, "--pp", 1, "--zero", 1),
        ("alone", 1, 0, 2, "--pp", 2, "--zero", 0, "--recompute", "blocks"),
        ("horovod", 4, 0, 1, "--pp", 2, "--zero", 2),
        ("ps", 2, 2, 2, "--pp", 2, "--zero", 2),
        ("horovod", 3, 0, 1, "--pp", 3, "--zero", 0, "--pp-schedule", "gpipe"),
        ("horovod", 2, 0, 2, "--pp", 4, "--recompute", 3, "--pp-schedule", "1f1b"),
        ("horovodrun", 2, 0, 1, "--pp", 1, "--zero", 2),
        ("horovod", 4, 0, 1, "--pp", 2, "--zero", 3, "--pp-schedule", "gpipe"),
        ("horovod", 2, 0, 2, "--pp", 2, "--zero", 3, "--recompute", 4, "--pp-schedule", "1f1b"),
        ("ps", 2, 1, 2, "--pp", 1, "--zero", 3),
        ("ps", 3, 1, 1, "--zero", 2, "--recompute", "none"),
        ("horovod", 4, 0, 2, "--pp", 4, "--zero", 1),
        ("alone", 1, 0, 1, *PLAIN)]
SHORT = [("horovod", 2, 0, 2, "--pp", 4, "--recompute", "blocks"),
         ("ps", 2, 1, 2, "--pp", 2, "--zero", 1),
         ("alone", 1, 0, 1, *PLAIN)]


@pytest.mark.parametrize("links", [pytest.param(SHORT, id="short"),
                                   pytest.param(LONG, id="long", marks=[SLOW, pytest.mark.timeout(1200)])])
def test_every_start_goes_on_with_the_bits_of_one_context(place, alone, tmp_path, links):
    check_chain(place, alone, tmp_path / "run", links)


@SLOW
@pytest.mark.parametrize("link", [link for link in LONG[1:-1] if "alone" not in link], ids=lambda link: "-".join(
    map(str, link)).replace("---", "-"))
def test_float_sums_are_close(place, alone, tmp_path, link):
    """Each from the start. One epoch: a relu that a rounding sends over its edge would show."""
    transport, workers, servers, contexts, *layout = link
    if NO_HOROVOD and "horovod" in transport:
        pytest.skip("Horovod is not installed")
    flags, out = ["--shards", 8, "--epochs", 1], tmp_path / "run"
    run(place, launch(transport, workers, servers, *FLAGS, *flags, *layout, "--cpus", contexts, "--out", out))
    expected = alone(*flags)
    assert_close(arrays(out), arrays(expected))
    for one, other in zip(metrics(out), metrics(expected)):
        assert (one["samples"], one["accuracy"]) == (other["samples"], other["accuracy"])
        np.testing.assert_allclose(float(one["loss"]), float(other["loss"]), rtol=1e-5)


# Language, and what is drawn

TINY = ["--layers", 3, "--heads", 2, "--width", 16, "--context", 16, "--tied", "--dropout", 0.1]
ADAM = ["--batch-size", 20, "--epochs", 2, "--optimizer", "adamw", "--lr", 0.01, "--clip-norm", 1, "--exact", *QUIET]


@pytest.mark.parametrize("workers, layout", [
    pytest.param(2, ["--pp", 2, "--trace"], marks=HOROVOD.marks),
    pytest.param(4, ["--pp", 2, "--zero", 2, "--trace"], marks=[*HOROVOD.marks, SLOW]),
    pytest.param(4, ["--pp", 2, "--zero", 3], marks=[*HOROVOD.marks, SLOW]),
    pytest.param(3, ["--pp", 3], marks=[*HOROVOD.marks, SLOW]),
    pytest.param(2, ["--cpus", 2, "--pp", 4, "--recompute", "blocks"], marks=[*HOROVOD.marks, SLOW])])
def test_a_gpt_with_a_tied_weight(tmp_path, workers, layout):
    """Its two places are at both ends of the pipeline. The trace has all devices and all that they ran."""
    random = np.random.RandomState(4)
    (tmp_path / "words.txt").write_text(" ".join(random.choice(["once", "upon", "a", "time"], 400))[:50 * 16 + 8])
    flags = ["--task", "lm", "--data", "words.txt", *TINY, *ADAM]
    run(tmp_path, [sys.executable, SCRIPT, *flags, "--out", "one"])
    run(tmp_path, launch("horovod", workers, 0, *flags, *layout, "--out", "many"))
    assert_same_bits(arrays(tmp_path / "many"), arrays(tmp_path / "one"))
    assert rows(tmp_path / "many") == rows(tmp_path / "one")
    assert f"over {3 if workers == 3 else 2} processes; 1f1b, bubble" in (tmp_path / "many" / "log.txt").read_text()
    if "--trace" in layout:
        events = json.loads((tmp_path / "many" / "trace.json").read_text())["traceEvents"]
        names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"
                 and event["name"] == "thread_name"}
        assert [name for _, name in sorted(names.items())] == [
            f"stage {rank % 2}, cpu(0) of rank {rank}" for rank in range(workers)]
        ran = [event for event in events if event["ph"] == "X"]
        assert len(ran) == 2 * 2 * 8  # forward and backward, on two stages, of each shard
        assert (tmp_path / "many" / "trace.png").exists()


# What goes wrong

LAYOUTS_THAT_CANNOT_BE = """
import os
import mxtrain
import mxnet as mx
import numpy as np
from mxnet.gluon import data, nn

rank = os.environ["MXTRAIN_RANK"]
kvstore = "dist_sync" if "DMLC_ROLE" in os.environ else "auto"
x, y = np.random.RandomState(0).rand(41, 3).astype("float32"), (np.arange(41) % 2).astype("int32")

def fit(name, contexts, **settings):
    mx.random.seed(5)
    net = nn.HybridSequential()
    net.add(nn.Dense(4, activation="relu"), nn.BatchNorm(), nn.Dense(2))
    if name.startswith("frozen"):
        net[0].collect_params().setattr("grad_req", "null")
    try:
        result = mxtrain.fit(net, data.ArrayDataset(x, y), data.ArrayDataset(x, y), kvstore=kvstore, shards=8, epochs=3,
                             batch_size=8, exact=True, ctx=[mx.cpu(c) for c in range(contexts)], **settings)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        weights = [parameter.data().asnumpy().tobytes().hex() for parameter in net.collect_params().values()]
        said = f"{[(row['samples'], row['loss'], row['accuracy']) for row in result.rows]} {' '.join(weights)}"
    print(name, rank, said, sep="|", flush=True)

for name, contexts, settings in TODO:
    fit(name, contexts, **settings)
"""
OVER_HOROVOD = [
    ("plain", 1, {}), ("two", 1, dict(pp=2)), ("stages", 2, dict(pp=3)), ("replicas", 2, dict(dp=3)),
    ("both", 1, dict(dp=2, pp=2)), ("four", 2, dict(pp=4)), ("many", 3, dict(pp=6)), ("split", 3, dict(pp=2)),
    ("half", 2, dict(pp=2, zero=2)), ("frozen", 1, {}), ("frozen_zero", 1, dict(zero=2)),
    ("frozen_both", 2, dict(pp=2, zero=2)), ("frozen_stage", 1, dict(pp=2, cut=[1])), ("again", 1, dict(pp=2)),
    ("weights", 1, dict(zero=3)), ("stages_of_weights", 2, dict(pp=2, zero=3)), ("frozen_weights", 2, dict(zero=3)),
]
# The last batch is of one sample: all processes but one have nothing to do, and take part in all exchanges.
OVER_SERVERS = [("plain", 1, {}), ("two", 1, dict(pp=2)), ("half", 2, dict(pp=2, zero=1)), ("again", 1, dict(zero=2)),
                ("weights", 2, dict(zero=3))]
SAID = {"stages": "--pp 3: 3 stages need a multiple of 3 contexts (--gpus or --cpus); there are 2 processes with 2 contexts",
        "replicas": "--dp 3: 3 replicas of 1 stage need 3 contexts; there are 2 processes with 2 contexts each, 4 in all",
        "both": "--dp 2: 2 replicas of 2 stages need 4 contexts; there are 2 processes with 1 context each, 2 in all",
        "four": "--pp 4: HybridSequential has 3 segments, and each stage needs one",
        "many": "--pp 6: HybridSequential has 3 segments, and each stage needs one",
        "split": "--pp 2: the stages of a replica are on contexts of one process, or on all contexts of several"}
NEEDS_HOROVOD = "--pp 2: a pipeline over several processes, of 1 context each, needs Horovod"


@pytest.mark.parametrize("transport, todo, said", [
    pytest.param("horovod", OVER_HOROVOD, SAID, marks=HOROVOD.marks),
    pytest.param("ps", OVER_SERVERS, {"two": NEEDS_HOROVOD}, marks=SLOW)])
def test_layouts_that_can_and_cannot_be(tmp_path, transport, todo, said):
    """One after the other in the same processes; all ranks end with the same rows and weights, of whatever stage."""
    (tmp_path / "own.py").write_text(LAYOUTS_THAT_CANNOT_BE.replace("TODO", repr(todo)))
    command = launch(transport, 2, 1)
    done = run(tmp_path, [*command[:command.index("--")], "--", sys.executable, "own.py"])
    found = {}
    for name, rank, text in re.findall(r"(\w+)\|(\d)\|(.*)", done.stdout):
        found.setdefault(name, {})[int(rank)] = text
    for name, _, _ in todo:
        if name in said:
            assert all(said[name] in text or text.startswith("Elsewhere") for text in found[name].values()), found[name]
            assert any(said[name] in text for text in found[name].values())
        else:
            assert found[name] == dict.fromkeys(range(2), found["frozen" if "frozen" in name else "plain"][0]), name


@SLOW
@pytest.mark.parametrize("transport, flags, said", [
    ("ps", ["--pp", 2], NEEDS_HOROVOD),
    ("dist_async", ["--cpus", 2, "--pp", 2], "--pp 2: --kvstore dist_async cannot"),
    ("dist_async", ["--zero", 1], "--zero 1: --kvstore dist_async cannot"),
    ("ps", ["--zero", 1, "--compression", "2bit"], "--compression 2bit: is for gradients that all processes get whole"),
    pytest.param("horovod", ["--zero", 2, "--compression", "fp16"], "--compression fp16: is for gradients that all",
                 marks=HOROVOD.marks),
    pytest.param("horovod", ["--pp", 2, "--compression", "fp16"], "--compression fp16: is for sums over all processes",
                 marks=HOROVOD.marks)])
def test_a_mistake_is_one_line(place, tmp_path, transport, flags, said):
    done = run(place, launch(transport, 2, 1, *FLAGS, "--out", tmp_path / "run", *flags), code=2)
    assert said in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


BREAKS = """
import mxnet as mx
from mxnet.gluon import Block, nn
from mxnet import autograd

class Breaks(Block):
    '''Adds nothing; but in one forward of all the gradient of its weight is not a number. No other one is.'''
    calls = 0

    def __init__(self):
        super().__init__(prefix="breaks_")
        self.weight = self.params.get("weight", shape=(1,), init="ones")

    def forward(self, x):
        self.calls += autograd.is_recording()
        weight = self.weight.data(x.context)
        return mx.nd.broadcast_add(x, 0 * (mx.nd.sqrt(0 * weight) if self.calls == 40 else weight))

def net(classes, last):
    net = nn.Sequential()
    layers = [nn.Flatten(), nn.Dense(8, activation="relu"), nn.Dense(classes)]
    layers.insert(3 if last else 1, Breaks())
    net.add(*layers)
    return net

def first(classes):
    return net(classes, False)

def last(classes):
    return net(classes, True)
"""


@SLOW
@pytest.mark.parametrize("stage", ["first", "last"])
@pytest.mark.parametrize("layout", [["--exact", "--pp", 2], ["--pp", 2], ["--exact", "--pp", 2, "--zero", 2, "--cpus", 2]])
@pytest.mark.skipif(NO_HOROVOD, reason="Horovod is not installed (make setup HOROVOD=1)")
def test_one_stage_without_numbers_ends_all(place, tmp_path, stage, layout):
    """The others hear of it, and nothing is updated by it."""
    (tmp_path / "breaks.py").write_text(BREAKS)
    flags = [*FLAGS, "--data", place / "data", "--model", f"breaks:{stage}", "--shards", 8, "--cut", 2, *layout]
    done = run(tmp_path, launch("horovod", 2, 0, *flags, "--epochs", 3, "--out", tmp_path / "run"), code=1)
    assert "training has diverged" in done.stderr and "Traceback" not in done.stderr
    for array in arrays(tmp_path / "run").values():
        assert np.isfinite(array).all()


# What ends

@pytest.mark.parametrize("workers, layout, victim", [
    pytest.param(2, ["--pp", 2], 1, marks=HOROVOD.marks),
    pytest.param(2, ["--pp", 2], 0, marks=[*HOROVOD.marks, SLOW]),
    pytest.param(4, ["--pp", 2, "--zero", 2], 2, marks=[*HOROVOD.marks, SLOW]),
    pytest.param(3, ["--zero", 2], 1, marks=[*HOROVOD.marks, SLOW]),
    pytest.param(2, ["--zero", 3], 1, marks=[*HOROVOD.marks, SLOW])])
def test_a_stage_is_killed(place, tmp_path, workers, layout, victim):
    """The others end soon, nothing stays, and what was saved leads on in one process."""
    out, token = tmp_path / "run", f"{os.getpid()}-{workers}-{victim}"
    flags = [*FLAGS, "--exact", "--schedule", "constant", "--checkpoint-updates", 3]
    command = launch("horovod", workers, 0, *flags, *layout, "--epochs", 50, "--out", out, ours=["--grace", 2])
    process = subprocess.Popen(list(map(str, command)), cwd=place, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, TOKEN: token})
    try:
        wait_for(lambda: (out / "metrics.csv").exists() and metrics(out) or process.poll() is not None, 100)
        victims = [pid for pid in processes(token) if variables_of(pid).get("MXTRAIN_RANK") == str(victim)
                   and b"guard" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(max(victims), signal.SIGKILL)
        began = time.monotonic()
        _, said = process.communicate(timeout=30)
        wait_for(lambda: not processes(token), 30)
    finally:
        for pid in processes(token):
            os.kill(pid, signal.SIGKILL)
    assert process.returncode != 0 and time.monotonic() - began < 30
    assert f"worker {victim}" in said.splitlines()[-1] and "SIGKILL" in said.splitlines()[-1]
    epochs = len(metrics(out)) // 2 + 1
    run(place, [sys.executable, SCRIPT, "--resume", out, "--epochs", epochs, *PLAIN])
    straight = tmp_path / "straight"
    run(place, [sys.executable, SCRIPT, *flags, "--epochs", epochs, "--out", straight])
    assert_same_bits(arrays(out), arrays(straight))
    assert rows(out) == rows(straight)


@SLOW
@pytest.mark.skipif(NO_HOROVOD, reason="Horovod is not installed (make setup HOROVOD=1)")
def test_a_pipeline_is_stopped_and_goes_on_elsewhere(place, tmp_path):
    out, flags = tmp_path / "run", [*FLAGS, "--exact", "--schedule", "constant"]
    command = launch("horovod", 2, 0, *flags, "--pp", 4, "--cpus", 2, "--zero", 2, "--epochs", 50, "--out", out)
    process = subprocess.Popen(list(map(str, command)), cwd=place, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (out / "metrics.csv").exists() and metrics(out) or process.poll() is not None, 100)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and "stopped after update" in said, said
    epochs = len(metrics(out)) // 2 + 1
    run(place, launch("ps", 2, 1, "--resume", out, "--epochs", epochs, "--pp", 1, "--cpus", 1))
    straight = tmp_path / "straight"
    run(place, [sys.executable, SCRIPT, *flags, "--epochs", epochs, "--out", straight])
    assert_same_bits(arrays(out), arrays(straight))
    assert rows(out) == rows(straight)
