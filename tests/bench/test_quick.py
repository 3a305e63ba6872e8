"""Every benchmark runs from end to end in its quick form. What it measures there is not looked at."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.protocols import PACED
from paceline_bench.harness import ray_server
from paceline_bench.harness.plan import BenchPlan
from paceline_bench.harness.run import BENCHMARKS, chosen, run
from paceline_bench.plans.search import searches

pytestmark = pytest.mark.timeout(300)


def quick(name: str) -> list[dict[str, object]]:
    """The cases of a quick run, after a look at what every row must have."""
    record = run(name, BenchPlan(quick=True), say=lambda text: None)
    assert (record.name, record.quick, record.seed) == (name, True, 0)
    assert record.question
    for row in record.rows:
        assert "paceline" in row.measured
        assert all(
            seen.count >= 1 and seen.smallest <= seen.median <= seen.largest for seen in row.measured.values()
        )
        assert row.target is None, "a smoke test has nothing to prove"
    return [dict(row.case) for row in record.rows]


def test_exchange_compares_with_gloo_for_both_optimizers() -> None:
    assert [case["optimizer"] for case in quick("exchange")] == ["sgd", "adamw"]


@pytest.mark.long  # every side starts anew for every size
def test_network_compares_with_others_and_with_itself_under_tls() -> None:
    peers = [case["peer"] for case in quick("network") if case["link"] == "loopback"]
    assert peers == ["paceline tls", "gloo", "torch rpc", "socket"]


def test_allreduce_compares_one_exchange_and_whole_steps_over_both_fabrics() -> None:
    cases = [(case["measured"], case["model"], case["fabric"]) for case in quick("allreduce")]
    assert cases == [
        ("one exchange", "0.1 MB", "shared"),
        ("whole steps", "cnn", "shared"),
        ("whole steps", "cnn", "gloo"),
        ("whole steps", "transformer", "shared"),
        ("whole steps", "transformer", "gloo"),
    ]


@pytest.mark.long  # eight processes import torch anew
def test_pipeline_compares_with_theory_and_with_torchs_own() -> None:
    cases = quick("pipeline")
    assert [case["against"] for case in cases[:2]] == ["theory", "1f1b, 4 micro-batches"]
    assert [case["protocol"] for case in cases[2:]] == ["adl", "adl predict=True"]


@pytest.mark.long  # four workers import torch anew
def test_layers_that_do_not_fit_one_worker_cost_what_the_cost_model_says() -> None:
    [case] = quick("layers")
    assert (case["workers"], case["trains"], case["synchronisations"]) == ("4", "yes", "63 (model 63)")


def test_searches_of_both_planners_are_timed() -> None:
    rows = searches(BenchPlan(quick=True), say=lambda text: None)
    assert [row.case["planner"] for row in rows] == ["osdp"] * 4 + ["hap"]
    assert all(row.value is not None and row.value > 0 for row in rows)


@pytest.mark.long  # two dozen processes import torch anew
def test_plans_are_searched_and_run_against_ddp_and_fsdp() -> None:
    cases = quick("plans")
    assert [(case["measured"], case["planner"]) for case in cases if case["measured"] != "search"] == [
        ("whole steps", "hap"),
        ("prediction off by", "hap"),
        ("whole steps", "osdp"),
        ("peak memory", "osdp"),
    ][: len(cases) - 5]
    assert all("emulated" in str(case["for"]) for case in cases[5:])


@pytest.mark.long
def test_sequence_compares_four_ways_whose_bytes_are_those_of_their_formulas() -> None:
    cases = quick("sequence")
    assert [case["way"] for case in cases] == ["dynamic", "ulysses", "ring", "megatron"]
    assert all(case["bytes"] == case["formula"] for case in cases)
    assert len({case["formula"] for case in cases}) == 4


@pytest.mark.long
def test_embedding_compares_with_ddp_and_says_where_torchrec_cannot_be_imported() -> None:
    cases = run("embedding", BenchPlan(quick=True, torchrec="no/such/folder"), say=lambda text: None).rows
    assert [row.case["against"] for row in cases] == ["torchrec", "ddp"]
    assert set(cases[1].measured) == {"paceline", "ddp"}
    assert cases[1].value is not None
    if "torchrec" not in cases[0].measured:
        assert cases[0].value is None
        assert "skipped: TorchRec cannot be imported" in cases[0].remark


@pytest.mark.long  # starts Ray several times
@pytest.mark.skipif(not ray_server.installed(), reason="Ray is not installed: pip install 'paceline[bench]'")
def test_store_compares_with_rpc_and_ray_for_one_worker_and_for_two() -> None:
    cases = {(case["workers"], case["peer"]) for case in quick("store")}
    assert cases == {(1, "torch rpc"), (2, "torch rpc"), (1, "ray"), (2, "ray")}


def test_store_says_so_when_there_is_no_ray_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_server, "installed", lambda: False)
    said: list[str] = []
    record = run("store", BenchPlan(quick=True), said.append)
    assert {row.case["peer"] for row in record.rows} == {"torch rpc"}
    assert any("Ray is not installed" in text for text in said)


def test_death_kills_workers_at_rest_and_busy_ones() -> None:
    assert [case["victim"] for case in quick("death")] == ["at rest", "store busy"]


@pytest.mark.long  # twelve commands that import torch anew
def test_lone_is_measured_in_one_process_and_as_commands() -> None:
    assert [case["measured"] for case in quick("lone")] == ["in one process", "as commands"]


def test_trace_is_measured_for_a_lone_worker_and_for_teams() -> None:
    assert [(case["protocol"], case["workers"]) for case in quick("trace")] == [
        ("bsp", 1),
        ("bsp", 2),
        ("asp", 2),
    ]


def test_simulator_runs_every_registered_protocol() -> None:
    assert [case["protocol"] for case in quick("simulator")] == sorted(PACED)


def test_no_name_means_all_that_there_are_data_for_and_a_wrong_one_is_named() -> None:
    assert chosen([], BenchPlan()) == [
        name for name in BENCHMARKS if name not in ("cluster", "fidelity", "peers", "strategies")
    ]
    with pytest.raises(ConfigError, match="Did you mean 'exchange'"):
        chosen(["exchnge"], BenchPlan())
