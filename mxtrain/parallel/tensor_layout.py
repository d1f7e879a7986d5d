"""The layout of a network whose layers are split: see parallel.tensor for how a team of contexts runs a stage of it.

Each rank of a stage's team has parameters of its own, which are slices. To those who keep books of them, every rank
is a stage of its own: stage number * size + rank, on the device of that place in a replica.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, HybridBlock, Parameter

from mxtrain.errors import UserError
from mxtrain.models import plan
from mxtrain.models.split import Cut, joined
from mxtrain.parallel.communicator import ALONE, Communicator
from mxtrain.parallel.gradients import FloatGradients
from mxtrain.parallel.grid import Grid
from mxtrain.parallel.holdings import Held, Holdings
from mxtrain.parallel.layout import Arrays, Layout
from mxtrain.parallel.passing import Boundary, Passing, boundaries
from mxtrain.parallel.program import group_starts
from mxtrain.parallel.stage import backward_by
from mxtrain.parallel.tensor import Piece, Team, TeamRunner, split
from mxtrain.parallel.words import in_words


class SlicedHoldings(Holdings):
    """Holdings of slices, which takes and gives whole parameters.

    slices: of each of the network's parameters, which are on the host, (slice, its cut) of every rank that has one.
    The others: see Holdings.
    """

    def __init__(self, slices: Dict[Parameter, List[Tuple[Parameter, Optional[Cut]]]], stages: List[List[Parameter]],
                 grid: Grid, contexts: Sequence[mx.Context], communicator: Communicator, peers: Communicator,
                 ties: Sequence[Tuple[Parameter, Parameter]]):
        # Of parameters that all ranks have, those of the first one count, and of tied weights one place.
        copies = [(own[0][0], other) for own in slices.values() if own[0][1] is None for other, _ in own[1:]]
        super().__init__([[stage] for stage in stages], stages, grid, contexts, communicator, peers, 0, False,
                         [*ties, *copies])
        self.wholes, self._slices, self._filled = list(slices), slices, False
        numbers = {own: number for number, own in enumerate(self.parameters)}
        self._places = [[numbers[own] for own, _ in slices[whole]] for whole in self.wholes]
        self._whole_of = {own: (number, cut) for number, whole in enumerate(self.wholes) for own, cut in slices[whole]}

    def of_whole(self, held: Held) -> Held:
        """What is held of a slice, as of the whole parameter."""
        number, cut = self._whole_of[self.parameters[held.part.parameter]]
        return Held(held.part._replace(parameter=number), held.weight, held.gradient, cut)

    def assemble(self, arrays: Sequence[Sequence[Arrays]], count: int) -> List[List[np.ndarray]]:
        found = super().assemble(arrays, count)
        if not found:  # not in rank 0
            return []
        return [[self._joined(whole, [found[place][k] for place in places]) for k in range(count)]
                for whole, places in zip(self.wholes, self._places)]

    def weight(self, parameter: Parameter) -> np.ndarray:
        return self._joined(parameter, [super(SlicedHoldings, self).weight(own) for own, _ in self._slices[parameter]])

    def forget_others(self) -> None:
        """Fills the slices from the whole parameters, and gives these up."""
        for whole, slices in self._slices.items():
            values = whole.data().asnumpy()
            for own, cut in slices:
                if self._contexts_of(self._stage_of[id(own)]):
                    own.set_data(mx.nd.array(cut.of(values) if cut else values))
            whole._data = whole._grad = None
        self._filled = True
        super().forget_others()

    def bring_home(self) -> None:
        for whole in self.wholes:
            if self._filled:
                values = self.weight(whole)
                whole.initialize("zeros", self._contexts, force_reinit=True)
                whole.set_data(mx.nd.array(values))
            else:
                whole.reset_ctx(self._contexts)

    def _joined(self, whole: Parameter, values: List[np.ndarray]) -> np.ndarray:
        cut = self._slices[whole][0][1]
        return joined(values, cut) if cut else values[0]


class TensorLayout(Layout):
    """See Layout, whose parameters these are.

    net: initialized, its shapes known, on the context of `sample`, on the host. tensor: contexts of a team.
    Raises UserError for a network that cannot be split over so many.
    """

    def __init__(self, net: Block, head: Block, evaluation_head: Block, contexts: Sequence[mx.Context], shards: int,
                 tensor: int, recompute: str = "none", seed: int = 0, preprocess: Optional[Block] = None,
                 sample: Sequence[mx.nd.NDArray] = (), communicator: Communicator = ALONE, stages: Sequence[int] = (0,),
                 schedule: str = "1f1b"):
        local = min(tensor, len(contexts))  # ranks of a team in one process
        grid = Grid(len(contexts) // local, communicator.size, communicator.rank, len(stages), tensor // local)
        self._begin(grid, contexts[::local], shards, False, seed, preprocess, communicator, schedule)
        self._places = Grid(len(contexts), communicator.size, communicator.rank, len(stages) * tensor)
        segments = plan.segments(net)
        if len(segments) > 1:
            plan.check(net, segments, *sample)
        groups = sorted({*stages, *group_starts(net, segments, recompute)})
        cut = split(net, segments, head, evaluation_head, tensor, groups)
        pieces = cut.of_stages(stages)
        self._passing = Passing(grid, self.contexts, communicator, boundaries(segments, stages, sample))
        self._backward = backward_by([[_parameters(piece) for piece in own] for own in pieces], False)

        slices = {whole: [] for whole in net.collect_params().values()}
        for origins in cut.origins:
            for own, (whole, part) in origins.items():
                slices[whole].append((own, part))
        of_ranks = [[parameter for piece in own for parameter in _parameters(piece, rank)]
                    for own in pieces for rank in range(tensor)]
        ties = [(one, other) for pair in plan.tied(net)
                for (one, _), (other, _) in zip(*(slices[whole] for whole in pair))]
        self._holdings = SlicedHoldings(slices, of_ranks, self._places, contexts, communicator, self._peers, ties)
        self.parameters = self._holdings.wholes
        numbers = {own: number for number, own in enumerate(self._holdings.parameters)}
        self._ties = [(numbers[one], numbers[other]) for one, other in ties]
        self._everywhere, self._tying = list(contexts), Passing(self._places, contexts, communicator, [])

        shared = {own for own_slices in slices.values() if len(own_slices) > 1 and own_slices[0][1] is None
                  for own, _ in own_slices}
        mates = communicator.among(grid.team_mates) if grid.team > 1 else ALONE
        outputs = _outputs(segments, sample) if grid.team > 1 else []
        may_leave_out = not all(isinstance(segment, HybridBlock) for segment in segments)
        self._of_contexts: List[FloatGradients] = []
        self._runners = []
        for c in range(grid.contexts):
            stage = grid.place(c)[1]
            team, own = Team(contexts[c * local:(c + 1) * local], mates), pieces[stage]
            kept = [of_ranks[stage * tensor + rank] for rank in team.ranks]
            gradients = [FloatGradients(parameters, ctx, shards > grid.replicas, may_leave_out)
                         for parameters, ctx in zip(kept, team.contexts)]
            self._of_contexts += gradients
            summed = zip(*([array for parameter, array in zip(parameters, of_rank.arrays) if parameter in shared]
                           for parameters, of_rank in zip(kept, gradients)))
            bounds = [i for i, piece in enumerate(own) if piece.segment in groups
                      and (i == 0 or own[i - 1].segment < piece.segment)]
            self._runners.append(TeamRunner(
                own, bounds, recompute != "none", outputs, stage == grid.stages - 1, team, gradients, list(summed),
                self._backward[stage], grid.contexts == 1))
        self._own = [self._held(c) for c in range(len(contexts))]
        self.held = [[self._holdings.of_whole(held) for held in own] for own in self._own]
        self.sums = self._sums()
        self.words = f"layers split over {tensor} contexts"
        stages_in_words = in_words(grid, self.contexts, stages, len(segments), shards, schedule)
        if stages_in_words:
            self.words = f"{stages_in_words}; {self.words}"

    def add_up(self) -> None:
        self._peers.allreduce(self.sums)
        for one, other in self._ties:
            self._tie(one, other)

    def gradient_norm(self) -> float:
        return self._holdings.norm(self._own)

    def _held(self, c: int) -> List[Held]:
        ctx, gradients = self._everywhere[c], self._of_contexts[c].arrays
        return [Held(part, self._holdings.parameters[part.parameter].data(ctx), gradient)
                for part, gradient in zip(self._holdings.parts_on(c), gradients)]

    def _sums(self) -> List[Arrays]:
        by_place: Dict[int, List[Arrays]] = {}
        for c, gradients in enumerate(self._of_contexts):
            by_place.setdefault(self._places.place(c)[1], []).append(gradients.parts)
        return [list(copies) for own in by_place.values() for copies in zip(*own)]

    def _tie(self, one: int, other: int) -> None:
        places = self._holdings.stage_of(one), self._holdings.stage_of(other)
        for replica in self._places.here:
            contexts = [self._places.context_of(replica, place) for place in places]
            if any(c is not None for c in contexts):
                self._tying.add_from_each_other(replica, places, [
                    [] if c is None else self._of_contexts[c].parts_of(self._holdings.place_in_stage(number))
                    for c, number in zip(contexts, (one, other))])


def _parameters(piece: Piece, rank: Optional[int] = None) -> List[Parameter]:
    """Of a piece: a rank's, or all ranks'."""
    ranks = piece.recorded if rank is None else piece.recorded[rank:rank + 1]
    return [parameter for chunks in ranks for chunk in chunks for parameter in chunk.block.collect_params().values()]


def _outputs(segments: Sequence[Block], sample: Sequence[mx.nd.NDArray]) -> List[Boundary]:
    """What comes out of each segment."""
    found, x = [], list(sample)
    for segment in segments:
        with mx.autograd.predict_mode():
            x = [segment(*x)]
        if not isinstance(x[0], mx.nd.NDArray) or len(x[0]) % len(sample[0]):
            raise UserError(f"--tp: {type(segment).__name__} does not give one array with as many rows for each sample")
        found.append(Boundary(len(x[0]) // len(sample[0]), x[0].shape[1:], x[0].dtype))
    return found
