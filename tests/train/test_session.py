"""What a start that launch.py has repeated goes on from."""

import pytest

from mxtrain import config
from mxtrain.train import session


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """The run folder of the start before."""
    monkeypatch.setenv("MXTRAIN_RESUME", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("epochs: 7\n")
    return tmp_path / "run"


@pytest.mark.parametrize("given_out", [True, False])
def test_goes_on_from_its_checkpoints(begun, given_out):
    (begun / "checkpoints" / "update-00000003").mkdir(parents=True)
    settings, place = session.configure({"out": str(begun) if given_out else None, "epochs": 7})
    assert place.path == begun and place.chosen is None and settings.train.epochs == 7


def test_begins_anew_in_its_folder_where_there_is_none(begun, caplog):
    settings, place = session.configure({"epochs": 7})
    assert place is None and settings.train.out == str(begun) and not begun.exists()
    assert "begins anew" in caplog.text


def test_what_was_resumed_never_begins_anew(begun):
    """Even where its checkpoints cannot be seen just now."""
    _, place = session.configure({"resume": str(begun)})
    assert place.path == begun and (begun / "config.yaml").exists()


def test_another_training_of_the_same_script_is_not_taken_for_it(begun, tmp_path):
    settings, place = session.configure({"out": str(tmp_path / "other")})
    assert place is None and settings.train.out == str(tmp_path / "other") and begun.exists()


@pytest.mark.parametrize("given, kept", [("none", "none"), ("local", "local"), ("horovod", None), ("dist_sync", None),
                                         ("dist_async", None), (None, None)])
def test_the_kvstore_is_that_of_the_run_only_within_a_process(tmp_path, monkeypatch, given, kept):
    kept_settings = session._to_keep(config.build({"kvstore": given, "out": "x", "staleness": 2}))
    config.save(tmp_path / "config.yaml", kept_settings)
    parallel = session.configure({"resume": str(tmp_path)})[0].parallel
    assert (parallel.kvstore, parallel.staleness) == (kept, None)
    assert session.configure({"resume": str(tmp_path), "kvstore": "device"})[0].parallel.kvstore == "device"
    for environment, bound in (({}, kept), ({"HOROVOD_RANK": "0"}, None), ({"DMLC_ROLE": "worker"}, None)):
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            arguments = config.parse(["--config", str(tmp_path / "config.yaml")]).given
            assert arguments["out"] is None and arguments.get("kvstore") == bound
            typed = config.parse(["--config", str(tmp_path / "config.yaml"), "--kvstore", "local"]).given
            assert typed["kvstore"] == "local"


def test_the_threads_of_a_run_are_known_before_it_is_read(begun, monkeypatch):
    assert session.threads_of_run({}) is None  # its file does not say
    (begun / "config.yaml").write_text("threads: 2\n")
    assert session.threads_of_run({}) == 2
    monkeypatch.delenv("MXTRAIN_RESUME")
    assert session.threads_of_run({"resume": str(begun)}) == 2
    assert session.threads_of_run({"resume": str(begun / "cannot be seen from here")}) is None
    assert session.threads_of_run({}) is None
