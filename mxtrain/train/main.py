"""train.py: from a command line to a run folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import List

from mxtrain import cli, compat, config
from mxtrain.devices import contexts
from mxtrain.errors import LostPeer, UserError
from mxtrain.parallel import world
from mxtrain.parallel.settings import idle_flags, refuse_without_effect
from mxtrain.tasks import kind
from mxtrain.train import folder, session

_log = logging.getLogger("mxtrain")


def main(argv: List[str]) -> int:
    """Trains as the command line says; returns the exit code."""
    with world.rank_0_first():
        arguments = config.parse(argv)
        folder.remember_log()
        around = world.world(arguments.given.get("kvstore"))
        if arguments.check_data and around.several:
            raise UserError("--check-data: one process reads all samples; start it without horovodrun or launch.py")
        if arguments.plan and around.several:
            raise UserError("--plan: one process plans for all; start it without horovodrun or launch.py, and say by "
                            "--processes how many there will be")
        communicator = _connect(around, arguments.given) if around.several else None
    if communicator:
        around = communicator.known(around)
    settings, place = session.configure(arguments.given, communicator)
    if arguments.check_data:
        from mxtrain.data.check import check

        settings.train.task = kind.resolve(settings)
        return check(settings, arguments.json)
    if arguments.plan:
        return _plan(settings, place is not None, arguments)
    if communicator is None:
        around = world.world(settings.parallel.kvstore)  # as the run has it that is resumed

    def prepare() -> list:
        settings.train.task = kind.resolve(settings)
        if settings.devices.threads:
            compat.set_threads(settings.devices.threads)
        if settings.parallel.exact:
            compat.set_exact()
        found = contexts(settings.devices, local_rank=around.local_rank, local_size=around.local_size)
        refuse_without_effect(settings.parallel, around, len(found))
        settings.devices.threads = compat.threads()
        return found

    replicas = communicator.together(prepare) if communicator else prepare()

    # Only now, with the command line and the devices checked: these take seconds to import.
    import mxnet as mx

    from mxtrain.callbacks.progress import Progress
    from mxtrain.parallel.communicator import connect
    from mxtrain.train.setup import part_for, set_up
    from mxtrain.train.signals import Stopped

    communicator = connect(around, replicas)
    if settings.parallel.exact:
        communicator.together(communicator.check_exact)
    part = part_for(settings, len(replicas), communicator)
    task = communicator.together(lambda: kind.open_task(settings, place is not None, part))
    communicator.check_same(task.data.fingerprint, lambda _: (
        f"--data {settings.data.data}: holds other samples for rank {communicator.rank} than for rank 0"))
    run = set_up(task.net, task.loss, settings, replicas, communicator, task.train_data, task.val_data, task.sample(),
                 task.preprocess, task.evaluation_loss, task.data.fingerprint, task.prepare, task.check_output,
                 task.scores, task.values)

    def describe() -> None:
        path = Path(settings.train.out)
        with folder.naming(path):
            folder.write_classes(path, task.classes)
            folder.write_json(path / "input.json", task.input())
        _describe(run, settings, task, around.kvstore)

    progress = [Progress(settings.train.epochs, len(task.train_data))] if (
        settings.train.progress and communicator.rank == 0) else []
    try:
        path = session.carry_out(run, settings, place, lambda: folder.make(settings.train.out, task.name), progress,
                                 describe, signals=True)
    except Stopped as stopped:
        _log.info("go on with --resume %s", settings.train.out)
        if arguments.json and communicator.rank == 0:
            cli.print_json({"run": settings.train.out, "finished": None, "epochs": run.state.epoch,
                            "updates": run.state.update, "signal": stopped.number})
        return 128 + stopped.number
    except mx.base.MXNetError as error:
        if not communicator.lost_peer(error):
            raise
        raise LostPeer(f"another process has gone: {str(error).strip().splitlines()[-1]}") from None
    finally:
        task.close()
    if communicator.rank == 0:
        _report(path, run, arguments.json)
    communicator.close()
    return 0


def _plan(settings, resumed: bool, arguments) -> int:
    settings.train.task = kind.resolve(settings)
    from mxtrain.train import planning  # which imports mxnet

    on = planning.machine(settings, arguments.processes, arguments.device_memory)
    around = world.World("horovod" if on.processes > 1 else settings.parallel.kvstore or "device", on.processes)
    refuse_without_effect(settings.parallel, around, on.contexts)
    for line in idle_flags(settings.parallel, on.contexts, on.processes):
        _log.warning("%s", line)
    task = kind.open_task(settings, resumed)
    try:
        return planning.report(settings, task, on, arguments.json)
    finally:
        task.close()


def _connect(around: world.World, given: dict):
    """Meets the other processes. Only rank 0 logs, and whoever warns of what it reads."""
    threads = given.get("threads") or session.threads_of_run(given)
    if threads:
        compat.set_threads(threads)
    from mxtrain.parallel.communicator import connect
    from mxtrain.train.relay import READERS

    communicator = connect(around)
    if communicator.rank:
        _log.addFilter(lambda record: record.levelno >= (
            logging.WARNING if record.module in READERS else logging.ERROR))
    return communicator


def _describe(run, settings, task, kvstore: str) -> None:
    parallel, count = settings.parallel, run.layout.size
    _log.info("network %s: %s parameters, %d outputs", settings.model.model, f"{count:,}", len(task.classes))
    _log.info("batches of %d in %d shard%s, %s, kvstore %s; %d updates per epoch", settings.train.batch_size,
              parallel.shards, "s" if parallel.shards > 1 else "",
              "exact sums" if parallel.exact else "float32 sums", kvstore, len(task.train_data))
    if run.layout.words:
        _log.info("%s", run.layout.words)
    _log.info("run folder: %s", settings.train.out)


def _report(path: Path, run, as_json: bool) -> None:
    """The last lines of a training: where it is and how good it became."""
    name, best, epoch = run.monitor.name, run.monitor.best, run.monitor.best_epoch
    if as_json:
        cli.print_json({"run": str(path), "finished": run.state.finished, "epochs": run.state.epoch,
                        "updates": run.state.update, "monitor": name, "best": best, "best_epoch": epoch})
        return
    print(f"run folder: {path}")
    print(f"best {name}: " + ("none" if best is None else f"{best:.4f} (epoch {epoch})"))
