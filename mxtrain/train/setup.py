"""Puts the parts of a training together: the same for train.py and fit()."""

from __future__ import annotations

import bisect
import functools
import logging
import random
from types import SimpleNamespace
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import Block

from mxtrain import compat
from mxtrain.callbacks.monitor import Monitor
from mxtrain.errors import UserError
from mxtrain.models import experts, plan, weights
from mxtrain.optim.optimizer import Optimizer, without_effect
from mxtrain.optim.schedules import learning_rate
from mxtrain.parallel import cut
from mxtrain.parallel.communicator import Communicator
from mxtrain.parallel.compression import compression_for
from mxtrain.parallel.grid import Grid, grid
from mxtrain.parallel.layout import Layout
from mxtrain.parallel.measure import starts_within
from mxtrain.parallel.rounding import rounding_cuts
from mxtrain.parallel.settings import ParallelConfig, idle_flags, number_of_shards
from mxtrain.parallel.shards import assigned, part_of
from mxtrain.parallel.statistics import moving_layers, running_parameters
from mxtrain.parallel.tensor_layout import TensorLayout
from mxtrain.seeds import mix
from mxtrain.sizes import parse_bytes
from mxtrain.tasks.heads import first, heads_for
from mxtrain.train.audit import Audit
from mxtrain.train.metrics import Meter
from mxtrain.train.run import Run

_log = logging.getLogger("mxtrain")


def set_up(net: Block, loss: Block, settings: SimpleNamespace, contexts: List[mx.Context], communicator: Communicator,
           train_data, val_data, sample: Sequence, preprocess: Optional[Block] = None,
           evaluation_loss: Optional[Block] = None, fingerprint: Optional[str] = None,
           prepare: Callable[[Block], None] = None, check_output: Callable = None, scores: Callable = None,
           values: Callable = dict) -> Run:
    """A run that is ready to train. Initializes what is not yet, with settings.train.seed. All processes call it.

    sample: (*inputs, label) of a row or two, for the shapes. prepare: called with the initialized network before its
    parameters are taken. check_output: called with the network's (main) output for the sample.
    scores: makes an object like tasks.scores.F1, for values of an evaluation that are no means. values: means -> all
    values that follow from them.
    """
    made = communicator.together(lambda: _prepared(net, loss, settings, contexts, sample, preprocess, evaluation_loss,
                                                   prepare, check_output))
    stages = _stages(made, settings.parallel, contexts, communicator)
    groups = _groups(made, stages, settings, communicator)
    of_all = grid_for(settings.parallel, len(contexts), communicator)
    communicator.meet(of_all.groups(_tied_stages(made, stages) if of_all.span > 1 else []))
    return communicator.together(lambda: _assembled(made, stages, groups, settings, contexts, communicator, train_data,
                                                    val_data, preprocess, fingerprint, scores, values))


class _Prepared(NamedTuple):
    """A network that can be run, and what it was tried with."""

    net: Block
    sample: List[mx.nd.NDArray]
    """Preprocessed inputs."""
    label: mx.nd.NDArray
    head: Block
    evaluation_head: Block

    @property
    def segments(self) -> List[Block]:
        """The network's finest plan."""
        return plan.segments(self.net)


def _prepared(net, loss, settings, contexts, sample, preprocess, evaluation_loss, prepare, check_output) -> _Prepared:
    """See set_up. A network that may be too large for one device is made on the host."""
    if contexts[0].device_type == "cpu":
        compat.keep_memory()
    whole = settings.parallel.pp == settings.parallel.tp == 1 and settings.parallel.zero < 3
    first_on = contexts if whole else [mx.cpu()]
    initialize(net, first_on, settings.train.seed)
    *sample, label = [mx.nd.array(x, ctx=first_on[0], dtype=x.dtype) for x in sample]
    if preprocess is not None:
        sample = [preprocess(x) for x in sample]
    outputs = _outputs(net, sample)  # also finds out the shapes of all parameters
    output = first(outputs)
    if check_output is not None:
        check_output(output)
    if prepare is not None:
        prepare(net)
    for one, other in plan.tied(net):
        other.set_data(one.list_data()[0])
    _refuse_unsupported(net)
    head, evaluation_head = heads_for(loss, output.shape[1] if output.ndim == 2 else None, evaluation_loss)
    _check_loss(head, outputs, label)
    return _Prepared(net, sample, label, head, evaluation_head)


