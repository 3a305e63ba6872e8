"""Any OSDP plan, carried out with FSDP2 on real processes, trains as one process does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from paceline.errors import ConfigError, RunError
from paceline.parallel.plans.capture import Captured
from paceline.parallel.plans.measure_model import measure_model, operators_of
from paceline.parallel.plans.processes import run_ranks
from paceline.parallel.plans.sharding import check_plan
from paceline.parallel.plans.shared_loader import SharedLoader
from paceline.plan.osdp.plan import OperatorPlan, OsdpPlan
from paceline.plan.osdp.scheduler import plan_osdp
from paceline.plan.profile import ClusterProfile, Device, TransferCost
from support import osdp_ranks
from support.runs import children

TESTS = str(Path(__file__).parents[1])
RANKS = 3
CLUSTER = ClusterProfile(
    devices=(Device(name="d", flops_per_s=1e10, memory_bytes=2**40),) * RANKS,
    link=TransferCost(latency_s=1e-5, bytes_per_s=1e9),
    overhead_bytes=0,
)


def base_plan(kind: str = "plain", limit: int | None = None) -> OsdpPlan:
    import torch

    model = osdp_ranks.KINDS[kind]()
    captured = Captured(model, torch.optim.AdamW(model.parameters()), (torch.randn(8, 10),), batch=8)
    return plan_osdp(measure_model(captured, "test"), CLUSTER, limit, batch=osdp_ranks.BATCH)


def changed(plan: OsdpPlan, **ways: dict[str, Any]) -> OsdpPlan:
    def one(op: OperatorPlan) -> OperatorPlan:
        return msgspec.structs.replace(op, **ways.get(f"op{op.name}", ways.get("all", {})))

    return msgspec.structs.replace(plan, operators=tuple(one(op) for op in plan.operators))


@pytest.mark.timeout(400)
def test_every_mix_of_modes_and_slices_gives_the_weights_of_one_process() -> None:
    base = base_plan()
    zdp, dp = {"mode": "zdp", "sharded": 1}, {"mode": "dp"}
    plans = [
        base,
        changed(base, all=zdp),
        changed(base, op0=zdp, op2={"mode": "keep", "sharded": 1}, all=dp),
        changed(
            base,
            op0=zdp,
            op2={"mode": "mixed", "slices": 5, "sharded": 2},
            op4={"mode": "zdp", "slices": 4, "sharded": 4},
        ),
    ]
    shares = base_plan("tied", limit=base_plan("tied").sharded.memory_bytes)
    kinds = [*(("plain", plan) for plan in plans), ("tied", shares)]
    request = {"plans": kinds, "clip": 0.5}
    answers = run_ranks(
        "support.osdp_ranks:trains", RANKS, request, timeout_s=350, paths=(TESTS,), forked=True
    )
    whole = sum(p.numel() for p in osdp_ranks.network().parameters())
    for place, (kind, _) in enumerate(kinds):
        for rank in range(RANKS):
            answer = answers[rank]["answers"][place]
            assert answer["names"] == answers[rank]["names"][kind]
            assert answer["apart"] < 2e-6, f"plan {place}, rank {rank}"
    for rank in range(RANKS):
        assert answers[rank]["gathered"] == [0.0, 1.0, 2.0], "a plan's workers have each other's rows"
        assert "pace.leave() does not work under a plan" in answers[rank]["left"]
    held = [[answers[rank]["answers"][place]["held"] for rank in range(RANKS)] for place in range(len(plans))]
    assert held[0] == [whole] * RANKS
    assert sum(held[1]) == whole, "nothing is held twice when all is sharded"
    assert sum(held[1]) < sum(held[3]) < sum(held[0])


def test_a_plan_for_other_workers_or_another_model_is_refused_and_says_what_differs() -> None:
    plan, model = base_plan(), osdp_ranks.network()
    with pytest.raises(ConfigError, match="for 3 workers, but 4 were started"):
        check_plan(plan, model, 4)
    wider = osdp_ranks.network()
    wider[5] = osdp_ranks.nn.Linear(24, 6)
    with pytest.raises(
        ConfigError, match="operator '5' is Linear of 500 bytes in the plan and Linear of 600"
    ):
        check_plan(plan, wider, RANKS)
    with pytest.raises(ConfigError, match=r"operator '4' is Linear .* and missing in the script"):
        check_plan(plan, osdp_ranks.network()[:4], RANKS)


def test_tied_weights_are_counted_once_and_stay_whole() -> None:
    plan = base_plan("tied", limit=base_plan("tied").sharded.memory_bytes)
    assert [(op.name, op.parameter_bytes, op.mode) for op in plan.operators] == [
        ("0", 400, "dp"),
        ("2", 40, "dp"),
        ("3", 220, "zdp"),
        ("(rest)", 0, "dp"),
    ]
    with pytest.raises(ConfigError, match="shards '0', whose parameters are no layer's own"):
        check_plan(changed(plan, op0={"mode": "zdp", "sharded": 1}), osdp_ranks.tied(), RANKS)


def test_a_profile_counts_what_pytorch_holds() -> None:
    plan = base_plan()
    model = osdp_ranks.network()
    assert [op.name for op in plan.operators] == [*operators_of(model), "(rest)"]
    assert sum(op.parameter_bytes for op in plan.operators) == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.long
@pytest.mark.parametrize("forked", [True, False])
def test_a_rank_that_fails_is_named_with_its_own_words_and_none_is_left(forked: bool, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="rank 1: ZeroDivisionError: float division by zero"):
        run_ranks("support.ranks:fails", 3, {}, timeout_s=100, paths=(TESTS,), forked=forked, logs=tmp_path)
    assert sorted(log.name for log in tmp_path.iterdir()) == ["rank0.log", "rank1.log", "rank2.log"]
    assert "ZeroDivisionError" in (tmp_path / "rank1.log").read_text()
    assert not children(os.getpid())


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_rank_that_was_killed_is_named_and_not_those_that_it_left_alone(
    forked: bool, tmp_path: Path
) -> None:
    task, before = "support.ranks:loses_one", children(os.getpid())
    with pytest.raises(RunError, match=r"^rank 1 was ended by SIGKILL"):
        run_ranks(task, 2, {}, timeout_s=100, paths=(TESTS,), forked=forked, logs=tmp_path)
    assert children(os.getpid()) == before


def test_ranks_that_take_too_long_are_not_said_to_have_died(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^the 2 ranks did not end within 6 s, and were ended\.$"):
        run_ranks("support.ranks:waits", 2, {}, timeout_s=6, paths=(TESTS,), forked=True, logs=tmp_path)


def test_an_answer_counts_however_the_interpreter_ends(tmp_path: Path) -> None:
    task = "support.ranks:aborts_at_its_end"
    assert run_ranks(task, 2, {}, timeout_s=100, paths=(TESTS,), logs=tmp_path) == [0, 1]
    assert (tmp_path / "rank1.log").read_text() == "the script's own word at the end\n"


@pytest.mark.parametrize("sampled", ["generator", "replacement"])
def test_the_samples_of_a_plan_come_in_the_order_that_the_loader_has_alone(sampled: str) -> None:
    def loader() -> DataLoader[int]:
        drawn = torch.Generator().manual_seed(3)
        more = {"replacement": True, "num_samples": 8} if sampled == "replacement" else {}
        data: Any = range(12)
        return DataLoader(data, 2, sampler=RandomSampler(data, generator=drawn, **more), generator=drawn)

    alone, ranks = loader(), [SharedLoader(loader(), 1, rank, 2, seed=0) for rank in range(2)]
    for _ in range(2):
        assert [torch.cat(both).tolist() for both in zip(*ranks, strict=True)] == [x.tolist() for x in alone]


def test_a_task_that_cannot_be_imported_is_told_of_forked_ranks_too() -> None:
    with pytest.raises(RunError, match=r"rank 0 ended with status 1: ModuleNotFoundError: .*no_such_module"):
        run_ranks("no_such_module:task", 2, {}, timeout_s=100, forked=True)
