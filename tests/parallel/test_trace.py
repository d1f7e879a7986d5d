"""trace.json and trace.png of a pipeline whose times are known."""

import json

import cv2
import numpy as np
import pytest

from mxtrain.parallel.schedule import one_forward_one_backward, timeline
from mxtrain.parallel.trace import Row, by_device, write

START = 1000.0


def rows_of(stages, micro_batches):
    spans = timeline(one_forward_one_backward(stages, micro_batches), forward=0.25, backward=0.5)
    return [Row(stage, f"stage {stage}, cpu({stage})", *span.instruction, START + span.start, START + span.end)
            for stage, line in enumerate(spans) for span in line]


def test_rows_are_sorted_by_device_and_time():
    rows = rows_of(2, 2)
    shuffled = [rows[i] for i in np.random.RandomState(1).permutation(len(rows))]
    lines = by_device(shuffled)
    assert [[(row.kind[0], row.micro_batch, row.begin, row.end) for row in line] for line in lines] == [
        [("f", 0, 0, 0.25), ("f", 1, 0.25, 0.5), ("b", 0, 1, 1.5), ("b", 1, 1.75, 2.25)],
        [("f", 0, 0.25, 0.5), ("b", 0, 0.5, 1), ("f", 1, 1, 1.25), ("b", 1, 1.25, 1.75)]]


def test_events(tmp_path):
    write(json.loads(json.dumps(rows_of(2, 3))), tmp_path)  # as they come from other processes
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: "stage 0, cpu(0)", 1: "stage 1, cpu(1)"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 12
    assert spans[0] == {"ph": "X", "name": "forward 0", "cat": "forward", "pid": 0, "tid": 0, "ts": 0, "dur": 250000}
    assert [span["name"] for span in spans if span["tid"] == 1] == [
        "forward 0", "backward 0", "forward 1", "backward 1", "forward 2", "backward 2"]
    assert {span["dur"] for span in spans if span["cat"] == "backward"} == {500000}


@pytest.mark.parametrize("stages, micro_batches", [(1, 1), (4, 8), (2, 200)])
def test_picture(tmp_path, stages, micro_batches):
    write(rows_of(stages, micro_batches), tmp_path)
    image = cv2.imread(str(tmp_path / "trace.png")).astype(int)
    blue, orange = [180, 119, 31], [14, 127, 255]  # matplotlib's first two colours, in OpenCV's order
    parts = [(abs(image - colour) < 40).all(axis=2).sum() for colour in (blue, orange)]
    assert min(parts) > 500
    if micro_batches < 100:
        # Backward takes twice as long; numbers, white edges and the legend, of one size each, change that a little.
        assert 1.6 < parts[1] / parts[0] < 2.6
