"""How a network is split inside its layers, over `size` ranks that each hold a slice of a weight (Shoeybi et al. 2019).

A segment of a network's plan that can be split offers `split_layers(slices)`, which returns a list of *pieces*, blocks to be
run one after the other: each takes the sum, over the ranks, of what the piece before gave, and gives its rank's part
of such a sum. The last segment may offer `split_scores(slices)` instead: a block that gives its rank's share of the
scores along the last axis, and how many these are. A segment that offers neither is run by the first rank alone.
"""

from __future__ import annotations

import copy
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, HybridBlock, Parameter, ParameterDict, nn

from mxtrain.errors import UserError


class Cut(NamedTuple):
    """Which slice of a parameter a rank holds."""

    axis: int
    rank: int
    size: int
    runs: int = 1
    """The axis is so many runs of one length, and of each a slice is held: such as of query, key and value."""

    def of(self, whole: np.ndarray) -> np.ndarray:
        runs = np.split(whole, self.runs, self.axis)
        return np.concatenate([np.split(run, self.size, self.axis)[self.rank] for run in runs], self.axis)


def joined(slices: Sequence[np.ndarray], cut: Cut) -> np.ndarray:
    """The parameter of which these are the slices of all ranks. cut: one of theirs."""
    runs = [np.split(own, cut.runs, cut.axis) for own in slices]
    return np.concatenate([own[number] for number in range(cut.runs) for own in runs], cut.axis)


class Origin(NamedTuple):
    """What a rank's parameter is a slice of."""

    whole: Parameter
    cut: Optional[Cut]
    """None: it is all of it."""


class Slices:
    """Makes the layers of one rank from whole ones, and keeps in mind which parameter comes from which.

    The layers' values are zeros: who made them fills them later.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.origins: Dict[Parameter, Origin] = {}

    @property
    def first(self) -> bool:
        """Whether this rank adds what must be in a sum once, such as a bias."""
        return self.rank == 0

    def share(self, number: int, what: str) -> int:
        """A number divided by the ranks. Raises UserError, which names `what`, where that leaves a rest."""
        if number % self.size:
            raise UserError(f"--tp {self.size}: {what} cannot be split evenly; a multiple of {self.size} can")
        return number // self.size

    def column(self, dense: nn.Dense, runs: int = 1) -> nn.Dense:
        """A slice of a layer's outputs. runs: see Cut."""
        units = runs * self.share(dense._units // runs, f"the {dense._units // runs} outputs of {dense.name}")
        return self._dense(dense, units, dense.weight.shape[1], dense.bias is not None, 0, runs)

    def row(self, dense: nn.Dense) -> nn.Dense:
        """What a slice of a layer's inputs gives, to be added up over the ranks. The layer must have no activation."""
        inputs = self.share(dense.weight.shape[1], f"the {dense.weight.shape[1]} inputs of {dense.name}")
        if dense.act is not None:
            raise UserError(f"--tp {self.size}: the outputs of {dense.name} are sums over its slices, which its activation "
                            "does not see; give the activation a layer of its own, outside")
        return self._dense(dense, dense._units, inputs, dense.bias is not None and self.first, 1)

    def whole(self, block: Block) -> Block:
        """A copy for this rank; its gradient is the sum of those of all ranks."""
        block.apply(_forget_graph)
        scopes: Dict[int, Any] = {}  # which know the blocks around this one, and serve to name new children only
        block.apply(lambda part: scopes.update({id(part._scope): part._scope}))
        copied = copy.deepcopy(block, scopes)
        for own, whole in zip(copied.collect_params().values(), block.collect_params().values()):
            own.initialize(mx.init.Zero(), ctx=mx.cpu(), force_reinit=True)  # what is copied has no gradient
            self.origins[own] = Origin(whole, None)
        return copied

    def parameter(self, of: ParameterDict, name: str, whole: Parameter, axis: Optional[int] = None) -> Parameter:
        """A slice of a parameter along an axis, or all of it, among those of a block."""
        return self._own(of.get(name, shape=_sliced(whole.shape, axis, self.size)), whole, axis)

    def _dense(self, dense: nn.Dense, units: int, inputs: int, bias: bool, axis: int, runs: int = 1) -> nn.Dense:
        own = nn.Dense(units, None, bias, dense._flatten, in_units=inputs, prefix=dense.prefix)
        if dense.act is not None:
            own.act = nn.Activation(dense.act._act_type)
        self._own(own.weight, dense.weight, axis, runs)
        if bias:
            self._own(own.bias, dense.bias, 0 if axis == 0 else None, runs)
        return own

    def _own(self, own: Parameter, whole: Parameter, axis: Optional[int], runs: int = 1) -> Parameter:
        own.lr_mult, own.wd_mult, own.grad_req = whole.lr_mult, whole.wd_mult, whole.grad_req
        own.initialize(mx.init.Zero(), ctx=mx.cpu())
        self.origins[own] = Origin(whole, None if axis is None else Cut(axis, self.rank, self.size, runs))
        return own


class TwoLayers(HybridBlock):
    """Two Dense layers with an activation in between, x: (..., inputs) -> (..., units). Tensor parallelism splits the
    first by its outputs and the second by its inputs.

    activation: as of nn.Activation. The others: see nn.Dense; the layers are along the last axis.
    """

    def __init__(self, hidden: int, units: int, activation: str = "relu", in_units: int = 0, use_bias: bool = True,
                 prefix: Optional[str] = None):
        super().__init__(prefix=prefix)
        with self.name_scope():
            self.hidden = nn.Dense(hidden, activation, use_bias, flatten=False, in_units=in_units, prefix="hidden_")
            self.out = nn.Dense(units, None, use_bias, flatten=False, in_units=hidden, prefix="out_")

    def hybrid_forward(self, F: Any, x):
        return self.out(self.hidden(x))

    def split_layers(self, slices: Slices) -> List[HybridBlock]:
        return [chained(slices.column(self.hidden), slices.row(self.out))]


def chained(*blocks: HybridBlock) -> HybridBlock:
    """Blocks one after the other."""
    chain = nn.HybridSequential(prefix="")
    chain.add(*blocks)
    return chain


def _forget_graph(block: Block) -> None:
    """It cannot be copied, and is made again at need."""
    if isinstance(block, HybridBlock):
        block._clear_cached_op()


def _sliced(shape: Sequence[int], axis: Optional[int], size: int) -> tuple:
    return tuple(n // size if i == axis else n for i, n in enumerate(shape))