def _stages(made: _Prepared, parallel: ParallelConfig, contexts: List[mx.Context],
            communicator: Communicator) -> List[int]:
    """The first segment of each stage of a pipeline; rank 0 measures for all."""
    if parallel.pp == 1:
        return [0]
    name, segments = type(made.net).__name__, made.segments

    def choose() -> Optional[List[int]]:
        cut.check(parallel.pp, len(segments), name)
        starts = cut.by_hand(parallel.cut, len(segments), parallel.pp, name) if parallel.cut else None
        if communicator.rank:
            return None
        unlike = functools.partial(rounding_cuts, segments, inputs=made.sample, label=made.label, head=made.head)
        tries = parallel.exact and contexts[0].device_type == "cpu"
        if starts:
            found = unlike(starts) if tries else []
            if found:
                raise UserError(f"--cut {' '.join(map(str, parallel.cut))}: with --exact, {cut.unlike(found)}")
            return starts
        costs = cut.measure(segments, made.sample, made.label, made.head, made.sample[0].context)
        barred: List[int] = []
        while True:
            starts = cut.balanced(costs, parallel.pp, name, barred)
            found = unlike(starts) if tries else []
            if not found:
                return starts
            barred += found

    return communicator.share(communicator.together(choose))


def _tied_stages(made: _Prepared, stages: List[int]) -> List[Tuple[int, int]]:
    """The stages of the two places of every tied weight."""
    of = {id(p): bisect.bisect(stages, number) - 1 for number, segment in enumerate(made.segments)
          for p in segment.collect_params().values()}
    return [(of[id(one)], of[id(other)]) for one, other in plan.tied(made.net)]


