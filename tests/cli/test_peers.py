"""Peer protocols through the command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.protocols import PEERS
from support.runs import SCRIPTS

if TYPE_CHECKING:
    from support.shell import Shell

TRAIN = SCRIPTS / "train.py"


def test_protocols_lists_both_families(shell: Shell) -> None:
    listed = {entry["name"]: entry["family"] for entry in shell("protocols", "--json").json}
    assert {name for name, family in listed.items() if family == "peer"} == set(PEERS)
    assert listed["bsp"] == "paced"
    assert "local_sgd (peer)" in shell("protocols", "local_sgd").out


def test_train_takes_a_peer_protocol_with_its_settings(shell: Shell) -> None:
    done = shell(
        "train",
        TRAIN,
        "--workers",
        2,
        "--protocol",
        "local_sgd",
        "--set",
        "period=3",
        "--json",
        "--",
        "momentum",
    )
    assert done.code == 0, done.err
    assert done.json["protocol"] == "local_sgd"
    assert done.json["settings"]["period"] == 3
    assert done.json["status"] == "finished"
    assert done.json["bytes_sent"] > 0


def test_compare_puts_both_families_side_by_side_and_writes_a_report(shell: Shell, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    protocols = "bsp,allreduce,local_sgd:period=4,dpsgd:topology=complete"
    done = shell(
        "compare", "--protocols", protocols, "--workers", 2, "--report", page, TRAIN, "--", "momentum"
    )
    assert done.code == 0, done.err
    for name in ("bsp", "allreduce", "local_sgd", "dpsgd"):
        assert name in done.err
        assert name in page.read_text()


def test_train_over_gloo_writes_the_same_kind_of_result(shell: Shell) -> None:
    flags = ("--workers", 2, "--protocol", "local_sgd", "--set", "period=3")
    runs = [
        shell("train", TRAIN, *flags, "--fabric", f, "--json", "--", "momentum") for f in ("gloo", "shared")
    ]
    assert [run.code for run in runs] == [0, 0], runs[0].err
    gloo, shared = (run.json for run in runs)
    assert gloo.keys() == shared.keys()
    for figure in ("status", "samples", "updates", "bytes_sent", "protocol", "settings"):
        assert gloo[figure] == shared[figure]
    assert (gloo["fabric"], shared["fabric"]) == ("gloo", "shared")
    page = shell.runs / "report.html"
    assert shell("report", shell.runs / gloo["run"], "--out", page).code == 0
    assert "local_sgd period=3 over gloo" in page.read_text()


def test_over_gloo_what_cannot_use_it_is_refused_before_anything_starts(shell: Shell) -> None:
    protocols = ("--protocols", "allreduce,bsp", "--fabric", "gloo", "--workers", 2)
    done = shell("compare", *protocols, TRAIN, "--", "momentum")
    assert done.code == 2
    assert "protocol 'bsp' is of the paced family" in done.error
    one_sided = shell("train", "--protocol", "ad_psgd", *protocols[2:], TRAIN, "--", "momentum")
    assert one_sided.code == 2
    assert "protocol 'ad_psgd' with these settings exchanges one-sidedly" in one_sided.error
    assert not shell.runs.exists()


def test_a_mistake_in_a_peer_protocols_settings_is_told_before_anything_starts(shell: Shell) -> None:
    done = shell("train", TRAIN, "--protocol", "local_sgd", "--set", "period=0", "--", "momentum")
    assert done.code == 2
    assert "period must be >= 1" in done.error
    assert not shell.runs.exists()


def test_simulate_trains_a_script_under_peer_protocols_and_paced_ones(shell: Shell) -> None:
    cluster = ("--workers", 3, "--slow", "1:3", "--latency", 0.001)
    done = shell(
        "simulate", TRAIN, "--protocol", "bsp,local_sgd,ad_psgd", *cluster, "--json", "--", "momentum"
    )
    assert done.code == 0, done.err
    bsp, local, free = done.json
    assert bsp["samples"] == local["samples"] == free["samples"]
    assert free["seconds"] < local["seconds"]


def test_what_sizes_alone_cannot_tell_is_simulated_with_a_script(shell: Shell) -> None:
    timing = shell("simulate", "--protocol", "selsync", "--workers", 2)
    assert timing.code == 2
    assert "values of its gradients" in timing.error
    assert "paceline simulate SCRIPT" in timing.error
    exact = shell("simulate", TRAIN, "--protocol", "selsync", "--workers", 2, "--", "momentum")
    assert exact.code == 0, exact.err


def test_simulate_compares_both_families_in_virtual_time(shell: Shell) -> None:
    done = shell(
        "simulate", "--protocol", "bsp,allreduce,local_sgd", "--workers", 4, "--slow", "1:3", "--json"
    )
    assert done.code == 0, done.err
    bsp, allreduce, local = done.json
    assert bsp["seconds"] == allreduce["seconds"]
    assert [each["protocol"] for each in done.json] == ["bsp", "allreduce", "local_sgd"]
    assert local["waiting_share"][0] > 0.5


# -- compression ------------------------------------------------------------------------------------


def test_train_compresses_and_counts_the_bytes_of_what_is_sent(shell: Shell) -> None:
    asked = ("train", TRAIN, "--workers", 2, "--protocol", "allreduce", "--json")
    plain, half = (shell(*asked, "--compress", way, "--", "momentum").json for way in ("none", "fp16"))
    assert half["compress"] == "fp16"
    assert half["bytes_sent"] == half["bytes_received"] == plain["bytes_sent"] / 4
    assert sum(half["bytes_sent_each"]) == half["bytes_sent"]


def test_compare_runs_every_protocol_with_each_way_to_compress(shell: Shell, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    ways = ("--protocols", "allreduce,local_sgd:period=4", "--compress", "none,topk:0.1", "--workers", 2)
    done = shell("compare", *ways, "--report", page, TRAIN, "--", "momentum")
    assert done.code == 0, done.err
    for name in ("allreduce + topk:0.1", "local_sgd period=4 + topk:0.1"):
        assert name in done.err
        assert name in page.read_text()


def test_a_wrong_way_to_compress_is_told_before_anything_starts(shell: Shell) -> None:
    for command in (("train", TRAIN), ("compare", TRAIN), ("simulate", TRAIN), ("simulate",)):
        named = "--protocols" if command[0] == "compare" else "--protocol"
        wrong = shell(*command, named, "allreduce", "--compress", "topk:2")
        assert wrong.code == 2
        assert "--compress topk got the amount '2'. Allowed: none, fp16" in wrong.error
        paced = shell(*command, named, "ssp", "--compress", "fp16")
        assert paced.code == 2
        assert "'ssp' is paced" in paced.error
        one_sided = shell(*command, named, "ad_psgd", "--compress", "fp16")
        assert one_sided.code == 2
        assert "exchanges one-sidedly" in one_sided.error
    assert not shell.runs.exists()


def test_a_simulation_on_slow_links_gains_what_compression_saves(shell: Shell) -> None:
    links = ("--bandwidth", "1e6", "--model-bytes", "1000000", "--iterations", 10, "--workers", 4)
    done = shell("simulate", "--protocol", "allreduce", *links, "--compress", "none,fp16,topk:0.01", "--json")
    assert done.code == 0, done.err
    plain, half, few = done.json
    assert few["seconds"] < half["seconds"] < plain["seconds"]
    assert half["bytes_sent"] == plain["bytes_sent"] / 2
    assert few["bytes_sent"] == plain["bytes_sent"] / 50
