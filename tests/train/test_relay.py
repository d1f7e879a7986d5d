"""What other processes say of their samples, in the log.txt of rank 0."""

import logging

from mxtrain.train import folder
from mxtrain.train.relay import Relay
from ranks import among

LOG = logging.getLogger("mxtrain")


def say(module, text, level=logging.WARNING):
    LOG.handle(LOG.makeRecord(LOG.name, level, f"{module}.py", 1, text, (), None))


def test_the_warnings_of_an_epoch_come_once_and_not_without_end(tmp_path):
    handler = folder.log_to(tmp_path)

    def process(communicator):
        relay = Relay(communicator)
        communicator.barrier()  # in these tests all ranks have one log
        if communicator.rank == 0:
            say("loader", "left out: a.png")
            say("settings", "nothing of a sample")
            for _ in range(1000):
                say("workers", "no batch")
        communicator.barrier()
        for _ in range(2):
            relay.epoch([])
        relay.close()
        return len(relay._said.buffer)

    assert among(2, process) == [0, 0]
    folder.close_log(handler)
    lines = [line for line in (tmp_path / "log.txt").read_text().splitlines() if "rank 1" in line]
    assert len(lines) == 100 and lines[0].endswith("WARNING rank 1: left out: a.png")
    assert not any("nothing of a sample" in line for line in lines)