def _groups(made: _Prepared, stages: List[int], settings: SimpleNamespace,
            communicator: Communicator) -> Optional[List[int]]:
    """The first segment of each group for --recompute BYTES, None for another way; rank 0 measures for all."""
    parallel = settings.parallel
    if parse_bytes(parallel.recompute) is None:
        return None
    rows = -(-settings.train.batch_size // parallel.shards)
    starts = communicator.share(communicator.together(lambda: None if communicator.rank else starts_within(
        parallel.recompute, made.segments, made.head, made.sample, made.label, rows, stages)))
    _log.info("--recompute %s: %d groups of segments", parallel.recompute, len(starts))
    return starts


def _assembled(made: _Prepared, stages: List[int], groups: Optional[List[int]], settings: SimpleNamespace,
               contexts: List[mx.Context], communicator: Communicator, train_data, val_data, preprocess, fingerprint,
               scores, values) -> Run:
    """See set_up."""
    net, parallel = made.net, settings.parallel
    layout = _layout(made, stages, groups, settings, contexts, communicator, preprocess)
    if parallel.zero == 3 and parallel.recompute == "none":
        _log.info("--zero 3: weights come and go, so that the blocks of the network run again in backward, as with "
                  "--recompute blocks")
    _warn_about_shards(net, settings.train.batch_size, layout)
    parameters = weights.parameters(net)
    names = {id(p): name for name, p in parameters.items()}
    optimizer = _optimizer(net, settings, {names[id(p)]: p for p in layout.parameters}, layout, communicator)
    if settings.optim.warmup_epochs >= settings.train.epochs:
        _log.warning("--warmup-epochs %s: the run of %d epochs never comes to --lr %s", settings.optim.warmup_epochs,
                     settings.train.epochs, settings.optim.lr)
    for line in (*without_effect(settings.optim), *idle_flags(parallel, len(contexts), communicator.size)):
        _log.warning("%s", line)
    monitor = Monitor(settings.train.monitor, settings.train.patience, settings.train.min_delta)
    known = ((*made.evaluation_head.names, *(scores().names if scores else ())) if val_data is not None
             else made.head.names)
    if monitor.name not in ("auto", *known):
        raise UserError(f"--monitor {monitor.name}: no such value; allowed are auto, {', '.join(known)}")
    communicator.compression = compression_for(
        parallel, {names[id(p)]: copies[0] for p, copies in zip(layout.parameters, layout.sums)}, communicator.size)
    audit = Audit(parallel.audit, settings.train.seed, layout, communicator, parameters)
    return Run(contexts=contexts, parameters=parameters, layout=layout, audit=audit, communicator=communicator,
               optimizer=optimizer,
               learning_rate=functools.partial(learning_rate, settings.optim, updates_per_epoch=len(train_data),
                                               epochs=settings.train.epochs),
               train_data=train_data, val_data=val_data, data_fingerprint=fingerprint, epochs=settings.train.epochs,
               meter=Meter(made.head.names, communicator), evaluation_names=made.evaluation_head.names, scores=scores,
               values=values,
               told=functools.partial(experts.told, net, layout.weight),
               monitor=monitor,
               clip_norm=settings.optim.clip_norm, checkpoint_updates=settings.train.checkpoint_updates,
               checkpoint_minutes=settings.train.checkpoint_minutes, advice=train_data.advice())


def _layout(made: _Prepared, stages: List[int], groups: Optional[List[int]], settings: SimpleNamespace,
            contexts: List[mx.Context], communicator: Communicator, preprocess: Optional[Block]) -> Layout:
    net, parallel, seed = made.net, settings.parallel, mix(settings.train.seed, 1)
    if parallel.tp == 1:
        return Layout(net, made.head, made.evaluation_head, contexts, parallel.shards, parallel.exact,
                      parallel.recompute, seed, preprocess, made.sample, communicator, stages, parallel.pp_schedule,
                      parallel.zero, settings.optim.optimizer == "lamb", groups)
    if settings.optim.optimizer == "lamb":
        raise UserError(f"--tp {parallel.tp}: --optimizer lamb needs norms of whole parameters, which are split; use "
                        "another one")
    return TensorLayout(net, made.head, made.evaluation_head, contexts, parallel.shards, parallel.tp,
                        parallel.recompute, seed, preprocess, made.sample, communicator, stages, parallel.pp_schedule)


def _optimizer(net: Block, settings: SimpleNamespace, parameters: dict, layout: Layout, communicator):
    if not communicator.apart:
        return Optimizer(settings.optim, parameters, layout.held)
    from mxtrain.parallel.asynchronous import OnServers

    communicator.ahead = 4 if settings.parallel.staleness is None else settings.parallel.staleness
    return OnServers(settings.optim, parameters, running_parameters(net), layout.contexts,
                     [held.gradient for held in layout.held[0]], communicator)


def grid_for(parallel: ParallelConfig, contexts: int, communicator) -> Grid:
    """The devices of all processes, each with so many contexts. Raises UserError where they do not make up a layout."""
    of_all = grid(parallel.pp, parallel.dp, contexts, communicator.size, communicator.rank, parallel.tp)
    if of_all.team > 1 and not communicator.sends:
        raise UserError(f"--tp {parallel.tp}: layers that are split over several processes need Horovod, in which some of "
                        "them add up: start them by horovodrun")
    if of_all.span > 1 and not communicator.sends:
        raise UserError(f"--pp {parallel.pp}: a pipeline over several processes, of {contexts} context"
                        f"{'s' * (contexts > 1)} each, needs Horovod, which sends from one to another: start them by "
                        "horovodrun, or by launch.py --transport horovod")
    if parallel.pp > 1 and parallel.compression == "2bit":
        raise UserError(f"--compression 2bit: packs the gradients of one context, and --pp {parallel.pp} spreads them over "
                        "several; take fp16 where a pipeline is within a process, or leave it out")
    if of_all.span > 1 and parallel.compression != "none":
        raise UserError(f"--compression {parallel.compression}: is for sums over all processes, and --pp {parallel.pp} "
                        "spreads a replica over several; leave one out")
    return of_all


def part_for(settings: SimpleNamespace, contexts: int, communicator) -> Callable:
    """Which rows of a batch this process reads, which has that many contexts; also resolves the number of shards."""
    parallel = settings.parallel
    if parallel.audit or parallel.pp > 1 or parallel.tp > 1 or parallel.zero or not (
            parallel.shards or parallel.micro_batch or parallel.exact):
        communicator.check_same(contexts, lambda expected: (
            f"--gpus, --cpus: {contexts} contexts for rank {communicator.rank} and {expected} for rank 0; all "
            "processes need as many, for --audit, --pp, --tp and --zero, and where --shards does not say how a batch is cut"))
    of_all = communicator.together(lambda: grid_for(parallel, contexts, communicator))
    shards = communicator.together(lambda: _resolve_shards(settings, contexts * communicator.size))
    return functools.partial(part_of, first=of_all.here.start, count=len(of_all.here), replicas=of_all.replicas,
                             shards=shards)


def _resolve_shards(settings: SimpleNamespace, contexts: int) -> int:
    """Gives settings.parallel.shards its number, for this many contexts in all processes."""
    parallel = settings.parallel
    parallel.shards = number_of_shards(parallel, settings.train.batch_size, contexts)
    parallel.micro_batch = None  # it has become a number of shards
    return parallel.shards


def start_alike(run: Run) -> None:
    """All processes start from the weights of rank 0, whatever their own files or generators gave."""
    if run.communicator.size == 1:
        return
    arrays = [parameter.list_data()[0] for parameter in run.parameters.values()]
    run.communicator.broadcast(arrays)
    for parameter, array in zip(run.parameters.values(), arrays):
        parameter.set_data(array)


def _outputs(net: Block, sample: Sequence[mx.nd.NDArray]):
    """What the network returns in predict mode. Raises UserError for inputs that it cannot take."""
    try:
        with autograd.predict_mode():
            outputs = net(*sample)
        mx.nd.waitall()
    except mx.base.MXNetError as error:
        raise UserError(f"{type(net).__name__} cannot take an input of {_kinds(sample)}: {_reason(error)}") from error
    return outputs


def _check_loss(head: Block, outputs, label: mx.nd.NDArray) -> None:
    """Raises UserError for a loss that cannot be computed or is not one value per sample."""
    name = type(head.loss).__name__
    try:
        with autograd.predict_mode():
            loss = head(outputs, label)[0]
        loss.wait_to_read()
    except (mx.base.MXNetError, ValueError) as error:
        raise UserError(f"{name} cannot compare the network's output with labels of {_kinds([label])}: "
                        f"{_reason(error)}") from error
    if loss.shape != (len(label),):
        raise UserError(f"{name} gives values of shape {loss.shape} for {len(label)} samples; a loss gives one value "
                        "per sample, and their mean is taken here")


def _kinds(arrays: Sequence[mx.nd.NDArray]) -> str:
    """Shapes, without the rows, and types."""
    return ", ".join(f"shape {x.shape[1:]} and type {np.dtype(x.dtype).name}" for x in arrays)


def _reason(error: Exception) -> str:
    """What an error is about, which MXNet writes after its stack trace."""
    lines = str(error).splitlines()
    reason = [line for line in lines if "Error" in line or "Check failed" in line]
    return (reason or lines)[-1].strip()


def initialize(net: Block, contexts: List[mx.Context], seed: int) -> None:
    """Initializes the parameters that are not (Xavier, unless they say otherwise) and puts all on the contexts."""
    mx.random.seed(mix(seed, 0))
    np.random.seed(mix(seed, 0) % 2**32)  # some initializers draw from these two
    random.seed(seed)
    for parameter in net.collect_params().values():
        if parameter._data is None and not parameter._deferred_init:
            parameter.initialize(ctx=contexts, default_init=_DefaultInit(magnitude=2.0))
        else:
            parameter.reset_ctx(contexts)


class _DefaultInit(mx.init.Xavier):
    """Xavier, which is not defined for vectors: these get gluon's own default."""

    def _init_weight(self, name, array):
        if array.ndim < 2:
            mx.init.Uniform()._init_weight(name, array)
        else:
            super()._init_weight(name, array)


def _refuse_unsupported(net: Block) -> None:
    for name, parameter in weights.parameters(net).items():
        if parameter._stype != "default" or parameter._grad_stype != "default":
            raise UserError(f"{name}: sparse parameters and gradients are not supported (sparse_grad=False)")
        if np.dtype(parameter.dtype) != np.float32:
            raise UserError(f"{name}: is {np.dtype(parameter.dtype).name}; networks are trained in float32")
    if any(isinstance(layer, gluon.contrib.nn.SyncBatchNorm) for layer in moving_layers(net)):
        raise UserError("SyncBatchNorm waits for devices that take turns here; use BatchNorm, which works on a shard")


def _warn_about_shards(net: Block, batch_size: int, layout: Layout) -> None:
    shards, replicas = layout.shards, layout.replicas
    if shards < replicas:
        _log.warning("%d shards on %d %s: %s idle", shards, replicas,
                     "contexts" if layout.grid.stages == 1 else "replicas", ", ".join(_idle(layout)))
    if batch_size < shards:
        _log.warning("a batch of %d samples fills only %d of %d shards", batch_size, batch_size, shards)
    rows = batch_size // shards
    if rows < 8 and any(not isinstance(layer, experts.Statistics) for layer in moving_layers(net)):
        _log.warning("batch normalization sees %d samples at a time (--batch-size %d in %d shards): 8 or more are "
                     "advisable", max(1, rows), batch_size, shards)


def _idle(layout: Layout) -> List[str]:
    """The replicas without a shard, by their devices."""
    grid, found = layout.grid, []
    for replica in range(grid.replicas):
        if not assigned(replica, grid.replicas, layout.shards):
            for stage in range(grid.stages):
                rank, context = divmod((replica * grid.stages + stage) * grid.team, grid.contexts)
                name = str(layout.contexts[context])
                found.append(f"{name} of rank {rank}" if grid.processes > 1 else name)
    return found
