"""`paceline replay`: a recorded run again, to the same bits; and a simulated run that equals the real one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from paceline.config import RunConfig
from support.runs import SCRIPTS
from support.shell import Shell

SCRIPT = SCRIPTS / "train.py"
ARGS = ("--", "momentum", "--samples", 64, "--epochs", 2)


PACED = {
    **dict.fromkeys(("asp", "ssp", "dssp", "bsp", "elastic_bsp", "psp", "backup_bsp"), ()),
    "hybrid_sgd": ("threshold=constant", "first=2", "wait=never"),
    "bounded_ps": ("buffered=true", "resync=2"),
    "sync_switch": ("phases=bsp@0.4,asp", "momentum=scaled"),
}
POLLING = ("psp", "resample=poll", "poll_s=0.003")
APART = ("psp", "form=distributed", "poll_s=0.003")


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "asked", [*((name, *each) for name, each in PACED.items()), POLLING, APART], ids=" ".join
)
def test_a_replayed_run_arrives_at_the_same_weights_bit_for_bit(shell: Shell, asked: tuple[str, ...]) -> None:
    protocol, *settings = asked
    flags = [flag for setting in settings for flag in ("--set", setting)]
    unequal = ("-n", 3, "--slow", "2:2", "--device-time", 0.004)
    recorded = shell("train", SCRIPT, "-p", protocol, *flags, *unequal, *ARGS)
    assert recorded.code == 0, recorded.err
    again = shell("replay", recorded.out.strip(), "--json")
    assert again.code == 0, again.err
    assert again.json["identical"] is True
    assert again.json["verdict"] == "the same verdicts, the same weights bit for bit"


@pytest.mark.parametrize("protocol", ["ad_psgd", "local_sgd"])
def test_a_replayed_peer_run_arrives_there_too(shell: Shell, protocol: str) -> None:
    unequal = ("-n", 3, "--slow", "2:2", "--device-time", 0.004)
    recorded = shell("train", SCRIPT, "-p", protocol, *unequal, *ARGS)
    again = shell("replay", recorded.out.strip(), "--json")
    assert again.code == 0, again.err
    assert again.json["verdict"] == "the same verdicts, the same weights bit for bit"


def test_what_is_not_on_record_of_peers_is_refused_with_the_reason(shell: Shell) -> None:
    over_gloo = shell("train", SCRIPT, "-p", "local_sgd", "-n", 2, "--fabric", "gloo", *ARGS)
    refused = shell("replay", over_gloo.out.strip())
    assert refused.code == 2
    assert "cannot be replayed over 'gloo'" in refused.err
    bad = ("--", "momentum", "--bad", 1)
    failed = shell("train", SCRIPTS / "peers.py", "-p", "local_sgd", "-n", 2, *bad)
    assert failed.code == 1
    refused = shell("replay", shell.runs / "latest")
    assert refused.code == 2
    assert "not on record" in refused.err


def test_a_replay_stops_at_any_verdict_with_the_weights_of_that_moment(shell: Shell) -> None:
    recorded = shell("train", SCRIPT, "-p", "asp", "-n", 2, *ARGS)
    for beyond in (-3, 99_999):
        refused = shell("replay", recorded.out.strip(), "--until", beyond)
        assert refused.code == 2
        assert f"got {beyond}" in refused.error
    halfway = shell("replay", recorded.out.strip(), "--until", 7, "--json")
    assert halfway.code == 0, halfway.err
    early = load_file(shell.runs / "latest" / "weights.safetensors")
    late = load_file(f"{recorded.out.strip()}/weights.safetensors")
    assert any(bool((early[name] != late[name]).any()) for name in late)


def test_a_record_without_an_end_is_replayed_up_to_a_verdict_only(shell: Shell) -> None:
    run = Path(shell("train", SCRIPT, "-p", "asp", "-n", 2, *ARGS).out.strip())
    (run / "weights.safetensors").unlink()  # as if its owner had been killed
    trace = run / "trace.jsonl"
    trace.write_bytes(trace.read_bytes()[:-40])
    refused = shell("replay", run)
    assert refused.code == 2
    assert "has no end to arrive at" in refused.error
    assert "--until" in refused.error
    assert shell("replay", run, "--until", 7).code == 0


def test_a_run_that_is_absent_or_damaged_is_told_before_anything_starts(shell: Shell, tmp_path: Path) -> None:
    absent = shell("replay", tmp_path / "nowhere")
    assert absent.code == 2
    assert "No such file or directory. Give a run folder" in absent.error
    assert shell("report", tmp_path / "nowhere").code == 2
    run = Path(shell("train", SCRIPT, "-p", "asp", "-n", 2, *ARGS).out.strip())
    trace = run / "trace.jsonl"
    first, *others = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join([first, b'{"garbage": 3}\n', *others]))
    damaged = shell("replay", run)
    assert damaged.code == 1
    assert "line 2 is not a trace event" in damaged.error
    (run / "config.json").write_text("{}")
    assert "is damaged; replay another run" in shell("replay", run).error


def test_what_repeats_by_itself_needs_no_replay(shell: Shell) -> None:
    alone = shell("train", SCRIPT, "-n", 1, *ARGS)
    refused = shell("replay", alone.out.strip())
    assert refused.code == 2
    assert "run anything else" in refused.err


def test_a_split_model_needs_none_either(shell: Shell, tmp_path: Path) -> None:
    split = RunConfig(
        run="x", folder="x", script=str(SCRIPT), workers=2, protocol="layerwise", mesh={"stage": 2}
    )
    planned = RunConfig(run="x", folder="x", script=str(SCRIPT), workers=2, plan="plan.json")
    for config in (split, planned):
        (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
        refused = shell("replay", tmp_path)
        assert refused.code == 2
        assert "with the whole model each" in refused.err


def test_a_simulated_lockstep_run_equals_the_real_one_bit_for_bit(shell: Shell) -> None:
    real = shell("train", SCRIPT, "-p", "bsp", "-n", 3, *ARGS)
    virtual = shell("simulate", SCRIPT, "-p", "bsp", "-n", 3, "--slow", "1:3", *ARGS)
    assert (real.code, virtual.code) == (0, 0), virtual.err
    first = load_file(f"{real.out.strip()}/weights.safetensors")
    second = load_file(f"{virtual.out.strip()}/weights.safetensors")
    assert all(bool((first[name] == second[name]).all()) for name in first)


def test_a_script_that_is_gone_or_fails_now_ends_the_replay_and_says_so(shell: Shell, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nrunpy.run_path({str(SCRIPT)!r})"
    )
    recorded = shell("train", script, "-n", 2, *ARGS)
    assert recorded.code == 0, recorded.err
    script.write_text("raise KeyError('changed')")
    failed = shell("replay", recorded.out.strip())
    assert failed.code == 1
    assert "before training began: KeyError: 'changed'" in failed.err
    script.unlink()
    refused = shell("replay", recorded.out.strip())
    assert refused.code == 2
    assert f"is not at {script}" in refused.err


ACCUMULATES = """
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline

pace = paceline.join()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(32, 2)), batch_size=2)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(2):
    for number, (x,) in enumerate(loader, 1):
        model(x).mean().backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    pace.evaluate(lambda: time.sleep(0.1) or 0.0)
"""


def test_a_lockstep_run_is_replayed_though_others_came_first_after_an_evaluation(
    shell: Shell, tmp_path: Path
) -> None:
    """Who evaluates in lockstep holds up the work of all, so its word cannot wait for its next push."""
    script = tmp_path / "accumulates.py"
    script.write_text(ACCUMULATES)
    recorded = shell("train", script, "-n", 2, "-p", "bsp")
    assert recorded.code == 0, recorded.err
    again = shell("replay", recorded.out.strip(), "--json")
    assert again.code == 0, again.err
    assert again.json["identical"] is True
