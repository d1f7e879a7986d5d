"""Which device does what: the devices of all processes as replicas of a network, or of a pipeline of its stages.

Device number d is context d % C of rank d // C, where every process has C contexts. It holds stage d % P of replica
d // P, so that the stages of a replica are neighbours: within a process, or over neighbouring processes.

Where layers are split over T devices, a stage has T neighbours in place of one. Those in one process are taken for one
device here; those in several processes, of one device each, are a `team` of so many.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from mxtrain.errors import UserError


class Grid(NamedTuple):
    """The devices of all processes, seen from one of them."""

    contexts: int
    """Of each process."""
    processes: int = 1
    rank: int = 0
    stages: int = 1
    team: int = 1
    """Processes that a stage goes over, each of one context then."""

    @property
    def replicas(self) -> int:
        return self.contexts * self.processes // (self.stages * self.team)

    @property
    def span(self) -> int:
        """Processes that a replica goes over."""
        return max(1, self.stages * self.team // self.contexts)

    @property
    def here(self) -> range:
        """Replicas that this process has a part of."""
        return range(self.place(0)[0], self.place(self.contexts - 1)[0] + 1)

    @property
    def has_first(self) -> bool:
        """Whether this process holds the first stage of its replicas, which takes the inputs."""
        return self.place(0)[1] == 0

    @property
    def has_last(self) -> bool:
        """Whether this process holds the last stage of its replicas, which takes the labels, and is the first of those
        that do."""
        return self.place(self.contexts - 1)[1] == self.stages - 1 and self.rank % self.team == 0

    @property
    def peers(self) -> Tuple[int, ...]:
        """Ranks that hold the same stages as this one."""
        return tuple(range(self.rank % self.span, self.processes, self.span))

    @property
    def team_mates(self) -> Tuple[int, ...]:
        """Ranks that hold a stage together with this one, itself among them."""
        first = self.rank - self.rank % self.team
        return tuple(range(first, first + self.team))

    def place(self, context: int) -> Tuple[int, int]:
        """(replica, stage) of a context of this process."""
        return divmod(self._device(context) // self.team, self.stages)

    def rank_of(self, replica: int, stage: int) -> int:
        """Of a team the rank in this one's place."""
        return self._holder(replica, stage, self.rank % self.team)[0]

    def context_of(self, replica: int, stage: int) -> Optional[int]:
        """The number of the context here that holds a stage; None when it is in another process."""
        rank, context = self._holder(replica, stage, self.rank % self.team)
        return context if rank == self.rank else None

    def groups(self, pairs: Sequence[Tuple[int, int]] = ()) -> List[Tuple[int, ...]]:
        """The sets of ranks that have to do with each other when a replica goes over several processes: those with the
        same stages, neighbours in a pipeline, those with `pairs` of stages that exchange something else, and teams."""
        if self.span == 1:
            return []
        same = [tuple(range(first, self.processes, self.span)) for first in range(self.span)]
        neighbours = [(rank, rank + self.team) for rank in range(self.processes)
                      if rank % self.span + self.team < self.span]
        others = [tuple(sorted({self._holder(replica, stage, place)[0] for stage in pair}))
                  for pair in pairs for replica in range(self.replicas) for place in range(self.team)]
        teams = [tuple(range(first, first + self.team)) for first in range(0, self.processes, self.team)]
        return [group for group in dict.fromkeys([*same, *neighbours, *others, *teams]) if len(group) > 1]

    def _holder(self, replica: int, stage: int, place: int) -> Tuple[int, int]:
        """(rank, context). place: of a team."""
        return divmod((replica * self.stages + stage) * self.team + place, self.contexts)

    def _device(self, context: int) -> int:
        return self.rank * self.contexts + context


def grid(stages: int, replicas: Optional[int], contexts: int, processes: int = 1, rank: int = 0,
         tensor: int = 1) -> Grid:
    """Raises UserError for numbers that do not make up the devices. replicas: as asked for by --dp, None for any.
    tensor: devices that a stage goes over, which are as one in the grid where they are in one process."""
    devices, each = contexts * processes, stages * tensor
    there = f"there {'are' if devices > 1 else 'is'} {contexts} context{'s' * (contexts > 1)}"
    if processes > 1:
        there = f"there are {processes} processes with {contexts} context{'s' * (contexts > 1)} each, {devices} in all"
    if devices % each:
        if tensor == 1:
            raise UserError(f"--pp {stages}: {stages} stages need a multiple of {stages} contexts (--gpus or --cpus); {there}")
        raise UserError(f"--tp {tensor}: {stages} stage{'s' * (stages > 1)} of {tensor} contexts need a multiple of {each} "
                        f"(--gpus or --cpus); {there}")
    if replicas is not None and replicas * each != devices:
        of = f" on {tensor} contexts each" if tensor > 1 else ""
        raise UserError(f"--dp {replicas}: {replicas} replicas of {stages} stage{'s' * (stages > 1)}{of} need "
                        f"{replicas * each} contexts; {there}")
    if contexts % tensor and tensor % contexts:
        raise UserError(f"--tp {tensor}: a layer is split over contexts of one process, or over all contexts of several; "
                        f"{there}, so {tensor} and {contexts} must divide one another")
    local = min(contexts, tensor)
    if contexts // local % stages and stages * tensor % contexts:
        raise UserError(f"--pp {stages}: the stages of a replica are on contexts of one process, or on all contexts of "
                        f"several; {there}, so the number of stages and {contexts} must divide one another")
    return Grid(contexts // local, processes, rank, stages, tensor // local)
