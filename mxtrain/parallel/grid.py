"""Which device does what: the devices of all processes as replicas of a network, or of a pipeline of its stages.

Device number d is context d % C of rank d // C, where every process has C contexts. It holds stage d % P of replica
d // P, so that the stages of a replica are neighbours: within a process, or over neighbouring processes.
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

    @property
    def replicas(self) -> int:
        return self.contexts * self.processes // self.stages

    @property
    def span(self) -> int:
        """Processes that a replica goes over."""
        return max(1, self.stages // self.contexts)

    @property
    def here(self) -> range:
        """Replicas that this process has a part of."""
        return range(self._device(0) // self.stages, self._device(self.contexts - 1) // self.stages + 1)

    @property
    def has_first(self) -> bool:
        """Whether this process holds the first stage of its replicas, which takes the inputs."""
        return self.place(0)[1] == 0

    @property
    def has_last(self) -> bool:
        """Whether this process holds the last stage of its replicas, which takes the labels."""
        return self.place(self.contexts - 1)[1] == self.stages - 1

    @property
    def peers(self) -> Tuple[int, ...]:
        """Ranks that hold the same stages as this one."""
        return tuple(range(self.rank % self.span, self.processes, self.span))

    def place(self, context: int) -> Tuple[int, int]:
        """(replica, stage) of a context of this process."""
        return divmod(self._device(context), self.stages)

    def rank_of(self, replica: int, stage: int) -> int:
        return (replica * self.stages + stage) // self.contexts

    def context_of(self, replica: int, stage: int) -> Optional[int]:
        """The number of the context here that holds a stage; None when it is in another process."""
        rank, context = divmod(replica * self.stages + stage, self.contexts)
        return context if rank == self.rank else None

    def groups(self, pairs: Sequence[Tuple[int, int]] = ()) -> List[Tuple[int, ...]]:
        """The sets of ranks that have to do with each other when a replica goes over several processes: those with the
        same stages, neighbours in a pipeline, and those with `pairs` of stages that exchange something else."""
        if self.span == 1:
            return []
        same = [tuple(range(first, self.processes, self.span)) for first in range(self.span)]
        neighbours = [(rank, rank + 1) for rank in range(self.processes - 1) if (rank + 1) % self.span]
        others = [tuple(sorted({self.rank_of(replica, stage) for stage in pair}))
                  for pair in pairs for replica in range(self.replicas)]
        return [group for group in dict.fromkeys([*same, *neighbours, *others]) if len(group) > 1]

    def _device(self, context: int) -> int:
        return self.rank * self.contexts + context


def grid(stages: int, replicas: Optional[int], contexts: int, processes: int = 1, rank: int = 0) -> Grid:
    """Raises UserError for numbers that do not make up the devices. replicas: as asked for by --dp, None for any."""
    devices = contexts * processes
    there = f"there {'are' if devices > 1 else 'is'} {contexts} context{'s' * (contexts > 1)}"
    if processes > 1:
        there = f"there are {processes} processes with {contexts} context{'s' * (contexts > 1)} each, {devices} in all"
    if devices % stages:
        raise UserError(f"--pp {stages}: {stages} stages need a multiple of {stages} contexts (--gpus or --cpus); {there}")
    if replicas is not None and replicas * stages != devices:
        raise UserError(f"--dp {replicas}: {replicas} replicas of {stages} stage{'s' * (stages > 1)} need "
                        f"{replicas * stages} contexts; {there}")
    if contexts % stages and stages % contexts:
        raise UserError(f"--pp {stages}: the stages of a replica are on contexts of one process, or on all contexts of "
                        f"several; {there}, so the number of stages and {contexts} must divide one another")
    return Grid(contexts, processes, rank, stages)
