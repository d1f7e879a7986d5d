"""What a run leaves for people: curves.png, TensorBoard events, and the lines on the terminal."""

import logging
import csv
import struct
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn

import mxtrain
from mxtrain.callbacks import curves
from mxtrain.callbacks.events import Events
from mxtrain.callbacks.progress import Progress
from mxtrain.callbacks.table import Table

X = np.random.RandomState(0).randn(12, 4).astype("float32")
DATA = gluon.data.ArrayDataset(X, np.arange(12).astype("int32") % 3)


def scalars(folder):
    """{tag: {step: value}} of all event files of a folder, read record by record as TensorBoard does."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12:12 + length])
            data = data[12 + length + 4:]
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_a_run_writes_curves_events_and_the_table_with_the_same_numbers(tmp_path):
    ran = mxtrain.fit(nn.Dense(3), DATA, DATA, batch_size=5, epochs=3, out=str(tmp_path / "run"))
    image = cv2.imread(str(tmp_path / "run" / "curves.png"))
    assert image is not None and len(np.unique(image.reshape(-1, 3), axis=0)) > 10  # something is drawn
    found = scalars(tmp_path / "run" / "events")
    for split in ("train", "val"):
        rows = [row for row in ran.rows if row["split"] == split]
        for name in ("loss", "accuracy", "lr"):
            assert found[f"{split}/{name}"] == {row["update"]: pytest.approx(row[name], rel=1e-6) for row in rows}  # float32
    with open(tmp_path / "run" / "metrics.csv") as file:
        written = list(csv.DictReader(file))
    assert [(row["split"], float(row["loss"])) for row in written] == [(row["split"], row["loss"]) for row in ran.rows]


def test_they_can_be_switched_off(tmp_path):
    mxtrain.fit(nn.Dense(3), DATA, batch_size=5, out=str(tmp_path / "run"), plots=False, tensorboard=False)
    names = {entry.name for entry in (tmp_path / "run").iterdir()}
    assert not names & {"events", "curves.png"} and {"metrics.csv", "config.yaml", "checkpoints"} <= names


def test_events_of_the_progress_within_an_epoch(tmp_path):
    events = Events(tmp_path)
    events.start(SimpleNamespace(update=0))
    events.log({"epoch": 1, "batch": 2, "update": 2, "lr": 0.5, "loss": 1.25})
    events.close()
    assert scalars(tmp_path / "events") == {"progress/lr": {2: 0.5}, "progress/loss": {2: 1.25}}


def test_closing_before_a_start_is_no_error(tmp_path):
    Events(tmp_path).close()
    curves.Curves(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_curves_of_rows_with_gaps(tmp_path):
    table = Table(tmp_path / "metrics.csv")
    table.start(SimpleNamespace(epoch=0))
    table.epoch([{"epoch": 1, "split": "train", "loss": float("nan"), "accuracy": None, "lr": 0.1}])
    table.epoch([{"epoch": 2, "split": "train", "loss": 0.5, "accuracy": None, "lr": 0.1}])
    curves.draw(tmp_path)
    assert cv2.imread(str(tmp_path / "curves.png")) is not None


def test_progress_logs_a_line_per_epoch(capsys, caplog):
    progress = Progress(epochs=3, updates_per_epoch=10)
    with caplog.at_level(logging.INFO, "mxtrain"):
        progress.log({"epoch": 1, "batch": 1, "update": 1, "lr": 0.1, "loss": 2.0, "wait_share": 0.5})
        progress.epoch([
            {"epoch": 1, "split": "train", "loss": 1.23456, "accuracy": None, "lr": 0.1, "samples_per_second": 99.7,
             "wait_share": 0.2, "skipped": 3},
            {"epoch": 1, "split": "val", "loss": 1.5, "accuracy": 0.75, "top5": 1.0, "lr": 0.1}])
        progress.close()
    assert capsys.readouterr() == ("", "")
    assert caplog.messages == ["epoch 1/3  train loss 1.235  val loss 1.5 accuracy 0.75 top5 1  lr 0.1  100 samples/s  "
                               "20% of the time waiting for data  3 bad samples left out"]
