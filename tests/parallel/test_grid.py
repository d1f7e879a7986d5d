import pytest

from mxtrain.errors import UserError
from mxtrain.parallel.grid import Grid, grid


def grids(contexts, processes, stages):
    return [grid(stages, None, contexts, processes, rank) for rank in range(processes)]


CASES = [(1, 1, 1), (4, 1, 1), (4, 1, 2), (4, 1, 4), (2, 3, 1), (2, 2, 2), (2, 2, 4), (1, 4, 2), (1, 4, 4), (2, 4, 4)]


@pytest.mark.parametrize("contexts, processes, stages", CASES)
def test_every_stage_of_every_replica_is_on_one_device(contexts, processes, stages):
    found = {}
    for of in grids(contexts, processes, stages):
        for context in range(contexts):
            found[of.place(context)] = of.rank, context
        assert sorted({of.place(context)[0] for context in range(contexts)}) == list(of.here)
    replicas = contexts * processes // stages
    assert sorted(found) == [(r, s) for r in range(replicas) for s in range(stages)]
    for of in grids(contexts, processes, stages):
        assert of.replicas == replicas
        for (replica, stage), (rank, context) in found.items():
            assert of.rank_of(replica, stage) == rank
            assert of.context_of(replica, stage) == (context if rank == of.rank else None)


@pytest.mark.parametrize("contexts, processes, stages", CASES)
def test_peers_have_the_same_stages(contexts, processes, stages):
    held = [{of.place(context)[1] for context in range(contexts)} for of in grids(contexts, processes, stages)]
    for of in grids(contexts, processes, stages):
        assert of.peers == tuple(rank for rank in range(processes) if held[rank] == held[of.rank])
        assert of.has_first == (0 in held[of.rank])
        assert of.has_last == (stages - 1 in held[of.rank])


def test_groups_of_processes():
    assert grid(2, None, 2, 3).groups() == []  # pipelines within processes need no other group than all
    assert grid(2, None, 1, 2).groups() == [(0, 1)]
    assert grid(3, None, 1, 3).groups() == [(0, 1), (1, 2)]
    assert grid(3, None, 1, 6).groups([(0, 2), (1, 1)]) == [
        (0, 3), (1, 4), (2, 5), (0, 1), (1, 2), (3, 4), (4, 5), (0, 2), (3, 5)]
    assert grid(4, None, 2, 2).groups([(0, 1), (0, 3)]) == [(0, 1)], "stages 0 and 1 are in one process"
    assert grid(2, None, 1, 4).groups() == [(0, 2), (1, 3), (0, 1), (2, 3)]
    assert grid(4, None, 2, 4).groups() == [(0, 2), (1, 3), (0, 1), (2, 3)]
    assert len({tuple(of.groups()) for of in grids(1, 4, 2)}) == 1, "all processes name the same groups"


TEAMS = [(1, 2, 1, 2), (1, 4, 1, 2), (1, 4, 2, 2), (2, 4, 2, 4), (1, 8, 2, 2), (2, 2, 1, 4)]


@pytest.mark.parametrize("contexts, processes, stages, tensor", TEAMS)
def test_a_stage_of_a_team_of_processes(contexts, processes, stages, tensor):
    """Its devices are neighbours, and each hears from the one in its own place."""
    found = [grid(stages, None, contexts, processes, rank, tensor) for rank in range(processes)]
    for rank, of in enumerate(found):
        device = rank * contexts
        assert (of.contexts, of.team) == (1, tensor // contexts)
        assert of.place(0) == (device // tensor // stages, device // tensor % stages)
        assert of.replicas == contexts * processes // stages // tensor
        assert rank in of.team_mates and all(found[mate].place(0) == of.place(0) for mate in of.team_mates)
        assert len(of.team_mates) == of.team
        place = rank % of.team
        assert of.peers == tuple(other for other in range(processes) if found[other].place(0)[1] == of.place(0)[1]
                                 and other % of.team == place)
        for replica in range(of.replicas):
            for stage in range(stages):
                other = of.rank_of(replica, stage)
                assert found[other].place(0) == (replica, stage) and other % of.team == place
                assert of.context_of(replica, stage) == (0 if other == rank else None)
        groups = of.groups()
        assert groups == found[0].groups() and all(len(set(group)) == len(group) > 1 for group in groups)
        assert of.team_mates in groups and (len(of.peers) == 1 or of.peers in groups)
        if of.place(0)[1] < stages - 1:
            assert (rank, of.rank_of(of.place(0)[0], of.place(0)[1] + 1)) in groups
    assert sum(of.has_last for of in found) == found[0].replicas, "what comes out is counted once"


def test_a_team_of_one_process_is_one_device():
    assert grid(2, None, 8, 1, 0, 2) == Grid(4, 1, 0, 2)
    assert grid(2, None, 4, 2, 1, 2) == Grid(2, 2, 1, 2)


def test_one_process_is_the_plain_case():
    assert Grid(3).here == range(3) and Grid(3).replicas == 3 and Grid(3).span == 1


@pytest.mark.parametrize("arguments, words", [
    ((2, None, 3), "--pp 2: 2 stages need a multiple of 2 contexts (--gpus or --cpus); there are 3 contexts"),
    ((2, None, 1), "--pp 2: 2 stages need a multiple of 2 contexts (--gpus or --cpus); there is 1 context"),
    ((2, 4, 4), "--dp 4: 4 replicas of 2 stages need 8 contexts; there are 4 contexts"),
    ((1, 3, 2, 2), "--dp 3: 3 replicas of 1 stage need 3 contexts; there are 2 processes with 2 contexts each, 4 in"),
    ((1, None, 3, 1, 0, 2), "--tp 2: 1 stage of 2 contexts need a multiple of 2 (--gpus or --cpus); there are 3 contexts"),
    ((2, 2, 4, 1, 0, 2), "--dp 2: 2 replicas of 2 stages on 2 contexts each need 8 contexts; there are 4 contexts"),
    ((1, None, 6, 2, 0, 4), "--tp 4: a layer is split over contexts of one process, or over all contexts of several"),
    ((4, None, 6, 2), "--pp 4: the stages of a replica are on contexts of one process, or on all contexts of several"),
])
def test_refused(arguments, words):
    with pytest.raises(UserError) as error:
        grid(*arguments)
    assert str(error.value).startswith(words)
