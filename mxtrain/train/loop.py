"""The training loop, and all events of it.

    start                           once, also after a resume
    for each epoch:
        for each batch:
            forward and backward over all shards, sums over contexts and processes, one update
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
from collections import deque
from contextlib import suppress
from types import SimpleNamespace
from typing import Dict, List

from mxtrain.errors import BadSample, Elsewhere, TrainingError, UserError
from mxtrain.parallel.exact import NotSummable
from mxtrain.train import tracing
from mxtrain.train.agreement import Agreement, agree, tell
from mxtrain.train.evaluate import evaluate
from mxtrain.train.run import Run
from mxtrain.train.signals import Stopped
from mxtrain.train.state import check_finite, snapshot
from mxtrain.train.waiting import timed

_log = logging.getLogger("mxtrain")

_TOO_MANY = 100  # bad samples in an epoch, from which on they may not outnumber the good ones
_TOO_LONG, _SECONDS_TO_JUDGE, _BATCHES_TO_JUDGE = 0.1, 5, 20  # share of waiting to warn of, and when it can be told


def train(run: Run) -> None:
    """Trains until the last epoch or an early stop.

    Raises Stopped after a signal, everything saved, and TrainingError when training cannot go on.
    """
    state = run.state
    run.optimizer.begin()
    run.callbacks.start(state)
    while state.finished is None:
        run.meter.start(state.totals)
        for batch, told in _batches(run):
            agreed = agree(run, told)
            _answer(run, agreed)
            if agreed.log and state.batch:
                _report(run)
            _count(run, agreed)
            if agreed.rows:  # not all of its samples are bad
                update(run, batch, run.learning_rate(state.update), agreed)
            else:  # other processes may have samples of it, and all read the reports of as many batches
                run.meter.add(state.update, [], *run.layout.place_of(batch)[:2])
            state.update += 1
            state.batch += 1
            _warn_of_waiting(run)
            if state.update == run.trace_at:
                tracing.write(run)
            if run.checkpoint_updates and state.update % run.checkpoint_updates == 0:
                save(run)
        if state.skipped and not state.samples:
            raise run.communicator.once(UserError(f"none of the {state.skipped} training samples can be read"))
        _prefetch(run)
        rows = [_train_row(run), *_validation_row(run)]
        stop = run.monitor.epoch(rows[-1])
        state.next_epoch()
        run.meter.start()  # or the checkpoint of this point would carry the sums of the epoch that is over
        if state.epoch >= run.epochs:
            stop = f"all {run.epochs} epochs are done" if run.epochs > 1 else "the epoch is done"
        state.finished = stop
        run.callbacks.epoch(rows)
        save(run, best=run.monitor.improved)
        agreed = agree(run)
        if agreed.signal and state.finished is None:
            _stop(run, agreed.signal, saved=True)
    run.callbacks.end(state)


def update(run: Run, batch, lr: float, agreed: Agreement) -> None:
    """One update of the weights by one global batch: the gradient is the mean over its samples."""
    layout, number = run.layout, run.state.update
    try:
        reports = run.audit.forward_backward(batch, number)
        layout.add_up()
        layout.finish(agreed.shards)
    except NotSummable:
        raise run.communicator.once(TrainingError(
            "a gradient, or a statistic of batch normalization, is infinite, not a number or too large to be summed "
            f"exactly in update {number + 1}: training has diverged")) from None
    scale = 1.0 / agreed.rows
    if run.clip_norm is not None:
        run.state.grad_norm = scale * layout.gradient_norm()
        # (Processes that are apart must not stop apart: they see it in the weights, which it spoils for all.)
        if not math.isfinite(run.state.grad_norm) and not run.communicator.apart:
            raise run.communicator.once(TrainingError(
                f"the norm of the gradient is {run.state.grad_norm} in update {number + 1}: training has diverged"))
        scale *= min(1.0, run.clip_norm / run.state.grad_norm) if run.state.grad_norm else 1.0
    run.optimizer.update(number, lr, scale)
    layout.share()
    run.audit.weights(number + 1)
    run.meter.add(number, reports, *layout.place_of(batch)[:2])


def save(run: Run, best: bool = False) -> None:
    """Writes a checkpoint where the run has a folder. Raises TrainingError when the weights are not finite."""
    run.meter.read()
    run.layout.wait()
    run.optimizer.gather()
    run.audit.weights(run.state.update, always=True)
    arrays, state = snapshot(run)

    def write() -> None:
        broken = check_finite(arrays)
        if broken:
            raise TrainingError(f"{broken} is not finite after update {run.state.update}: training has diverged")
        if run.checkpoints:
            run.checkpoints.save(run.state.update, arrays, state, best)

    # Nobody goes on, or ends, before it is written: a launcher may end all when the first has ended.
    run.communicator.together(write)
    run.saved_at = time.monotonic()


def _batches(run: Run):
    """The batches of the rest of the epoch, each with what was told of it."""
    state, data = run.state, run.train_data
    batches = data.batches(state.epoch, state.batch)
    return _saved_first(run, _told_ahead(run, timed(batches, data.ready, run.meter.latest, state)))


def _told_ahead(run: Run, batches):
    """Batches with what this process tells of them, so many batches before their turn as the communicator wants."""
    waiting = deque()
    try:
        for batch in batches:
            waiting.append((batch, tell(run, run.layout.rows_of(batch), run.layout.bad_of(batch))))
            if len(waiting) > run.communicator.ahead:
                yield waiting.popleft()
    except (UserError, TrainingError):
        yield from waiting  # these could be read
        raise
    yield from waiting


def _saved_first(run: Run, batches):
    """The batches. When one cannot be read, what was done is saved, by all processes; also when a signal has ended the
    workers, too."""
    try:
        yield from batches
    except BadSample as error:
        agree(run, tell(run, failed=True))
        save(run)
        raise BadSample(f"{error}{_saved(run)}") from None
    except (UserError, TrainingError) as error:
        if run.communicator.size > 1:
            agree(run, tell(run, failed=True))
            save(run)
        elif run.signals.received and isinstance(error, TrainingError):
            _stop(run, run.signals.received)
        raise


def _prefetch(run: Run) -> None:
    """Has validation and the next epoch begin to read while the devices finish this one."""
    with suppress(UserError, TrainingError):  # raised again when the batch is wanted, where all processes hear of it
        if run.val_data is not None:
            run.val_data.prefetch(0)
        if run.state.epoch + 1 < run.epochs:
            run.train_data.prefetch(run.state.epoch + 1)


def _answer(run: Run, agreed: Agreement) -> None:
    """Does what processes have agreed on to do before the next update: raises Stopped after a signal, and Elsewhere
    when another process cannot read its part of a batch; both with everything saved."""
    if agreed.failed:
        save(run)
        _log.info("another process cannot go on%s", _saved(run))
        raise Elsewhere(f"another process cannot go on{_saved(run)}")
    if agreed.signal:
        _stop(run, agreed.signal)
    if agreed.save:
        save(run)


def _saved(run: Run) -> str:
    return f"; saved after update {run.state.update}" if run.checkpoints else ""


def _count(run: Run, agreed: Agreement) -> None:
    """Takes note of a batch's samples. Raises UserError when most of them cannot be read."""
    state = run.state
    state.samples += agreed.samples
    state.skipped += agreed.bad
    if agreed.bad and state.skipped >= _TOO_MANY and state.skipped > state.samples:
        raise run.communicator.once(UserError(
            f"{state.skipped} of the first {state.skipped + state.samples} samples of epoch {state.epoch + 1} cannot "
            "be read: most of the data are bad"))


