"""`paceline profile`, `paceline plan` and `paceline train --plan`, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from support.command import error_lines, start_command
from support.runs import Lab, children, wait_until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "transformer.py")
SMALL = ["--", "--width", "32", "--epochs", "1", "--batch-size", "64"]


def paceline(*words: str, cwd: Path, timeout: int = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def cluster_file(folder: Path, device: str = 'name = "cpu"\nflops_per_s = 1e9') -> str:
    file = folder / "cluster.toml"
    file.write_text(
        f'[[device]]\n{device}\nmemory = "2GiB"\ncount = 2\n\n[link]\nlatency_s = 1e-4\nbytes_per_s = 1e8\n'
    )
    return str(file)


def planned(folder: Path, *words: str) -> dict[str, Any]:
    at = words.index("--") if "--" in words else len(words)
    options = ["--cluster", cluster_file(folder), "--json"]
    done = paceline("plan", *words[:at], *options, *words[at:], cwd=folder)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def trained(folder: Path, plan: str) -> dict[str, Any]:
    """Run a plan and look at what it leaves behind."""
    done = paceline("train", EXAMPLE, "--plan", plan, "--json", *SMALL, cwd=folder)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    kept = folder / "runs" / result["run"]
    assert json.loads((kept / "result.json").read_text()) == result
    assert (result["workers"], result["samples"], result["samples_due"]) == (2, 512, 512)
    assert all(size > 0 for size in result["measured"]["peak_bytes"])
    assert result["predicted"]["step_s"] > 0
    assert result["measured"]["step_s"] > 0
    assert 0 < result["loss"] < 5
    assert load_file(kept / "weights.safetensors")["blocks.0.up.weight"].shape == (128, 32)
    return result


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_profile_becomes_an_osdp_plan_half_way_that_runs(tmp_path: Path) -> None:
    done = paceline("profile", EXAMPLE, "--out", "model.json", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "blocks.0.up" in done.stdout
    given = ["osdp", "--profile", "model.json", "--overhead", "40MiB"]
    free = planned(tmp_path, *given)
    assert free["batch"] == 64, "the script's"
    half = (free["replicated"]["memory_bytes"] + free["sharded"]["memory_bytes"]) // 2
    plan = planned(tmp_path, *given, "--memory", str(half), "--out", "plan.json")
    assert {op["mode"] for op in plan["operators"]} == {"zdp", "dp"}
    assert plan["predicted"]["memory_bytes"] <= half
    result = trained(tmp_path, "plan.json")
    assert max(result["measured"]["peak_bytes"]) <= half * 1.05


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_hap_plan_of_a_script_runs_is_drawn_and_is_refused_for_another_cluster(tmp_path: Path) -> None:
    plan = planned(tmp_path, "hap", EXAMPLE, "--out", "plan.json", *SMALL)
    assert sum(plan["ratios"][0]) == pytest.approx(1.0)
    assert list(plan["alternatives"]) == ["DDP, even", "DDP, batches by speed (--balance)", "FSDP, even"]
    assert plan["alone"]["device"] == 0
    result = trained(tmp_path, "plan.json")
    done = paceline("report", f"runs/{result['run']}", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runs"] == [result]
    page = (tmp_path / "report.html").read_text()
    for words in ("measured", "DDP, even", "Ratios", "50.0% (1 Gflop/s)", "blocks_0_up", "moving bytes"):
        assert words in page
    other = cluster_file(tmp_path, 'name = "cpu"\nflops_per_s = 3e9')
    done = paceline("train", EXAMPLE, "--plan", "plan.json", "--plan-cluster", other, *SMALL, cwd=tmp_path)
    assert done.returncode == 2
    assert "device 0 computes 3 Gflop/s, planned 1" in done.stderr
    done = paceline("train", EXAMPLE, "--plan", "plan.json", "--workers", "3", *SMALL, cwd=tmp_path)
    assert done.returncode == 2
    assert "is for 2 workers, not 3" in done.stderr


def test_a_signal_to_all_processes_of_a_plan_ends_them_with_a_sentence_that_is_true(
    lab: Lab, tmp_path: Path
) -> None:
    layers = [{"name": "fc", "kind": "Linear", "parameter_bytes": 2**20, "max_slices": 8}]
    (tmp_path / "model.json").write_text(json.dumps({"model": "m", "operators": layers}))
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(100)\n")
    planned(tmp_path, "osdp", "--profile", "model.json", "--batch", "4", "--out", "plan.json")
    command = start_command("train", "sleeps.py", "--plan", "plan.json", cwd=tmp_path)
    wait_until(lambda: len(children(command.pid)) == 2, "both ranks are there")
    for pid in (*children(command.pid), command.pid):
        os.kill(pid, signal.SIGTERM)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 1
    [line] = error_lines(errors)
    assert line.startswith(
        "error: ended by SIGTERM. A run under a plan keeps no checkpoint, so nothing of it"
    )
    wait_until(lambda: lab.leftovers() <= lab.idle, "everything is gone", 20)


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    profile = tmp_path / "model.json"
    layers = [{"name": "fc", "kind": "Linear", "parameter_bytes": 2**20, "max_slices": 8}]
    profile.write_text(
        json.dumps({"model": "m", "operators": [*layers, {"name": "norm", "parameter_bytes": 64}]})
    )
    cluster, model = cluster_file(tmp_path), ["--profile", str(profile)]
    bare = tmp_path / "bare.toml"
    bare.write_text("[[device]]\ncount = 2\n")
    text = tmp_path / "text.json"
    text.write_text("none")
    cases = [
        (["osdp", *model, "--cluster", str(bare)], "needs flops_per_s and memory"),
        (["osdp", *model, "--cluster", str(text)], "is neither JSON nor TOML"),
        (["osdp", "--profile", str(text), "--cluster", cluster], "is neither JSON nor TOML"),
        (["osdp", *model, "--cluster", cluster, "--modes", "dp,ddp"], "unknown mode 'ddp'"),
        (["osdp", *model, "--cluster", cluster, "--batch", "0"], "--batch must be at least 1"),
        (["osdp", *model, "--cluster", cluster, "--workers", "0"], "--workers must be at least 1"),
        (["osdp", *model, "--cluster", cluster, "--split", "nrom:2"], "Did you mean 'norm'?"),
        (["hap", "none.py", "--cluster", cluster], "none.py"),
        (["osdp", *model, "--cluster", cluster, "--out", "no/plan.json"], "cannot write no/plan.json"),
        (["osdp", *model, "--cluster", cluster, "--memory", "801MiB"], "smallest plan takes 804.00 MiB"),
        (
            ["osdp", *model, "--cluster", cluster, "--split", "norm:2"],
            "'norm' (module) cannot be split into 2",
        ),
        (["osdp", *model, "--cluster", cluster, "--memory", "much"], "such as 8GiB or 500MB, got 'much'"),
        (["osdp", "none.py", "--memory", "much"], "got 'much'"),  # before anything is measured
        (["osdp", "none.py"], "none.py"),  # that as well
        (["osdp"], "which model?"),
        (["osdp", *model, "--cluster", cluster, "--batch", "8", "--best-batch"], "exclude each other"),
        (["osdp", *model, "--cluster", "none.toml"], "cannot read the cluster file none.toml"),
    ]
    for words, expected in cases:
        done = paceline("plan", *words, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert expected in done.stderr
        assert done.stderr.count("\n") == 1
    unknown = cluster_file(tmp_path, 'kind = "a100-40g"')
    done = paceline("plan", "osdp", *model, "--cluster", unknown, cwd=tmp_path)
    assert done.returncode == 2
    assert "Did you mean 'a100-40gb'?" in done.stderr


def test_the_scripts_batch_is_kept_unless_another_one_is_asked_for(tmp_path: Path) -> None:
    profile = tmp_path / "model.json"
    layer = {"name": "l", "parameter_bytes": 2**24, "per_sample_s": 1e-3, "activation_bytes": 1e6}
    profile.write_text(json.dumps({"model": "m", "operators": [layer], "batches": [4, 8, 16]}))
    given = ("osdp", "--profile", str(profile))
    kept, best = planned(tmp_path, *given), planned(tmp_path, *given, "--best-batch")
    assert kept["batch"] == 16
    assert best["batch"] > 16
    assert best["predicted"]["samples_per_s"] > kept["predicted"]["samples_per_s"]
    assert planned(tmp_path, *given, "--batch", "8")["batch"] == 8


def test_an_osdp_plan_is_drawn_before_it_runs(tmp_path: Path) -> None:
    profile = tmp_path / "model.json"
    layers = [{"name": f"l{i}", "parameter_bytes": 2**24, "per_sample_s": 1e-3} for i in range(4)]
    profile.write_text(json.dumps({"model": "<four>", "operators": layers}))
    plan = planned(tmp_path, "osdp", "--profile", str(profile), "--memory", "1GiB", "--out", "plan.json")
    assert plan["cluster"]["devices"][0]["flops_per_s"] == 1e9
    done = paceline("report", "plan.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "report.html").read_text()
    assert "all sharded (FSDP, even)" in page
    assert "&lt;four&gt;" in page
    assert "l3 backward" in page


def test_a_plan_that_is_none_and_flags_without_meaning_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"planner": "other"}')
    done = paceline("train", EXAMPLE, "--plan", "plan.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "is no plan" in done.stderr
    done = paceline("train", EXAMPLE, "--plan", "plan.json", "--protocol", "ssp", cwd=tmp_path)
    assert done.returncode == 2
    assert "--protocol has no meaning with --plan" in done.stderr


def test_emulated_devices_are_refused_only_where_they_cannot_be_emulated(tmp_path: Path) -> None:
    profile = tmp_path / "model.json"
    profile.write_text(json.dumps({"model": "m", "operators": [{"name": "l", "parameter_bytes": 2**20}]}))
    cluster = str(ROOT / "examples" / "plans" / "unequal_gpus.toml")
    planned = ("plan", "osdp", "--profile", str(profile), "--cluster", cluster, "--out", "osdp.json")
    assert paceline(*planned, cwd=tmp_path).returncode == 0
    for flag in (("--device-time", "0.1"), ("--slow", "1:2"), ("--jitter", "0.1")):
        done = paceline("train", EXAMPLE, "--plan", "osdp.json", *flag, cwd=tmp_path)
        assert done.returncode == 2
        assert f"{flag[0]} emulates devices for HAP plans only" in done.stderr


def test_a_catalogue_cluster_is_enough_to_plan(tmp_path: Path) -> None:
    profile = tmp_path / "model.json"
    layers = [
        {"name": f"l{i}", "parameter_bytes": 2**30, "per_sample_s": 1e-3, "activation_bytes": 1e6}
        for i in range(24)
    ]
    profile.write_text(json.dumps({"model": "m", "operators": layers}))
    file = str(ROOT / "examples" / "plans" / "unequal_gpus.toml")
    done = paceline("plan", "osdp", "--profile", str(profile), "--cluster", file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "8 workers x batch" in done.stdout
    assert "all sharded (FSDP, even)" in done.stdout
