import pytest
from mxtrain.errors import UserError
from mxtrain.parallel.world import World, world

HOROVOD = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
SERVER = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "localhost", "DMLC_PS_ROOT_PORT": "1", "DMLC_NUM_WORKER": "3",
          "DMLC_NUM_SERVER": "1"}


@pytest.mark.parametrize("kvstore, environment, expected", [
    (None, {}, World("device")), ("none", {}, World("none")), ("local", {}, World("local")),
    (None, HOROVOD, World("horovod", 4, 1, 2)), ("horovod", HOROVOD, World("horovod", 4, 1, 2)),
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
    (None, {**SERVER, "DMLC_ROLE": "server"}, "DMLC_ROLE=server.*--kvstore is not given"),
    ("dist_sync", {}, "needs servers and a scheduler.*launch.py"),
    ("dist_async", {}, "--kvstore dist_async: needs servers and a scheduler.*launch.py"),
    ("dist_sync", {**SERVER, "DMLC_PS_ROOT_PORT": ""}, "DMLC_PS_ROOT_PORT not set"),
    (None, {**HOROVOD, "HOROVOD_SIZE": "two"}, "HOROVOD_SIZE=two: must be a whole number"),
])
def test_what_contradicts_itself_is_refused(kvstore, environment, words):
    with pytest.raises(UserError, match=words):
        world(kvstore, environment)
