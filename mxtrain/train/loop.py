"""The training loop, and all events of it.

    start                           once, also after a resume
    for each epoch:
        for each batch:
            forward and backward over all shards, sums over contexts, one update
            log                     now and then, with means over the updates that are done
            (checkpoint, when one is due)
        evaluation
        epoch                       with the rows of metrics.csv
        checkpoint
    end
"""

from __future__ import annotations

import logging
import math
import signal
import time
from typing import Dict, List

from mxtrain.errors import TrainingError
from mxtrain.optim.clipping import global_norm
from mxtrain.parallel.exact import NotSummable
from mxtrain.train.evaluate import evaluate
from mxtrain.train.run import Run
from mxtrain.train.signals import Stopped
from mxtrain.train.state import check_finite, snapshot

_log = logging.getLogger("mxtrain")


def train(run: Run) -> None:
    """Trains until the last epoch or an early stop.

    Raises Stopped after a signal, everything saved, and TrainingError when training cannot go on.
    """
    state = run.state
    run.callbacks.start(state)
    while state.finished is None:
        run.meter.start(state.totals)
        for batch in _timed(run, run.train_data.batches(state.epoch, state.batch)):
            lr = run.learning_rate(state.update)
            update(run, batch, lr)
            state.update += 1
            state.batch += 1
            _report(run, lr)
            _save_if_due(run)
            _stop_if_asked(run)
        rows = [_train_row(run), *_validation_row(run)]
        stop = run.monitor.epoch(rows[-1])
        state.epoch, state.batch, state.totals, state.seconds, state.waited = state.epoch + 1, 0, {}, 0.0, 0.0
        run.meter.start()  # or the checkpoint of this point would carry the sums of the epoch that is over
        if state.epoch >= run.epochs:
            stop = f"all {run.epochs} epochs are done" if run.epochs > 1 else "the epoch is done"
        state.finished = stop
        run.callbacks.epoch(rows)
        save(run, best=run.monitor.improved)
        if state.finished is None:
            _stop_if_asked(run, saved=True)
    run.callbacks.end(state)


def update(run: Run, batch, lr: float) -> None:
    """One update of the weights by one global batch: the gradient is the mean over its samples."""
    layout, number = run.layout, run.state.update
    try:
        reports = layout.forward_backward(batch, number)
        run.communicator.allreduce(layout.sums)
        layout.finish()
    except NotSummable:
        raise TrainingError("a gradient, or a statistic of batch normalization, is infinite, not a number or too "
                            f"large to be summed exactly in update {number + 1}: training has diverged") from None
    scale = 1.0 / len(batch[-1])
    if run.clip_norm is not None:
        run.state.grad_norm = scale * global_norm(layout.gradients[0])
        if not math.isfinite(run.state.grad_norm):
            raise TrainingError(f"the norm of the gradient is {run.state.grad_norm} in update {number + 1}: training "
                                "has diverged")
        scale *= min(1.0, run.clip_norm / run.state.grad_norm) if run.state.grad_norm else 1.0
    run.optimizer.update(layout.gradients, number, lr, scale)
    run.meter.add(number, reports)


def save(run: Run, best: bool = False) -> None:
    """Writes a checkpoint where the run has a folder. Raises TrainingError when the weights are not finite."""
    run.meter.read()
    run.layout.wait()
    arrays, state = snapshot(run)
    broken = check_finite(arrays)
    if broken:
        raise TrainingError(f"{broken} is not finite after update {run.state.update}: training has diverged")
    if run.checkpoints is None:
        return
    run.checkpoints.save(run.state.update, arrays, state, best)
    run.saved_at = time.monotonic()


def _timed(run: Run, batches):
    """The batches, with the time that passes, and that is spent waiting for them, added to the state."""
    state, batches = run.state, iter(batches)
    began = time.perf_counter()
    while True:
        batch = next(batches, None)
        waited = time.perf_counter() - began
        if batch is None:
            return
        state.waited += waited
        yield batch
        now = time.perf_counter()
        state.seconds += now - began
        began = now


def _report(run: Run, lr: float) -> None:
    now = time.monotonic()
    if run.meter.waiting < 50 and now - run.reported_at < 0.5:
        return
    run.reported_at = now
    run.callbacks.log({"epoch": run.state.epoch + 1, "batch": run.state.batch, "update": run.state.update, "lr": lr,
                       **run.meter.read(everything=False), **_norm(run)})


def _norm(run: Run) -> Dict[str, float]:
    return {} if run.clip_norm is None else {"grad_norm": run.state.grad_norm}


def _save_if_due(run: Run) -> None:
    updates, minutes = run.checkpoint_updates, run.checkpoint_minutes
    if (updates and run.state.update % updates == 0) or (
            minutes and time.monotonic() - run.saved_at >= 60 * minutes):
        save(run)


def _stop_if_asked(run: Run, saved: bool = False) -> None:
    number = run.communicator.agree(run.signals.received)
    if number:
        if not saved:
            save(run)
        where = f"stopped after update {run.state.update} (epoch {run.state.epoch + 1}, batch {run.state.batch})"
        _log.info("%s: %s", signal.Signals(number).name, where)
        raise Stopped(number, where)


def _train_row(run: Run) -> dict:
    began = time.perf_counter()
    means = run.meter.read()
    run.layout.wait()
    run.state.seconds += time.perf_counter() - began
    return {**_row(run, "train", run.meter.totals.samples, means, run.state.seconds, run.state.waited), **_norm(run)}


def _validation_row(run: Run) -> List[dict]:
    if run.val_data is None:
        return []

    def batches():
        for batch in run.val_data.batches(0):
            _stop_if_asked(run)  # the position is: all batches of the epoch are done
            yield batch

    began = time.perf_counter()
    totals = evaluate(run.layout, batches(), run.evaluation_names)
    if not math.isfinite(totals.sums["loss"]):
        _log.warning("the validation loss of epoch %d is %s", run.state.epoch + 1, totals.sums["loss"])
    return [_row(run, "val", totals.samples, totals.means(), time.perf_counter() - began, 0.0)]


def _row(run: Run, split, samples, means, seconds, waited) -> dict:
    state = run.state
    return {"epoch": state.epoch + 1, "update": state.update, "split": split, "samples": samples,
            "loss": means.get("loss"), "accuracy": means.get("accuracy"), "lr": run.learning_rate(state.update - 1),
            "seconds": seconds, "samples_per_second": samples / seconds if seconds else 0.0,
            "wait_share": waited / seconds if seconds else 0.0,
            **{name: value for name, value in means.items() if name not in ("loss", "accuracy")}}
