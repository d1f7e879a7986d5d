import sys
from types import SimpleNamespace

import pytest
from mxtrain.errors import UserError
from mxtrain.parallel import world as module
from mxtrain.parallel.world import World, rank_0_first, world

HOROVOD = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
SERVER = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "localhost", "DMLC_PS_ROOT_PORT": "1", "DMLC_NUM_WORKER": "3",
          "DMLC_NUM_SERVER": "1"}


@pytest.mark.parametrize("kvstore, environment, expected", [
    (None, {}, World("device")), ("none", {}, World("none")), ("local", {}, World("local")),
    (None, HOROVOD, World("horovod", 4, 1, 2)), ("horovod", HOROVOD, World("horovod", 4, 1, 2)),
    (None, {"OMPI_COMM_WORLD_SIZE": "4"}, World("horovod", 4)), ("horovod", {"PMI_SIZE": "2"}, World("horovod", 2)),
    ("device", {"SLURM_STEP_NUM_TASKS": "4"}, World("device")), (None, {"SLURM_STEP_NUM_TASKS": "1"}, World("device")),
    ("dist_sync", SERVER, World("dist_sync", 3)), ("dist_device_sync", SERVER, World("dist_device_sync", 3)),
    ("dist_async", SERVER, World("dist_async", 3)),
    ("dist_sync", {**SERVER, "MXTRAIN_LOCAL_RANK": "2", "MXTRAIN_LOCAL_SIZE": "3"}, World("dist_sync", 3, 2, 3)),
])
def test_what_works(kvstore, environment, expected):
    assert world(kvstore, environment) == expected


@pytest.mark.parametrize("kvstore, environment, words", [
    ("device", HOROVOD, "--kvstore device: these are 4 processes of Horovod"),
    ("dist_sync", HOROVOD, "--kvstore dist_sync: these are 4 processes"),
    (None, {**HOROVOD, **SERVER}, "HOROVOD_RANK and DMLC_ROLE=worker are both set"),
    (None, SERVER, "DMLC_ROLE=worker.*--kvstore is not given; allowed here are dist_sync"),
    ("local", SERVER, "--kvstore is local"),
    ("horovod", {}, "--kvstore horovod: this process was started alone; start several by horovodrun"),
    (None, {**SERVER, "DMLC_ROLE": "server"}, "DMLC_ROLE=server.*--kvstore is not given"),
    ("dist_sync", {}, "needs servers and a scheduler.*launch.py"),
    ("dist_async", {}, "--kvstore dist_async: needs servers and a scheduler.*launch.py"),
    ("dist_sync", {**SERVER, "DMLC_PS_ROOT_PORT": ""}, "DMLC_PS_ROOT_PORT not set"),
    (None, {**HOROVOD, "HOROVOD_SIZE": "two"}, "HOROVOD_SIZE=two: must be a whole number"),
])
def test_what_contradicts_itself_is_refused(kvstore, environment, words):
    with pytest.raises(UserError, match=words):
        world(kvstore, environment)


@pytest.mark.parametrize("environment, seconds", [({}, []), ({"HOROVOD_RANK": "0"}, []), ({"HOROVOD_RANK": "2"}, [3.0]),
                                                  ({"MXTRAIN_RANK": "1", "HOROVOD_RANK": "0"}, [3.0])])
def test_rank_0_says_first_what_all_have_to_say(environment, seconds, monkeypatch):
    slept = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    with pytest.raises(UserError, match="mistake"), rank_0_first(environment):
        raise UserError("mistake")
    assert slept == seconds


class Lonely:
    """A Horovod without MPI, that mpirun has started."""

    init, rank, size, local_rank, local_size = (staticmethod(lambda value=value: value) for value in (None, 0, 1, 3, 4))
    global_process_set = None


def test_a_horovod_that_does_not_meet(monkeypatch):
    from mxtrain.parallel.horovod import Horovod

    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(mxnet=Lonely))
    monkeypatch.setitem(sys.modules, "horovod.mxnet", Lonely)
    with pytest.raises(UserError, match="4 processes were started, and Horovod, built without MPI, knows of 1; .*-np 4"):
        Horovod(4)
    assert Horovod(1).known(World("horovod", 1)) == World("horovod", 1, 3, 4)
