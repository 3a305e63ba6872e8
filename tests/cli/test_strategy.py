"""`paceline advise strategy`: from files to advice, and what is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from support.shell import Shell

CLUSTER = str(Path(__file__).parents[2] / "examples" / "plans" / "unequal_gpus.toml")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """A model of 400 MB that takes 10 ms per sample on the slowest device."""
    path = tmp_path / "model.json"
    layer = {"name": "wide", "parameter_bytes": 400_000_000, "per_sample_s": 0.01, "activation_bytes": 1e6}
    path.write_bytes(msgspec.json.encode({"model": "m", "operators": [layer]}))
    return str(path)


def test_the_rule_its_numbers_and_all_strategies_are_shown(shell: Shell, profile: str) -> None:
    done = shell("advise", "strategy", "--profile", profile, "--cluster", CLUSTER, "--tolerance", 5)
    assert done.code == 0, done.err
    assert "rule 3" in done.out
    assert "2.79 times as long" in done.out  # 312 over 112 Tflop/s
    for name in ("single", "ddp", "fsdp", "ps-sync", "ps-async", "ps-async-mod"):
        assert name in done.out


def test_what_does_not_fit_is_sharded(shell: Shell, profile: str) -> None:
    words = ("--profile", profile, "--cluster", CLUSTER, "--memory", "2.5GiB", "--json")
    advice = shell("advise", "strategy", *words).json
    assert (advice["rule"], advice["choice"]) == (1, "fsdp over 5 workers")
    assert advice["rows"][0]["fits"]
    assert [row["strategy"] for row in advice["rows"] if not row["fits"]] == ["ddp", "single"]


@pytest.mark.timeout(200)
def test_a_script_is_enough_for_advice(shell: Shell) -> None:
    script = str(Path(__file__).parents[2] / "examples" / "digits.py")
    done = shell("advise", "strategy", script, "--workers", 2)
    assert done.code == 0, done.err
    assert "advice: " in done.out
    assert f"paceline train {script} " in done.out.replace("\n", " ")


def test_without_a_model_the_error_says_how_to_make_its_file(shell: Shell) -> None:
    done = shell("advise", "strategy")
    assert done.code == 2
    assert "`paceline profile SCRIPT --out FILE`" in done.error


def test_the_command_of_the_advice_names_the_files_that_were_given(shell: Shell, profile: str) -> None:
    given = ("--profile", profile, "--cluster", CLUSTER, "--memory", "2.5GiB", "--json")
    advice = shell("advise", "strategy", *given).json
    assert advice["command"] == f"paceline plan osdp SCRIPT --cluster {CLUSTER} --out plan.json"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--measured", "ps-asink=3"), "Did you mean 'ps-async'"),
        (("--measured", "ddp=fast"), "got 'fast'"),
        (("--memory", "lots"), "a size such as 8GiB"),
        (("--tolerance", "-1"), "0 to 100"),
        (("--cluster", "no.toml"), "Check the path"),
    ],
)
def test_a_mistake_is_one_clear_line(shell: Shell, profile: str, words: tuple[str, str], said: str) -> None:
    done = shell("advise", "strategy", "--profile", profile, "--cluster", CLUSTER, *words)
    assert done.code == 2
    assert said in done.error
