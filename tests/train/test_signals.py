"""Which signals are a request, and whose handlers they had before."""

import os
import signal

import pytest

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
