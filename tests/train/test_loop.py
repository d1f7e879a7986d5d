"""What processes do together in the loop, with ranks that are threads."""

from types import SimpleNamespace

import numpy as np
import pytest

from mxtrain.errors import BadSample, Elsewhere, TrainingError, UserError
from mxtrain.train import loop
from mxtrain.train.agreement import agree, tell
from mxtrain.train.metrics import Meter
from mxtrain.train.signals import Stopped
from mxtrain.train.state import State
from ranks import among


@pytest.fixture(autouse=True)
def nothing_to_save(monkeypatch):
    monkeypatch.setattr(loop, "snapshot", lambda run: ({"weight": np.ones(1)}, {}))


class Checkpoints:
    """Keeps what it is given; raises `error` instead where there is one."""

    def __init__(self, error=None):
        self.updates, self._error = [], error

    def save(self, update, *_):
        if self._error:
            raise self._error
        self.updates.append(update)


def run_of(communicator, error=None, received=0):
    nothing = SimpleNamespace(wait=lambda: None, weights=lambda *_, **__: None, gather=lambda: None)
    return SimpleNamespace(
        communicator=communicator, state=State(update=7), meter=Meter(["loss"], communicator), layout=nothing,
        audit=nothing, checkpoints=None if communicator.rank else Checkpoints(error), checkpoint_minutes=None, saved_at=0.0,
        reported_at=0.0, asked=set(), optimizer=nothing, signals=SimpleNamespace(received=received))


def read(run, batches):
    """As the loop does with the batches of an epoch; returns what is raised, and the checkpoints."""
    try:
        for _ in loop._saved_first(run, batches):
            loop._answer(run, agree(run, tell(run, [1])))
    except Exception as raised:
        return raised, run.checkpoints and run.checkpoints.updates
    return None, run.checkpoints and run.checkpoints.updates


@pytest.mark.parametrize("error", [BadSample("x.png"), UserError("sample 3 has another shape"),
                                   TrainingError("a worker died")])
def test_data_that_one_process_cannot_read_end_all_with_everything_saved(error):
    def batches(rank):
        yield 1
        if rank == 1:
            raise error
        yield 2

    first, second, third = among(3, lambda c: read(run_of(c), batches(c.rank)))
    assert type(second[0]) is type(error) and str(second[0]) == str(error)
    assert isinstance(first[0], Elsewhere) and "saved after update 7" in str(first[0]) and first[1] == [7]
    assert isinstance(third[0], Elsewhere) and "saved" not in str(third[0])


def test_a_signal_to_one_process_stops_all_once_it_is_saved():
    results = among(3, lambda c: read(run_of(c, received=15 if c.rank == 2 else 0), iter([1, 2])))
    assert all(isinstance(raised, Stopped) and raised.number == 15 for raised, _ in results)
    assert results[0][1] == [7]


def test_a_disk_that_is_full_ends_all():
    results = among(2, lambda c: pytest.raises(TrainingError, loop.save, run_of(c, TrainingError("disk full"))).value)
    assert str(results[0]) == "disk full" and isinstance(results[1], Elsewhere)
