"""A network as a sequence of compiled pieces that can be run, recorded and run again one by one.

The finest plan of a network is a list of segments (`mxtrain.models.plan`). Neighbouring segments are compiled
into one *chunk*; a new chunk starts at every segment that draws random numbers, because the generator is seeded
again there: so every layout draws the same masks, and a second run of a chunk repeats them. Chunks are bundled
into *groups*: backward keeps the input of each group and recomputes the rest. One group is ordinary training.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence

from mxnet.gluon import Block, HybridBlock

from mxtrain.errors import UserError
from mxtrain.models import plan


class Chunk(NamedTuple):
    """A compiled run of segments."""

    block: Block
    """Called with the chunk's inputs; the last one of training takes the labels too and returns the head's outputs."""
    segment: int
    """Index of its first segment in the finest plan."""
    draws: bool
    """Whether to seed the random generator before it."""


class Program(NamedTuple):
    """The compiled network. Chunks for each purpose are compiled apart, since a change of mode rebuilds a graph."""

    groups: List[List[Chunk]]
    """For the recorded pass; the very last chunk ends in the loss."""
    ahead: List[List[Chunk]]
    """The same groups but the last, for the pass without recording."""
    inference: Block
    """Network and evaluation head: (*inputs, label) -> the evaluation head's outputs."""
    segments: List[Block]


class _HybridChain(HybridBlock):
    """Blocks one after the other, then a head that also takes the label (the last argument)."""

    def __init__(self, blocks, head):
        super().__init__(prefix="")
        self._blocks, self._head = list(blocks), head
        for block in [*self._blocks, *([head] if head else [])]:
            self.register_child(block)

    def hybrid_forward(self, F, *inputs):
        inputs, label = (inputs[:-1], inputs[-1]) if self._head else (inputs, None)
        for block in self._blocks:
            inputs = (block(*inputs),)
        return self._head(inputs[0], label) if self._head else inputs[0]


class _Chain(Block):
    """The same for blocks that cannot be compiled."""

    def __init__(self, blocks, head):
        super().__init__(prefix="")
        self._blocks, self._head = list(blocks), head
        for block in [*self._blocks, *([head] if head else [])]:
            self.register_child(block)

    def forward(self, *inputs):
        return _HybridChain.hybrid_forward(self, None, *inputs)


def compile_chain(blocks: Sequence[Block], head: Optional[Block] = None, static: bool = False) -> Block:
    """One block that computes `blocks` one after the other and then `head` on the result and the label.

    static: keep the memory of the graph between calls. It is quicker, but the memory is held for good; MXNet 1.9.1 does
    not tell its engine that backward writes running statistics, so that who reads them may read too soon; and backward
    goes on writing to the gradient arrays of its first call when others have been marked.
    """
    if not all(isinstance(block, HybridBlock) for block in [*blocks, *([head] if head else [])]):
        return _Chain(blocks, head)
    chain = _HybridChain(blocks, head)
    chain.hybridize(static_alloc=static, static_shape=static)
    return chain


def build(net: Block, head: Block, evaluation_head: Block, recompute: str, static: bool) -> Program:
    """Compiles the network for a way to recompute ("none", "blocks" or a number of groups).

    static: see compile_chain; for the recorded pass of a single group.
    """
    segments = plan.segments(net)
    draws = [plan.draws(segment) for segment in segments]
    starts = group_starts(net, segments, recompute)
    if len(starts) == 1 and not any(draws):
        segments, draws = [net], [False]  # nothing to cut at: the network's own forward
    bounds = [*starts, len(segments)]
    groups, ahead = [], []
    for a, b in zip(bounds, bounds[1:]):
        last = b == len(segments)
        cuts = [a, *(i for i in range(a + 1, b) if draws[i]), b]
        pieces = list(zip(cuts, cuts[1:]))
        groups.append([Chunk(compile_chain(segments[i:j], head if last and j == b else None, static), i, draws[i])
                       for i, j in pieces])
        if not last:
            ahead.append([Chunk(compile_chain(segments[i:j]), i, draws[i]) for i, j in pieces])
    return Program(groups, ahead, compile_chain([net], evaluation_head), segments)


def group_starts(net: Block, segments: Sequence[Block], recompute: str) -> List[int]:
    """Index of the first segment of every group."""
    if recompute == "none":
        return [0]
    if len(segments) == 1:
        raise UserError(f"--recompute {recompute}: {type(net).__name__} offers no segments; a HybridSequential, "
                        "gluoncv's ResNets and networks with a plan() do")
    if recompute == "blocks":
        lengths = [len(block) for block in plan.blocks(net)]
        return [sum(lengths[:i]) for i in range(len(lengths))]
    number = int(recompute)
    if number > len(segments):
        raise UserError(f"--recompute {number}: the network has {len(segments)} segments")
    return [i * len(segments) // number for i in range(number)]
