"""scripts/bench/layouts.py: its smallest form, and the difference that it tells."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "layouts.py"


def load():
    spec = importlib.util.spec_from_file_location("bench_layouts", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


layouts = load()


def test_the_difference_is_that_of_the_worst_array():
    one = {"a": np.float32([1, -4]), "b": np.float32([0.5])}
    assert layouts.difference(one, one) is None
    assert layouts.difference({**one, "a": np.float32([1, -4.5])}, one) == 0.125
    assert layouts.difference({"a": np.float32([1, -4.5]), "b": np.float32([0.25])}, one) == 0.5
    assert layouts.difference({"a": np.float32([-0.0])}, {"a": np.float32([0.0])}) == 0  # not equal bits
    with pytest.raises(ValueError):
        layouts.difference(one, {"a": one["a"]})
    assert (layouts.in_words(None), layouts.in_words(3e-7)) == ("equal bits", "3.0e-07")


def test_every_layout_has_a_name_of_its_own_and_fits_its_devices():
    assert len({case.name for case in layouts.CASES}) == len(layouts.CASES)
    for case in layouts.CASES:
        replicas, rest = divmod(case.contexts * case.processes, case.settings.get("pp", 1))
        assert rest == 0 and case.settings.get("dp", replicas) == replicas


def test_a_small_table():
    command = [sys.executable, SCRIPT, "--network", "conv", "--transport", "none", "--updates", 2, "--only",
               "2 contexts: pp 2", "3 contexts: zero 2"]
    done = subprocess.run([*map(str, command), "--json"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["conv"]
    assert len(found) == 4 and all(row["exact"] is None for row in found.values())
    # A pipeline adds in the order of one context; replicas do not. Law 1's bound.
    assert found["2 contexts: pp 2"]["float"] is None or found["2 contexts: pp 2"]["float"] < 1e-5
    assert 0 < found["3 contexts: zero 2"]["float"] < 1e-5
