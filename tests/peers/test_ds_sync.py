"""DS-Sync: groups that are shuffled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import ConfigError
from paceline.protocols.peer.ds_sync import DSSync
from support.peers import Crew
from support.problems import SIZE, MakeOptimizer, large_batch, momentum, noisy, nothing, sgd

close = torch.testing.assert_close
seeds = st.integers(0, 99)
GIVEN = "0,1|2,3;0,3|1,2"
FITTING = [
    ({"pattern": "grid"}, 4),
    ({"pattern": "grid"}, 6),
    ({"pattern": "grid", "group_size": 2}, 8),
    ({"pattern": "grid"}, 2),
    ({"pattern": "grid"}, 1),
    ({"pattern": "hypergrid"}, 8),
    ({"pattern": "hypergrid", "group_size": 3}, 9),
    ({"pattern": "random", "group_size": 2}, 5),
    ({"pattern": "random"}, 7),
    ({"pattern": "given", "groups": GIVEN}, 4),
    ({"pattern": "topology", "hosts": "0,1,2|3,4,5"}, 6),
    ({"pattern": "topology", "hosts": "0,3@0.2|1,2,4@0.5|5"}, 6),
]
fitting = pytest.mark.parametrize(("settings", "workers"), FITTING)


def scattered(rank: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@fitting
@given(step=st.integers(0, 30), seed=seeds)
def test_every_grouping_is_a_partition(settings: Any, workers: int, step: int, seed: int) -> None:
    grouping = DSSync(**settings).grouping(workers, step, seed)
    assert sorted(rank for group in grouping for rank in group) == list(range(workers))


@pytest.mark.parametrize(
    ("settings", "workers", "steps"),
    [
        ({"pattern": "grid"}, 4, 2),
        ({"pattern": "grid"}, 16, 2),
        ({"pattern": "grid", "group_size": 2}, 6, 2),
        ({"pattern": "hypergrid"}, 8, 3),
        ({"pattern": "hypergrid", "group_size": 3}, 9, 2),
        ({"pattern": "given", "groups": GIVEN}, 4, 2),
        ({"pattern": "topology", "hosts": "0,2@4|1,3@4"}, 4, 2),
        ({"pattern": "topology", "hosts": "0|1|2"}, 3, 1),
    ],
)
def test_one_cycle_gives_everybody_the_exact_mean_and_no_less(
    settings: Any, workers: int, steps: int
) -> None:
    protocol = DSSync(**settings)
    assert len(protocol.cycle(workers)) == steps
    crew = Crew(protocol, workers, nothing, initial=scattered)
    mean = crew.mean()
    crew.run(steps - 1)
    assert not all(torch.allclose(x, mean) for x in crew.parameters())
    crew.run(1)
    for x in crew.parameters():
        close(x, mean)


@fitting
@given(seed=seeds)
def test_members_of_a_group_are_equal_and_the_mean_of_all_is_left_alone(
    settings: Any, workers: int, seed: int
) -> None:
    protocol = DSSync(**settings)
    crew = Crew(protocol, workers, noisy(seed), seed=seed, buffers=lambda rank: torch.tensor([1.0 * rank]))
    for step in range(4):
        before = crew.parameters()
        stepped = [x - 0.1 * noisy(seed)(rank, step, x) for rank, x in enumerate(before)]
        apart = sum(float((x - sum(stepped) / workers).square().sum()) for x in stepped)
        crew.run(1)
        after = crew.parameters()
        close(crew.mean(), sum(stepped) / workers)
        for group in protocol.grouping(workers, step, seed):
            first = group[0]
            assert all(torch.equal(after[rank], after[first]) for rank in group)
            buffers = [crew.workers[rank].buffers[0] for rank in group]
            assert all(torch.equal(b, buffers[0]) for b in buffers)
        assert sum(float((x - crew.mean()).square().sum()) for x in after) <= apart + 1e-12


@pytest.mark.parametrize("optimizer", [sgd, momentum])
@given(workers=st.integers(1, 5), seed=seeds)
def test_one_group_of_all_is_bsp(optimizer: MakeOptimizer, workers: int, seed: int) -> None:
    protocol = DSSync(pattern="grid", group_size=workers)
    crew = Crew(protocol, workers, noisy(seed), seed=seed, optimizer=optimizer).run(6)
    close(crew.parameters()[0], large_batch(workers, 6, noisy(seed), optimizer))


@fitting
def test_with_the_same_data_for_all_it_is_one_worker_alone(settings: Any, workers: int) -> None:
    def same(rank: int, iteration: int, x: Tensor) -> Tensor:
        return noisy(0)(0, iteration, x)

    crew = Crew(DSSync(**settings), workers, same, optimizer=momentum).run(6)
    close(crew.parameters()[-1], large_batch(1, 6, same, momentum))


def test_random_groups_contract_in_the_mean_as_computed() -> None:
    workers, size, draws = 16, 4, 4000
    protocol, mean = DSSync(pattern="random", group_size=size), np.zeros((workers, workers))
    for step in range(draws):
        for group in protocol.grouping(workers, step, 0):
            mean[np.ix_(group, group)] += 1 / len(group) / draws
    assert sorted(np.linalg.eigvalsh(mean))[-2] == pytest.approx(3 / 15, abs=0.02)


def test_nobody_waits_for_another_group_nor_gets_further_ahead_than_a_cycle() -> None:
    crew = Crew(DSSync(pattern="grid"), 4, noisy(0))
    for worker in crew.workers:
        worker.goal = 9
    late = 3  # never takes a turn
    while ready := [w for w in crew.workers if w.runnable and w.me.rank != late]:
        ready[0].turn()
    assert [worker.me.count for worker in crew.workers] == [
        1,
        1,
        0,
        0,
    ]  # 0 and 1 share a row, then wait for 2, 3
    assert max(w.me.count for w in crew.workers) <= 2


def test_groups_go_on_without_a_dead_member() -> None:
    crew = Crew(DSSync(pattern="grid"), 6, noisy(1)).run(8, dies={4: 3})
    assert len(crew.living) == 5


@pytest.mark.parametrize(
    ("settings", "workers", "words"),
    [
        ({"group_size": 3}, 8, "groups of 3 do not divide 8 workers"),
        ({}, 7, "7 workers make no grid"),
        ({"pattern": "hypergrid"}, 6, "power of 2 workers, got 6"),
        ({"pattern": "hypergrid", "group_size": 1}, 4, "power of 1"),
        ({"pattern": "random", "group_size": 1}, 4, "never mix"),
        ({"pattern": "random", "group_size": 9}, 4, "from 2 to 4"),
        (
            {"pattern": "given", "groups": "0,1|2,3"},
            4,
            "never mixes all workers: updates of rank 0 never reach rank 2",
        ),
        ({"pattern": "given", "groups": "0,1|2,3;1,0|3,2"}, 4, "never mixes"),
        ({"pattern": "given", "groups": "0,1|2"}, 4, "no partition of the 4 workers"),
        ({"pattern": "given", "groups": "0,1|1,2,3"}, 4, "no partition"),
    ],
)
def test_a_pattern_that_cannot_work_is_refused_with_the_reason(
    settings: Any, workers: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        DSSync(**settings).check(workers)


@pytest.mark.parametrize(
    "settings",
    [{"group_size": -1}, {"groups": GIVEN}, {"pattern": "given"}, {"pattern": "given", "groups": "0;x"}],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="group"):
        DSSync(**settings)


# -- hosts -------------------------------------------------------------------------------------------


@given(data=st.data(), count=st.integers(1, 4))
def test_a_group_is_within_a_host_or_has_one_worker_of_each_and_all_are_mixed(data: Any, count: int) -> None:
    """Whatever the hosts: their ranks need not be neighbours, nor equally many."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    ranks = data.draw(st.permutations(range(sum(sizes))))
    rest = list(ranks)
    hosts = [[rest.pop() for _ in range(size)] for size in sizes]
    text = "|".join(
        f"{','.join(map(str, host))}@{data.draw(st.sampled_from([0.01, 0.5, 2]))}" for host in hosts
    )
    protocol = DSSync("topology", hosts=text)
    protocol.check(len(ranks))
    for grouping in protocol.cycle(len(ranks)):
        for group in grouping:
            touched = [len(set(group) & set(host)) for host in hosts]
            assert max(touched) == 1 or sum(each > 0 for each in touched) == 1


