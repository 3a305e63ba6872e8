"""Reductions over groups and messages between pairs, by real processes on the loopback interface."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.errors import ConfigError, RunStopped
from paceline.fabric.collective import Collective, GroupLine, Groups, Torn, backend_for, require_gloo
from support.runs import wait_until

pytestmark = pytest.mark.timeout(60)
Body = Callable[[Collective], None]


def fork(size: int, body: Body, look: Callable[[], None] = lambda: None) -> list[int]:
    """Connected processes that carry `body` out."""
    meeting = os.memfd_create("meeting")
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.alarm(45)  # whoever hangs ends, also when nobody waits for it any more
                torch.set_num_threads(1)
                body(Collective(rank, size, meeting, look))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        pids.append(pid)
    os.close(meeting)
    return pids


def ends(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def numbers(rank: int, size: int = 1001) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


# -- groups -------------------------------------------------------------------------------------------


def test_a_group_is_made_once_whoever_names_its_members_in_which_order() -> None:
    made: list[tuple[int, ...]] = []
    groups = Groups(lambda line, ranks: (made.append(ranks), object())[1])
    first = groups[GroupLine.NOW, (2, 0)]
    assert groups[GroupLine.NOW, (0, 2)] is first
    assert groups[GroupLine.NOW, (2, 0, 2)] is first
    assert made == [(0, 2)]


def test_every_line_has_groups_of_its_own() -> None:
    groups = Groups(lambda line, ranks: object())
    made = {id(groups[line, (0, 1)]) for line in GroupLine}
    assert len(made) == len(groups) == len(GroupLine)


def test_members_alone_make_a_group_when_they_need_it() -> None:
    """Ranks 2 and 3 never hear of the group of 0 and 1."""

    def body(fabric: Collective) -> None:
        mine = (0, 1) if fabric.rank < 2 else (1, 2, 3)[1:]
        for _ in range(3):
            x = torch.full((4,), float(fabric.rank))
            fabric.reduce([x], mine)
            assert x.tolist() == [float(sum(mine))] * 4

    assert ends(fork(4, body)) == [0] * 4


def test_nccl_reduces_what_lies_on_a_gpu_and_gloo_what_does_not() -> None:
    assert backend_for(torch.device("cuda", 1)) == "nccl"
    assert backend_for(torch.device("cpu")) == backend_for(None) == "gloo"
    with pytest.raises(ConfigError, match="the model is on xpu"):
        backend_for(torch.device("xpu"))


def test_messages_between_pairs_are_refused_where_they_would_not_arrive() -> None:
    require_gloo("gloo")
    require_gloo("nccl", possible=True)
    with pytest.raises(ConfigError, match="over nccl workers can only average over all"):
        require_gloo("nccl")


def test_who_has_been_in_more_groups_than_another_still_makes_a_new_one_with_it() -> None:
    def body(fabric: Collective) -> None:
        for mine in ((0, 1), (0, 2), (0, 1, 2), (1, 2)):
            if fabric.rank in mine:
                x = torch.full((4,), float(fabric.rank))
                fabric.reduce([x], mine)
                assert x.tolist() == [float(sum(mine))] * 4

    assert ends(fork(3, body)) == [0] * 3


# -- numbers ------------------------------------------------------------------------------------------


def test_sums_have_the_same_bits_on_all_ranks(tmp_path: Path) -> None:
    def body(fabric: Collective) -> None:
        x = numbers(fabric.rank)
        fabric.reduce([x])
        (tmp_path / str(fabric.rank)).write_bytes(x.numpy().tobytes())

    assert ends(fork(3, body)) == [0] * 3
    seen = {(tmp_path / str(rank)).read_bytes() for rank in range(3)}
    assert len(seen) == 1
    mean = torch.frombuffer(bytearray(seen.pop()), dtype=torch.float64)
    torch.testing.assert_close(mean, sum(numbers(rank) for rank in range(3)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 1001])
def test_an_average_by_pairs_is_the_weighted_mean_with_the_same_bits_on_all_ranks(
    tmp_path: Path, size: int
) -> None:
    """Fewer numbers than ranks, too: somebody has nothing to add up then."""
    row = {0: 0.5, 2: 0.3, 3: 0.2}

    def body(fabric: Collective) -> None:
        x, mean = numbers(fabric.rank, size), torch.zeros(size, dtype=torch.float64)
        if fabric.rank in row:
            fabric.average([x], row, [mean])
            assert torch.equal(x, numbers(fabric.rank, size)), "what is given away stays as it is"
            (tmp_path / str(fabric.rank)).write_bytes(mean.numpy().tobytes())

    assert ends(fork(4, body)) == [0] * 4
    seen = {(tmp_path / str(rank)).read_bytes() for rank in row}
    assert len(seen) == 1
    expected = sum(share * numbers(rank, size) for rank, share in row.items())
    mean = torch.frombuffer(bytearray(seen.pop()), dtype=torch.float64)
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)


def test_a_mixture_takes_from_neighbours_only_be_they_mutual_or_not() -> None:
    """Everybody takes from the next three of five ranks: more than are received at a time."""

    def body(fabric: Collective) -> None:
        me, size = fabric.rank, 5
        row = {(me + far) % size: share for far, share in enumerate((0.4, 0.3, 0.2, 0.1))}
        takers = tuple((me - far) % size for far in range(4))
        mixed = torch.zeros(1001, dtype=torch.float64)
        fabric.mix([numbers(me)], row, takers, [mixed])
        expected = sum(share * numbers(rank) for rank, share in row.items())
        torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-12)

    assert ends(fork(5, body)) == [0] * 5


def test_what_is_wanted_now_does_not_queue_behind_what_was_started() -> None:
    """Rank 0 begins something that rank 1 joins only after they have done something else together."""

    def body(fabric: Collective) -> None:
        started = torch.ones(3)
        works = fabric.begin([started], (), GroupLine.STARTED) if fabric.rank == 0 else []
        now = torch.ones(3)
        fabric.reduce([now])
        assert now.tolist() == [2.0] * 3
        works = works or fabric.begin([started], (), GroupLine.STARTED)
        fabric.finish(works)
        assert started.tolist() == [2.0] * 3

    assert ends(fork(2, body)) == [0] * 2


# -- trouble ------------------------------------------------------------------------------------------


WAYS: dict[str, Body] = {
    "reduce": lambda fabric: fabric.reduce([torch.ones(1000)]),
    "mix": lambda fabric: fabric.mix([torch.ones(1000)], {0: 0.5, 1: 0.5}, (1,), [torch.zeros(1000)]),
}


@pytest.mark.parametrize("how", WAYS)
def test_whoever_waits_in_vain_stops_when_the_run_is_over(tmp_path: Path, how: str) -> None:
    """Rank 1 is there and does not come; nothing breaks, so only looking up helps."""
    over = tmp_path / "over"

    def look() -> None:
        if over.exists():
            raise RunStopped("over")

    def body(fabric: Collective) -> None:
        if fabric.rank == 1:
            (tmp_path / "absent").touch()
            signal.pause()
        with pytest.raises(RunStopped):
            WAYS[how](fabric)

    waiting, absent = fork(2, body, look)
    wait_until((tmp_path / "absent").exists, "rank 1 is there")
    time.sleep(0.3)
    assert os.waitpid(waiting, os.WNOHANG) == (0, 0), "it waits"
    over.touch()
    assert ends([waiting]) == [0]
    os.kill(absent, signal.SIGKILL)
    assert ends([absent]) == [-signal.SIGKILL]


@pytest.mark.parametrize("how", WAYS)
def test_a_neighbour_that_dies_tears_the_exchange(how: str) -> None:
    def body(fabric: Collective) -> None:
        if fabric.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(Torn, match="broke off"):
            WAYS[how](fabric)

    assert ends(fork(2, body)) == [0, -signal.SIGKILL]
