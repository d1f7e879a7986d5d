"""Which signals are a request, and whose handlers they had before."""

import ctypes
import os
import signal

import pytest

from launching import wait_for
from mxtrain.train import signals as program
from mxtrain.train.signals import Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_remembered_and_the_handlers_come_back(number, capfd):
    before = signal.getsignal(number)
    with Signals() as signals:
        assert signals.received == 0
        os.kill(os.getpid(), number)
        assert signals.received == number
    assert signal.getsignal(number) is before
    assert signal.Signals(number).name in capfd.readouterr().err


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_only_a_later_one_ends_the_process(monkeypatch):
    """Whatever comes at once is ignored; then the system's own way of ending a process is in force, until the end."""
    getsig = ctypes.pythonapi.PyOS_getsig
    getsig.restype = ctypes.c_void_p
    before = getsig(signal.SIGTERM)
    monkeypatch.setattr(program, "SAME_SECONDS", 0.5)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGTERM
        wait_for(lambda: getsig(signal.SIGTERM) is getsig(signal.SIGINT) is None)  # SIG_DFL is a null pointer
    assert getsig(signal.SIGTERM) == before


def test_the_end_of_the_training_comes_first():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        timer = signals._timer
    assert not timer.is_alive()