@pytest.mark.parametrize(
    ("hosts", "within"),
    [
        ("0,1|2,3", 2),
        ("0,1@4|2,3@4", 1),
        ("0,1@0.5|2,3", 4),
        ("0,1@0.001|2,3", 8),
        ("0,1,2,3|4,5,6,7", 3),
    ],
)
def test_the_slower_the_uplinks_the_more_steps_within_hosts_for_one_across(hosts: str, within: int) -> None:
    """Two workers of a host send a model each within it, and one each through its uplink: twice as long."""
    cycle = DSSync("topology", hosts=hosts).cycle(4)
    rows, columns = cycle[0], cycle[-1]
    assert len(cycle) == within + 1
    assert cycle[:-1] == [rows] * within
    assert rows != columns


@pytest.mark.parametrize(
    ("hosts", "workers", "words"),
    [
        ("0,1|2", 4, "no partition of the 4 workers"),
        ("0,1|1,2", 3, "no partition"),
        ("0,1@0|2,3", 4, "never mixes all workers.*speed > 0"),
        ("0,a|2,3", 4, "got '0,a'"),
    ],
)
def test_hosts_that_cannot_work_are_refused_with_the_reason(hosts: str, workers: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DSSync("topology", hosts=hosts).check(workers)


@pytest.mark.parametrize(
    "settings",
    [{"pattern": "topology"}, {"hosts": "0|1"}, {"pattern": "topology", "hosts": "0|1", "group_size": 2}],
)
def test_hosts_belong_to_their_pattern(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="hosts are the groups"):
        DSSync(**settings)
