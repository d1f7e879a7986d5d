"""What is compressed and compared, with whom: it works, or is refused in one line."""

import pytest

from mxtrain import config
from mxtrain.errors import UserError
from mxtrain.parallel.settings import ParallelConfig, idle_flags, refuse_without_effect
from mxtrain.parallel.world import World

HOROVOD = World("horovod", 2, 0, 2)
SERVERS = World("dist_sync", 2, 0, 2)


@pytest.mark.parametrize("flags, words", [
    (["--compression", "1bit"], "--compression 1bit: must be one of none, fp16, 2bit"),
    (["--compression", "fp16", "--exact"], "--compression fp16: .*--exact"),
    (["--compression", "2bit", "--exact"], "--compression 2bit: .*--exact"),
    (["--compression-threshold", "0.5"], "--compression-threshold 0.5: has no effect with --compression none"),
    (["--compression-threshold", "1", "--compression", "fp16"], "--compression-threshold 1: has no effect .* fp16"),
    (["--compression-threshold", "0", "--compression", "2bit"], "--compression-threshold 0: must be above 0"),
    (["--compression-threshold", "-0.5", "--compression", "2bit"], "--compression-threshold -0.5: must be above 0"),
    (["--compression-threshold", "1e99", "--compression", "2bit"], "--compression-threshold 1e.99: must be .* to 1e30"),
    (["--compression-threshold", "half", "--compression", "2bit"], "--compression-threshold half: must be a number"),
    (["--kvstore", "nonsense"], "--kvstore nonsense: must be one of none, local"),
    (["--audit", "often"], "--audit often: must be a number"), (["--audit", "0"], "--audit 0: must be a whole number"),
    (["--audit", "2.5", "--exact"], "--audit 2.5: must be a whole number"), (["--audit", "0.1"], "--audit 0.1: .*--exact")])
def test_what_cannot_be(flags, words):
    with pytest.raises(UserError, match=words):
        config.build(config.parse(flags).given)


@pytest.mark.parametrize("kind", ["fp16", "2bit"])
@pytest.mark.parametrize("kvstore, contexts", [("device", 1), ("none", 1), ("device", 2), ("local", 3), ("nccl", 2)])
def test_compression_is_for_several_processes(kvstore, contexts, kind):
    with pytest.raises(UserError, match=f"--compression {kind}: .* in a single one .--kvstore {kvstore}.; say none"):
        refuse_without_effect(ParallelConfig(compression=kind), World(kvstore), contexts)
    refuse_without_effect(ParallelConfig(), World(kvstore), contexts)
    for around in (HOROVOD, SERVERS, World("dist_device_sync", 2)):
        refuse_without_effect(ParallelConfig(compression=kind), around, contexts)


def test_what_compares_needs_a_second():
    with pytest.raises(UserError, match="--audit 10: has no effect with one process and one context"):
        refuse_without_effect(ParallelConfig(audit=10), World("device"), 1)
    for around, contexts in ((World("device"), 2), (SERVERS, 1), (HOROVOD, 2)):
        refuse_without_effect(ParallelConfig(audit=10), around, contexts)
    refuse_without_effect(ParallelConfig(audit=0.1, exact=True), World("device"), 1)  # the same context runs it again


def test_a_launch_that_has_shrunk_goes_on_and_says_so():
    settings = ParallelConfig(compression="fp16", audit=10)
    for around in (HOROVOD, SERVERS):
        refuse_without_effect(settings, around._replace(size=1), 1)
    assert [line.split(":")[0] for line in idle_flags(settings, 1, 1)] == ["--compression fp16", "--audit 10"]
    assert idle_flags(settings, 1, 2) == [] and len(idle_flags(settings, 2, 1)) == 1


def test_on_resume():
    saved = config.flatten(config.build({"audit": 10, "compression": "fp16"}))
    assert config.resume_values(saved, config.parse(["--audit", "null", "--compression", "none"]).given)["audit"] is None


def test_the_threshold_on_resume():
    """It goes with the compression that it is for."""
    saved = config.flatten(config.build({"compression": "2bit"}))
    assert saved["compression_threshold"] == 0.5
    for given, expected in (([], 0.5), (["--compression-threshold", "2"], 2), (["--compression", "none"], None),
                            (["--compression", "2bit"], 0.5)):
        values = config.resume_values(saved, config.parse(given).given)
        assert config.build(values).parallel.compression_threshold == expected
    given = config.parse(["--compression", "fp16", "--compression-threshold", "2"]).given
    with pytest.raises(UserError, match="--compression-threshold 2: has no effect with --compression fp16"):
        config.build(config.resume_values(saved, given))


def test_cuts_on_resume():
    """They go with the number of stages that they are for."""
    saved = config.flatten(config.build({"pp": 3, "cut": [2, 5]}))
    for given, expected in (([], [2, 5]), (["--pp", "3"], [2, 5]), (["--pp", "2"], []), (["--pp", "1"], []),
                            (["--pp", "2", "--cut", "4"], [4])):
        assert config.build(config.resume_values(saved, config.parse(given).given)).parallel.cut == expected


def test_a_run_from_before_there_was_a_setting():
    saved = config.flatten(config.build({}))
    del saved["tied"]
    config.resume_values(saved, config.parse(["--no-tied"]).given)
    with pytest.raises(UserError, match="--tied True: the run was started with False"):
        config.resume_values(saved, config.parse(["--tied"]).given)


@pytest.mark.parametrize("given, words", [({"exact": True}, "--exact: --kvstore dist_async cannot"),
                                          ({"audit": 10}, "--audit 10: --kvstore dist_async cannot"),
                                          ({"compression": "fp16"}, "--compression fp16: .*--kvstore dist_async")])
def test_what_processes_that_are_apart_cannot(given, words):
    with pytest.raises(UserError, match=words):
        refuse_without_effect(ParallelConfig(**given), World("dist_async", 2), 1)
    refuse_without_effect(ParallelConfig(staleness=2), World("dist_async", 2), 2)


def test_staleness_is_for_processes_that_are_apart():
    for around in (World("device"), SERVERS, HOROVOD):
        with pytest.raises(UserError, match="--staleness 2: is for --kvstore dist_async, and this is"):
            refuse_without_effect(ParallelConfig(staleness=2), around, 1)
    with pytest.raises(UserError, match="--staleness -1: must be 0 or more"):
        ParallelConfig(staleness=-1)
