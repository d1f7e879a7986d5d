"""Checkpoints: complete or absent, whatever breaks and whenever the process dies."""

import json
import logging
import os
import pickle
import shutil
import zipfile

import numpy as np
import pytest

from mxtrain.errors import TrainingError, UserError
from mxtrain.files import sha256
from mxtrain.train import checkpoint
from mxtrain.train.checkpoint import CorruptCheckpoint, Folder, read, read_chosen, write

FILES = ("arrays.npz", "state.json", "manifest.json")


def arrays(value):
    return {"weights/0.weight": np.full((3, 4), value, "float32"), "weights/0.bias": np.arange(3, dtype="float32"),
            "optimizer/0.weight/0": np.zeros((0, 2), "float64")}


def state(value):
    return {"position": {"update": value, "totals": {"sums": {"loss": 0.1 + 0.2}}, "finished": None}}


def save(folder, update, best=False):
    return folder.save(update, arrays(update), state(update), best)


def assert_holds(found, value):
    assert set(found.arrays) == set(arrays(value))
    for name, array in arrays(value).items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)
    assert found.state["position"] == state(value)["position"]


def entries(path):
    return sorted(os.listdir(path))


def test_round_trip(tmp_path):
    write(tmp_path / "update-00000007", arrays(7), state(7))
    assert_holds(read(tmp_path / "update-00000007"), 7)
    assert entries(tmp_path) == ["update-00000007"]
    assert entries(tmp_path / "update-00000007") == sorted(FILES)


def test_numbers_keep_their_bits(tmp_path):
    odd = np.array([np.nextafter(np.float32(1), np.float32(2)), -0.0, 1e-45, 3.4e38], "float32")
    write(tmp_path / "a", {"x": odd}, {"loss": 1 / 3})
    found = read(tmp_path / "a")
    assert found.arrays["x"].tobytes() == odd.tobytes() and found.state["loss"] == 1 / 3


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file):
    file.write_bytes(b"")


def remove(file):
    file.unlink()


def foreign(file):
    file.write_text("<html><body>404 Not Found</body></html>")


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [truncate, empty, remove, foreign])
def test_damage_is_found_named_and_passed_over(tmp_path, caplog, name, damage):
    folder = Folder(tmp_path)
    save(folder, 1)
    broken = save(folder, 2)
    damage(broken / name)
    with pytest.raises(CorruptCheckpoint, match=name):
        read(broken)
    with pytest.raises(UserError, match=name):
        read_chosen(broken)
    with caplog.at_level(logging.WARNING, "mxtrain"):
        assert_holds(folder.newest(), 1)
    assert str(broken / name) in caplog.text


@pytest.mark.parametrize("name", FILES[:2])
def test_a_single_bit_is_noticed(tmp_path, name):
    path = save(Folder(tmp_path), 2)
    flip(path / name)
    with pytest.raises(CorruptCheckpoint, match=name):
        read(path)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"format": 1}', '{"format": 1, "files": 3}', "null"])
def test_a_manifest_of_something_else(tmp_path, text):
    path = save(Folder(tmp_path), 2)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CorruptCheckpoint, match=path.name):
        read(path)


def test_all_broken_or_none(tmp_path):
    folder = Folder(tmp_path)
    with pytest.raises(UserError, match="no usable checkpoint"):
        folder.newest()
    for update in (1, 2):
        empty(save(folder, update) / "arrays.npz")
    with pytest.raises(UserError, match="no usable checkpoint"):
        folder.newest()


def test_a_newer_format_is_refused_by_name(tmp_path):
    path = save(Folder(tmp_path), 2)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(UserError, match="format 99"):
        read(path)


class Code:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_nothing_in_it_is_run(tmp_path, monkeypatch):
    # A checkpoint made to deceive: its checksums are right, and one of its arrays is a pickle.
    monkeypatch.chdir(tmp_path)
    path = save(Folder(tmp_path), 2)
    with zipfile.ZipFile(path / "arrays.npz", "w") as archive:
        for name, data in (("weights/w.npy", pickle.dumps(Code())), ("weights/v.npy", b"")):
            archive.writestr(name, data)
        with archive.open("weights/o.npy", "w") as file:
            np.lib.format.write_array(file, np.array([Code()], dtype=object))
    files = {name: {"bytes": (path / name).stat().st_size, "sha256": sha256(path / name)}
             for name in ("arrays.npz", "state.json")}
    (path / "manifest.json").write_text(json.dumps({"format": checkpoint.FORMAT, "files": files}))
    with pytest.raises(CorruptCheckpoint):
        read(path)
    assert not (tmp_path / "ran").exists()


class Died(BaseException):
    """The process is gone."""


def fail_at(patch, module, name, nth, error):
    """Lets the n-th call of a function fail; returns the list of its calls."""
    real, calls = getattr(module, name), []

    def function(*args, **kwargs):
        calls.append(args)
        if len(calls) == nth:
            raise error
        return real(*args, **kwargs)

    patch.setattr(module, name, function)
    return calls


SYSTEM = [(os, "replace"), (os, "fsync"), (np.lib.format, "write_array")]


