"""A network as stages, one to a device, of compiled pieces that can be run, recorded and run again one by one.

The finest plan of a network is a list of segments (`mxtrain.models.plan`). Neighbouring segments are compiled
into one *chunk*; a new chunk starts at every segment that draws random numbers, because the generator is seeded
again there: so every layout draws the same masks, and a second run of a chunk repeats them. Chunks are bundled
into *groups*, which backward goes through from the last: a group is recorded in forward, or only its input is kept
then and backward runs it again. Groups are bundled into *stages*. One stage of one group is ordinary training.
"""

from __future__ import annotations

from typing import Callable, List, NamedTuple, Optional, Sequence

from mxnet.gluon import Block, HybridBlock, Parameter, nn

from mxtrain.errors import UserError
from mxtrain.models import plan
from mxtrain.parallel.statistics import moving_layers


class Chunk(NamedTuple):
    """A compiled run of segments."""

    block: Block
    """Called with the chunk's inputs; the last one of training takes the labels too and returns the head's outputs."""
    segment: int
    """Index of its first segment in the finest plan."""
    draws: bool
    """Whether to seed the random generator before it."""


class Group(NamedTuple):
    """What is recorded in one go. Chunks are compiled for each purpose, since a change of mode rebuilds a graph."""

    recorded: List[Chunk]
    """The very last chunk of all ends in the loss."""
    ahead: Optional[List[Chunk]]
    """For the pass without recording, when backward runs the group again; None for a group recorded in forward. Nothing
    in the last group of all, whose output nobody waits for."""


class Stage(NamedTuple):
    """What one device runs."""

    groups: List[Group]
    inference: List[Block]
    """One after the other, or one for each group: (*inputs) -> what the next stage takes; the last one takes a label
    too, and returns the evaluation head's outputs."""


class Program(NamedTuple):
    """The compiled network."""

    stages: List[Stage]
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


def build(net: Block, head: Block, evaluation_head: Block, segments: Sequence[Block], stages: Sequence[int],
          groups: Sequence[int], recompute: bool, static: bool, by_groups: bool = False) -> Program:
    """Compiles the network.

    segments: its finest plan. stages, groups: the index of the first segment of each; a stage begins a group, too.
    recompute: whether backward runs groups again. static: see compile_chain; for the recorded pass of a single group.
    by_groups: compile the groups apart for inference, too.
    """
    draws = [plan.draws(segment) for segment in segments]
    groups = sorted({*stages, *groups})
    if len(groups) == 1 and not any(draws):
        segments, draws = [net], [False]  # nothing to cut at: the network's own forward
    end = len(segments)

    def chunks(a: int, b: int, of_loss: Optional[Block], static: bool = False) -> List[Chunk]:
        cuts = [a, *(i for i in range(a + 1, b) if draws[i]), b]
        return [Chunk(compile_chain(segments[i:j], of_loss if j == end else None, static), i, draws[i])
                for i, j in zip(cuts, cuts[1:])]

    def group(a: int, b: int) -> Group:
        ahead = None if not recompute else [] if b == end else chunks(a, b, None)
        return Group(chunks(a, b, head, static), ahead)

    def stage(a: int, b: int) -> Stage:
        bounds = [*(start for start in groups if a <= start < b), b]
        pairs = list(zip(bounds, bounds[1:]))
        inference = [compile_chain([net] if (i, j) == (0, end) else segments[i:j], evaluation_head if j == end else None)
                     for i, j in (pairs if by_groups else [(a, b)])]
        return Stage([group(i, j) for i, j in pairs], inference)

    return Program([stage(a, b) for a, b in zip(stages, [*stages[1:], end])], list(segments))


def group_starts(net: Block, segments: Sequence[Block], recompute: str, zero: int = 0) -> List[int]:
    """Index of the first segment of every group that --recompute asks for; without it, of the blocks whose gradients, or
    weights, --zero 2 and 3 deal with one by one."""
    if recompute == "none":
        return _block_starts(net) if zero > 1 else [0]
    if len(segments) == 1:
        raise UserError(f"--recompute {recompute}: {type(net).__name__} offers no segments; a HybridSequential, "
                        "gluoncv's ResNets and networks with a plan() do")
    if recompute == "blocks":
        return _block_starts(net)
    number = int(recompute)
    if number > len(segments):
        raise UserError(f"--recompute {number}: the network has {len(segments)} segments")
    return [i * len(segments) // number for i in range(number)]


def _block_starts(net: Block) -> List[int]:
    """Index of the first segment of each of the network's own blocks."""
    lengths = [len(block) for block in plan.blocks(net)]
    return [sum(lengths[:i]) for i in range(len(lengths))]


class Modes(NamedTuple):
    """How the passes of a shard are run."""

    one_pass: bool
    """Whether all of the network is recorded in one go."""
    own_statistics: bool
    """Whether MXNet's own running statistics are right as they are: with a single shard, where it is run."""
    static: bool
    """Whether the graph's memory is kept between passes: see compile_chain."""


def modes(net: Block, groups: int, recompute: str, zero: int, exact: bool, shards: int, replicas: int) -> Modes:
    """groups: how many there are, in all stages. shards, replicas: how many, over all processes."""
    one_pass = recompute == "none" and groups == 1
    own_statistics = not exact and shards == replicas == 1 and one_pass
    return Modes(one_pass, own_statistics,
                 not exact and one_pass and zero < 2 and (own_statistics or not moving_layers(net)))


def trained_by(program: Program) -> List[List[List[Parameter]]]:
    """The parameters that get a gradient: of every stage, by groups, each in the first that has it."""
    return _each_once(program, lambda block: [p for p in block.collect_params().values() if p.grad_req != "null"])


def moving_by(program: Program) -> List[List[List[nn.BatchNorm]]]:
    """The layers with running statistics, likewise."""
    return _each_once(program, moving_layers)


def is_compiled(stage: Stage) -> bool:
    """Whether all of a stage is a graph; Python may do one thing now and another then."""
    return all(isinstance(chunk.block, HybridBlock) for group in stage.groups for chunk in group.recorded)


def _each_once(program: Program, of: Callable[[Block], list]) -> List[List[list]]:
    seen, found = set(), []
    for stage in program.stages:
        found.append([])
        for group in stage.groups:
            items = {id(item): item for chunk in group.recorded for item in of(chunk.block)}
            found[-1].append([item for key, item in items.items() if key not in seen])
            seen.update(items)
    return found