def _report(run: Run) -> None:
    run.reported_at = time.monotonic()
    state = run.state
    run.callbacks.log({"epoch": state.epoch + 1, "batch": state.batch, "update": state.update,
                       "lr": run.learning_rate(state.update - 1), "wait_share": _share(state),
                       **run.values(run.meter.read(everything=False)), **_norm(run), **run.told()})


def _warn_of_waiting(run: Run) -> None:
    """Says once of a start that the data are too slow, when enough was seen to tell."""
    state = run.state
    if run.advice is None or state.seconds < _SECONDS_TO_JUDGE or state.batch < _BATCHES_TO_JUDGE:
        return
    if _share(state) > _TOO_LONG:
        _log.warning("the devices wait for data in %.0f%% of the time: %s", 100 * _share(state), run.advice)
        run.advice = None


def _share(times) -> float:
    return times.waited / times.seconds if times.seconds else 0.0


def _norm(run: Run) -> Dict[str, float]:
    return {} if run.clip_norm is None else {"grad_norm": run.state.grad_norm}


def _stop(run: Run, number: int, saved: bool = False) -> None:
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
    return {**_row(run, "train", run.meter.totals.samples, means, run.state), **_norm(run), **run.told()}


def _validation_row(run: Run) -> List[dict]:
    if run.val_data is None:
        return []

    def batches():
        for batch in _saved_first(run, run.val_data.batches(0)):
            _answer(run, agree(run))  # the position is: all batches of the epoch are done
            yield batch

    times, began = SimpleNamespace(seconds=0.0, waited=0.0, skipped=0), time.perf_counter()

    def timing(batches, latest):
        return timed(batches, run.val_data.ready, latest, times)

    run.optimizer.gather()
    scores = run.scores() if run.scores else None
    totals = evaluate(run.layout, batches(), run.evaluation_names, scores and scores.see, timing, run.communicator)
    if not math.isfinite(totals.sums["loss"]):
        _log.warning("the validation loss of epoch %d is %s", run.state.epoch + 1, totals.sums["loss"])
    means = {**totals.means(), **(scores.values() if scores else {})}
    times.seconds, times.skipped = time.perf_counter() - began, totals.skipped
    return [_row(run, "val", totals.samples, means, times)]


def _row(run: Run, split, samples, means, times) -> dict:
    state, means = run.state, run.values(means)
    return {"epoch": state.epoch + 1, "update": state.update, "split": split, "samples": samples,
            "loss": means.get("loss"), "accuracy": means.get("accuracy"), "lr": run.learning_rate(state.update - 1),
            "seconds": times.seconds, "samples_per_second": samples / times.seconds if times.seconds else 0.0,
            "wait_share": _share(times), **({"skipped": times.skipped} if times.skipped else {}),
            **{name: value for name, value in means.items() if name not in ("loss", "accuracy")}}
