"""What is compressed and compared, with whom: it works, or is refused in one line."""

import pytest

from mxtrain import config
from mxtrain.errors import UserError
from mxtrain.parallel.settings import ParallelConfig, idle_flags, refuse_without_effect
from mxtrain.parallel.world import World

HOROVOD = World("horovod", 2, 0, 2)
SERVERS = World("dist_sync", 2, 0, 2)


@pytest.mark.parametrize("flags, words", [
    (["--compression", "1bit"], "--compression 1bit: must be one of none, fp16"),
    (["--compression", "2bit"], "--compression 2bit: must be one of none, fp16"),
    (["--compression", "fp16", "--exact"], "--compression fp16: .*--exact"),
    (["--audit", "often"], "--audit often: must be a number"), (["--audit", "0"], "--audit 0: must be a whole number"),
    (["--audit", "2.5", "--exact"], "--audit 2.5: must be a whole number"), (["--audit", "0.1"], "--audit 0.1: .*--exact")])
def test_what_cannot_be(flags, words):
    with pytest.raises(UserError, match=words):
        config.build(config.parse(flags).given)


@pytest.mark.parametrize("around, contexts, words", [
    (World("device"), 1, "has no effect with one process and one context"), (World("none"), 1, "has no effect"),
    (World("device"), 2, "for the sums of Horovod, .*--kvstore device"), (World("local"), 3, "--kvstore local"),
    (SERVERS, 1, "--kvstore dist_sync"), (World("dist_device_sync", 2), 2, "--kvstore dist_device_sync")])
def test_compression_is_for_horovod(around, contexts, words):
    with pytest.raises(UserError, match=words):
        refuse_without_effect(ParallelConfig(compression="fp16"), around, contexts)
    refuse_without_effect(ParallelConfig(), around, contexts)


def test_what_compares_needs_a_second():
    with pytest.raises(UserError, match="--audit 10: has no effect with one process and one context"):
        refuse_without_effect(ParallelConfig(audit=10), World("device"), 1)
    for around, contexts in ((World("device"), 2), (SERVERS, 1), (HOROVOD, 2)):
        refuse_without_effect(ParallelConfig(audit=10), around, contexts)
    refuse_without_effect(ParallelConfig(audit=0.1, exact=True), World("device"), 1)  # the same context runs it again
    refuse_without_effect(ParallelConfig(compression="fp16"), HOROVOD, 2)


def test_a_launch_that_has_shrunk_goes_on_and_says_so():
    settings = ParallelConfig(compression="fp16", audit=10)
    alone = HOROVOD._replace(size=1)
    refuse_without_effect(settings, alone, 1)
    assert [line.split(":")[0] for line in idle_flags(settings, 1, 1)] == ["--compression fp16", "--audit 10"]
    assert idle_flags(settings, 1, 2) == [] and len(idle_flags(settings, 2, 1)) == 1


def test_on_resume():
    saved = config.flatten(config.build({"audit": 10, "compression": "fp16"}))
    assert config.resume_values(saved, config.parse(["--audit", "null", "--compression", "none"]).given)["audit"] is None


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
