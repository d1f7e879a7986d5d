"""Everything of a training that changes, in one place, so that all of it can be saved."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Dict, Optional

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from mxtrain.errors import UserError
from mxtrain.train import residuals
from mxtrain.train.checkpoint import Checkpoint

_RESIDUAL = "residual/"


@dataclass
class State:
    """The position of a training."""

    update: int = 0
    """Updates made since the first start."""
    epoch: int = 0
    """Epochs completed."""
    batch: int = 0
    """Batches of the present epoch that are done."""
    totals: dict = field(default_factory=dict)
    """Metric sums of the present epoch so far (Totals.state())."""
    seconds: float = 0.0
    """Time spent on the present epoch's updates."""
    waited: float = 0.0
    """Part of it in which the devices waited for batches."""
    samples: int = 0
    """Samples of the present epoch that were read so far."""
    skipped: int = 0
    """Samples of the present epoch that could not be read and were left out."""
    grad_norm: float = 0.0
    """Global norm of the latest gradient, before clipping."""
    finished: Optional[str] = None
    """Why the training is over, None while it is not."""

    def next_epoch(self) -> None:
        """To the beginning of the next epoch."""
        self.epoch, self.batch, self.totals = self.epoch + 1, 0, {}
        self.seconds, self.waited, self.samples, self.skipped = 0.0, 0.0, 0, 0


def snapshot(run) -> tuple:
    """(arrays, state) of a checkpoint of a run. All processes call it at the same time."""
    arrays = {}
    for name, parameter in run.parameters.items():
        value = run.layout.weight(parameter)
        if run.communicator.rank == 0:  # others need no room for all of them
            arrays[f"weights/{name}"] = value
    states = run.optimizer.state_arrays(run.layout.assemble)
    arrays.update({f"optimizer/{name}": array for name, array in states.items()})
    arrays.update({f"{_RESIDUAL}{name}": array for name, array in residuals.gather(run.communicator).items()})
    run.state.totals = run.meter.totals.state()
    state = {"position": asdict(run.state), "monitor": run.monitor.state(), "data": run.data_fingerprint}
    return arrays, state


def distribute(communicator, checkpoint: Optional[Checkpoint]) -> Checkpoint:
    """The checkpoint that rank 0 has read, in all processes; the residuals, which are for one each, in rank 0 alone."""
    if communicator.size == 1:
        return checkpoint
    first = communicator.rank == 0
    path, state, kinds = communicator.share(first and [
        str(checkpoint.path), checkpoint.state,
        [(name, array.shape, array.dtype.name) for name, array in checkpoint.arrays.items()
         if not name.startswith(_RESIDUAL)]])
    arrays = {name: mx.nd.array(checkpoint.arrays[name], dtype=kind) if first else mx.nd.zeros(shape, dtype=kind)
              for name, shape, kind in kinds}
    communicator.broadcast(list(arrays.values()))
    kept = {name: array for name, array in checkpoint.arrays.items() if name.startswith(_RESIDUAL)} if first else {}
    return Checkpoint(Path(path), {**kept, **{name: array.asnumpy() for name, array in arrays.items()}}, state)


def restore(run, checkpoint) -> None:
    """Puts a checkpoint into a run that has been set up for the same network."""
    saved = checkpoint.state
    if saved["data"] != run.data_fingerprint:
        raise UserError(f"{checkpoint.path}: the data have changed since this run began (fingerprint "
                        f"{str(saved['data'])[:12]}, now {str(run.data_fingerprint)[:12]})")
    load_weights(run.parameters, checkpoint)
    run.optimizer.load_state_arrays(_below("optimizer/", checkpoint.arrays))
    for name, value in saved["position"].items():
        setattr(run.state, name, value)
    run.monitor.load(saved["monitor"])


def restore_residuals(run, checkpoint) -> None:
    """Hands the processes what they had not sent yet. All call it together."""
    residuals.scatter(run.communicator, _below(_RESIDUAL, checkpoint.arrays))


def load_weights(parameters: Dict[str, Parameter], checkpoint) -> None:
    """Sets all parameters, on all their contexts, from a checkpoint's arrays."""
    weights = _below("weights/", checkpoint.arrays)
    if set(weights) != set(parameters):
        odd = sorted(set(weights) ^ set(parameters))
        raise UserError(f"{checkpoint.path}: belongs to another network (differs in {', '.join(odd[:3])})")
    for name, parameter in parameters.items():
        array = weights[name]
        # A shape with zeros is not known yet.
        shape = parameter.shape
        if len(shape) != len(array.shape) or any(a not in (0, b) for a, b in zip(shape, array.shape)):
            raise UserError(f"{checkpoint.path}: {name} has shape {array.shape}, the network wants {shape}")
        parameter.set_data(mx.nd.array(array, dtype=array.dtype))


def check_finite(arrays: Dict[str, np.ndarray]) -> Optional[str]:
    """The name of an array that holds infinities or NaNs, if there is one."""
    return next((name for name, array in arrays.items() if not np.isfinite(array).all()), None)


def _below(prefix, arrays):
    return {name[len(prefix):]: array for name, array in arrays.items() if name.startswith(prefix)}
