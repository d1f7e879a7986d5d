"""Settings of the test suite; pytest reads them whether it is started by make or by hand, from any folder."""

import os
import signal
import sys

# Before anything imports mxnet: with more threads, tests on several CPU contexts would be refused.
os.environ["OMP_NUM_THREADS"] = "1"

sys.path.insert(0, os.path.dirname(__file__))  # for what test files share: trainings.py

import pytest  # noqa: E402

import mxtrain  # noqa: E402, F401

TIMEOUT = 300  # seconds for one test, far more than any quick one needs: a hang must fail and not wait
SLOW_TIMEOUT = 1800


def pytest_configure(config):
    # A shell that starts pytest in the background, or nohup, has these ignored, and every process inherits that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.option.importmode = "importlib"  # test files in different folders may have the same name
    config.addinivalue_line("markers", "slow: takes long; only `make test-all` runs it")
    # MXNet's import reads names that numpy and distutils deprecate. Nothing of ours is silenced.
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:mxnet.*")
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:gluoncv.*")


def pytest_collection_modifyitems(items):
    for item in items:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT if item.get_closest_marker("slow") else TIMEOUT))