@pytest.mark.parametrize("module, name", SYSTEM)
@pytest.mark.parametrize("nth", range(1, 7))
def test_a_write_error_leaves_the_old_one(tmp_path, monkeypatch, module, name, nth):
    folder = Folder(tmp_path)
    save(folder, 1)
    write(tmp_path / "update-00000002", arrays(2), state(2))
    with monkeypatch.context() as patch:
        calls = fail_at(patch, module, name, nth, OSError(28, "No space left on device"))
        try:
            folder.save(2, arrays(3), state(3), best=False)  # in the place of one of the same update
        except TrainingError as error:
            assert "No space left on device" in str(error) and "update-00000002" in str(error)
            assert "last good one" in str(error)
        else:
            assert len(calls) < nth  # there was no such call
    found = read(tmp_path / "update-00000002")
    assert_holds(found, found.state["position"]["update"])  # the one or the other, and whole
    assert_holds(read(tmp_path / "update-00000001"), 1)
    assert [entry for entry in entries(tmp_path) if entry.startswith((".new", ".old"))] == []


@pytest.mark.parametrize("module, name", SYSTEM)
@pytest.mark.parametrize("nth", range(1, 7))
def test_a_process_that_dies_anywhere_leaves_a_whole_checkpoint(tmp_path, monkeypatch, module, name, nth):
    folder = Folder(tmp_path)
    save(folder, 1)
    save(folder, 2)
    with monkeypatch.context() as patch:
        for cleaning in ((shutil, "rmtree"), (checkpoint, "repair")):  # the dead do not clean up
            patch.setattr(*cleaning, lambda *args, **kwargs: None)
        fail_at(patch, module, name, nth, Died())
        try:
            folder.save(2, arrays(3), state(3), best=True)
        except Died:
            pass
    again = Folder(tmp_path)  # the next start
    found = again.newest()
    assert found.path.name == "update-00000002"
    assert_holds(found, found.state["position"]["update"])
    assert [entry for entry in entries(tmp_path) if entry.startswith((".new", ".old"))] == []
    assert_holds(save_and_read(again, 4), 4)


def test_a_process_that_dies_while_an_old_one_is_removed(tmp_path, monkeypatch):
    folder = Folder(tmp_path, keep=1)
    save(folder, 1)
    real = shutil.rmtree

    def die(path, **_):
        if "00000001" in str(path):
            os.remove(path / "manifest.json")
            raise Died()
        real(path, **_)

    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(shutil, "rmtree", die)
        save(folder, 2)
    for name in folder.names():
        read(tmp_path / name)
    assert Folder(tmp_path).names() == ["update-00000002"]
    assert entries(tmp_path) == ["latest", "update-00000002"]


def save_and_read(folder, update):
    save(folder, update)
    return folder.newest()


def test_half_a_folder_is_no_checkpoint(tmp_path):
    save(Folder(tmp_path), 1)
    shutil.copytree(tmp_path / "update-00000001", tmp_path / ".new-update-00000002")
    (tmp_path / "notes").mkdir()
    (tmp_path / "update-x").mkdir()
    folder = Folder(tmp_path)
    assert folder.names() == ["update-00000001"]
    assert not (tmp_path / ".new-update-00000002").exists() and (tmp_path / "notes").exists()


def test_a_full_disk_at_the_start_says_so(tmp_path, monkeypatch):
    fail_at(monkeypatch, np.lib.format, "write_array", 1, OSError(28, "full"))
    with pytest.raises(TrainingError, match="cannot write checkpoint .*full$"):
        save(Folder(tmp_path), 0)
    assert entries(tmp_path) == []


def test_keeps_the_last_ones_and_the_best(tmp_path):
    folder = Folder(tmp_path, keep=2)
    for update in range(1, 7):
        save(folder, update, best=update in (1, 3))
    assert folder.names() == ["update-00000003", "update-00000005", "update-00000006"]
    assert folder.pointed("best") == "update-00000003" and folder.pointed("latest") == "update-00000006"
    assert_holds(folder.newest(), 6)


def test_the_best_among_the_last_is_kept_once(tmp_path):
    folder = Folder(tmp_path, keep=1)
    for update in (1, 2):
        save(folder, update, best=True)
    assert folder.names() == ["update-00000002"]


def test_order_is_by_number(tmp_path):
    folder = Folder(tmp_path, keep=9)
    for update in (99999999, 100000000, 5):
        save(folder, update)
    assert [name.split("-")[1] for name in folder.names()] == ["00000005", "99999999", "100000000"]


def test_going_on_from_an_earlier_one_leaves_the_later_course(tmp_path):
    folder = Folder(tmp_path, keep=9)
    for update in (1, 2, 3, 4):
        save(folder, update, best=update in (2, 4))
    folder.go_on_from(read(tmp_path / "update-00000002"))
    assert folder.names() == ["update-00000001", "update-00000002"]
    assert folder.pointed("latest") == folder.pointed("best") == "update-00000002"


def test_pointers_to_nothing_point_to_nothing(tmp_path):
    folder = Folder(tmp_path)
    assert folder.pointed("best") is None
    path = save(folder, 1, best=True)
    shutil.rmtree(path)
    assert folder.pointed("best") is None and folder.names() == []


def test_find(tmp_path):
    run = tmp_path / "run"
    folder = Folder(run / "checkpoints")
    path = save(folder, 3)
    with pytest.raises(UserError, match="no config.yaml"):
        checkpoint.find(str(run))
    (run / "config.yaml").write_text("")
    assert checkpoint.find(str(run)) == (run, None)
    assert checkpoint.find(str(path)) == (run, path)
    with pytest.raises(UserError, match="no such run folder"):
        checkpoint.find(str(tmp_path / "nowhere"))
