"""Updates of the weights by MXNet's optimizers, done in the worker and equal on every replica."""

from __future__ import annotations

import inspect
import logging
from typing import Callable, Dict, List, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter

from mxtrain.errors import UserError
from mxtrain.optim.settings import OptimConfig

_log = logging.getLogger("mxtrain")

AGGREGATE = 45
"""Parameters per call of MXNet's fused updates; the most that all of them take."""

_CONSTANTS = ("momentum", "beta1", "beta2", "epsilon")  # settings that only some optimizers have


@mx.optimizer.register
class AdamW(mx.optimizer.Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019): a weight also loses lr * wd * weight."""

    def __init__(self, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8, **kwargs):
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.aggregate_num = AGGREGATE

    def create_state(self, index, weight):
        return mx.nd.zeros_like(weight), mx.nd.zeros_like(weight)

    def update(self, index, weight, grad, state):
        if not isinstance(index, (list, tuple)):
            index, weight, grad, state = [index], [weight], [grad], [state]
        self._update_count(index)
        lrs, wds, steps = self._get_lrs(index), self._get_wds(index), [self._index_update_count[i] for i in index]
        corrected = [lr * (1 - self.beta2**t) ** 0.5 / (1 - self.beta1**t) for lr, t in zip(lrs, steps)]
        means, variances = zip(*state)
        # The operator takes lr * (...) off the weight scaled by eta, and decays by eta * wd, without lr.
        mx.nd.contrib.multi_adamw_update(
            weight, grad, means, variances, mx.nd.full((1,), self.rescale_grad, ctx=weight[0].context),
            lrs=corrected, wds=[lr * wd for lr, wd in zip(lrs, wds)], etas=[1.0] * len(lrs), out=weight,
            beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon)


class Optimizer:
    """One optimizer with its states on every context.

    parameters: trainable, by name; the names are those of the saved states.
    held: for every context what it updates, as objects with `weight`, `gradient`, `part`, which tells the number of the
        parameter, and `of`, which takes what it is from a whole array of a parameter's shape: parallel.holdings.Held.
    """

    def __init__(self, config: OptimConfig, parameters: Dict[str, Parameter], held: Sequence[Sequence]):
        self._parameters, self._held = parameters, held
        self._weights = [[own.weight for own in of_context] for of_context in held]
        self._gradients = [[own.gradient for own in of_context] for of_context in held]
        numbered = list(parameters.values())
        self._optimizers = [create(config, [numbered[own.part.parameter] for own in of_context]) for of_context in held]
        self._states = [[optimizer.create_state_multi_precision(i, weight) for i, weight in enumerate(weights)]
                        for optimizer, weights in zip(self._optimizers, self._weights)]
        self._count = arrays_of_state(config)

    def begin(self) -> None:
        """All processes call it in front of the first update."""

    def gather(self) -> None:
        """All processes call it where they need the same weights, which these always are."""

    def update(self, update: int, lr: float, scale: float) -> None:
        """One step (number `update`, from 0) at rate lr along scale * gradient, on every context."""
        for optimizer, weights, gradients, states in zip(self._optimizers, self._weights, self._gradients,
                                                         self._states):
            indices = list(range(len(weights)))
            optimizer.lr, optimizer.rescale_grad = lr, scale
            # The count is the run's, not something that each copy keeps for itself.
            optimizer.num_update = update
            optimizer._index_update_count.update(dict.fromkeys(indices, update))
            size = max(1, optimizer.aggregate_num)
            if size == 1:
                for arguments in zip(indices, weights, gradients, states):
                    optimizer.update_multi_precision(*arguments)
                continue
            for a in range(0, len(indices), size):
                part = slice(a, a + size)
                optimizer.update_multi_precision(indices[part], weights[part], gradients[part], states[part])

    def state_arrays(self, assemble: Callable) -> Dict[str, np.ndarray]:
        """The states as plain arrays, in rank 0: "<parameter>/<number>" -> array. All processes call it.

        assemble: Layout.assemble.
        """
        whole = assemble([[_flat(state) for state in states] for states in self._states], self._count)
        return {f"{name}/{k}": array for name, arrays in zip(self._parameters, whole) for k, array in enumerate(arrays)}

    def load_state_arrays(self, arrays: Dict[str, np.ndarray]) -> None:
        """Gives every context its part of saved states. Raises UserError when they are another optimizer's."""
        expected = {f"{name}/{k}": parameter.shape for name, parameter in self._parameters.items()
                    for k in range(self._count)}
        if expected and not arrays:
            _log.warning("the checkpoint is one of dist_async, without optimizer states (momentum and the like): they "
                         "begin anew")
            return
        if expected != {key: array.shape for key, array in arrays.items()}:
            odd = sorted(set(expected) ^ set(arrays)) or ["other shapes"]
            raise UserError(f"the saved optimizer states do not fit this optimizer and network: {', '.join(odd[:3])}")
        names = list(self._parameters)
        for of_context, states in zip(self._held, self._states):
            for own, state in zip(of_context, states):
                for k, array in enumerate(_flat(state)):
                    array[:] = own.of(arrays[f"{names[own.part.parameter]}/{k}"]).reshape(array.shape)


def create(config: OptimConfig, parameters: Sequence[Parameter]) -> mx.optimizer.Optimizer:
    """MXNet's optimizer with the settings that it knows, and the multipliers of the parameter that each index means."""
    given = dict(momentum=config.momentum, beta1=config.beta1, beta2=config.beta2, epsilon=config.epsilon)
    own = {name: given[name] for name in _accepted(config.optimizer) if given[name] is not None}
    optimizer = mx.optimizer.create(config.optimizer, wd=config.weight_decay, learning_rate=config.lr, **own)
    if optimizer.aggregate_num > 1:
        optimizer.aggregate_num = AGGREGATE
    optimizer.set_lr_mult({i: p.lr_mult for i, p in enumerate(parameters)})
    optimizer.set_wd_mult({i: p.wd_mult if config.decay_all or _decays(p) else 0.0 for i, p in enumerate(parameters)})
    return optimizer


def arrays_of_state(config: OptimConfig) -> int:
    """How many arrays an optimizer keeps for each weight."""
    return len(_flat(create(config, []).create_state(0, mx.nd.zeros((1,)))))


def without_effect(config: OptimConfig) -> List[str]:
    """What is set to another value than its default and plays no part: lines for the log."""
    accepted = _accepted(config.optimizer)
    idle = {name: f"--optimizer {config.optimizer}" for name in _CONSTANTS if name not in accepted}
    for name, schedules in (("decay_factor", ["step"]), ("poly_power", ["poly"]), ("final_lr", ["poly", "cosine"])):
        if config.schedule not in schedules:
            idle[name] = f"--schedule {config.schedule}"
    defaults = OptimConfig()
    return [f"--{name.replace('_', '-')} {getattr(config, name)} has no effect with {why}" for name, why in idle.items()
            if getattr(config, name) != getattr(defaults, name)]


def _accepted(optimizer: str) -> List[str]:
    """Which of the constants an optimizer has."""
    parameters = inspect.signature(mx.optimizer.Optimizer.opt_registry[optimizer].__init__).parameters
    return [name for name in _CONSTANTS if name in parameters]


def _decays(parameter: Parameter) -> bool:
    return not parameter.name.endswith(("bias", "gamma", "beta"))


def _flat(state) -> List[mx.nd.NDArray]:
    """The arrays in a state, which MXNet gives as None, an array or nested tuples of them."""
    if state is None:
        return []
    if isinstance(state, mx.nd.NDArray):
        return [state]
    return [array for part in state for array in _flat(part)]
