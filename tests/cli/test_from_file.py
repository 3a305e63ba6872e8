"""A run's settings in a file do what the same flags do, and typed flags win."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.cli.flags.from_file import expand
from paceline.cli.main import app
from paceline.errors import ConfigError
from support.command import run_command

PARAMS = typer.main.get_command(app).commands["train"].params  # type: ignore[attr-defined]


def written(folder: Path, text: str) -> str:
    file = folder / "run.toml"
    file.write_text(text)
    return str(file)


def said(folder: Path, text: str, *args: str) -> tuple[list[str], dict[str, Any]]:
    return expand([written(folder, text), *args], PARAMS)


def test_a_file_stands_for_its_flags(tmp_path: Path) -> None:
    text = """
script = "train.py"
args = ["--epochs", 3]
protocol = "dssp"
workers = 4
device-time = 0.05
balance = false
set = { lower = 3, upper = 15 }
slow = { 3 = 2.5 }
"""
    args, values = said(tmp_path, text)
    assert args == ["train.py", "--", "--epochs", "3"]
    assert values == {
        "protocol": "dssp",
        "workers": "4",
        "device_time": "0.05",
        "balance": False,
        "set_": ["lower=3", "upper=15"],
        "slow": ["3:2.5"],
    }


def test_typed_arguments_of_the_script_replace_those_of_the_file(tmp_path: Path) -> None:
    args, _ = said(tmp_path, 'script = "a.py"\nargs = ["--epochs", "3"]', "--", "--epochs", "1")
    assert args == ["a.py", "--", "--epochs", "1"]


def test_a_file_that_is_a_flags_value_is_left_alone() -> None:
    assert expand(["a.py", "--plan-cluster", "cluster.toml"], PARAMS) == (
        ["a.py", "--plan-cluster", "cluster.toml"],
        {},
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workers = 2", "names no script"),
        ('script = "a.py"\nwokers = 2', "Did you mean 'workers'"),
        ('script = "a.py"\nworkers = [2]', "workers in .* takes one value"),
        ('script = "a.py"\nworkers = true', "workers in .* takes a value, got true"),
        ("script = ", "is not valid TOML"),
    ],
)
def test_what_a_file_cannot_say_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        said(tmp_path, text)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"script = '\xff'")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        expand([str(tmp_path / "run.toml")], PARAMS)


def test_a_run_from_a_file_is_the_run_of_its_flags_and_typed_ones_win(tmp_path: Path) -> None:
    import msgspec

    (tmp_path / "quick.py").write_text(
        "import paceline, torch\n"
        "pace = paceline.join()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "data = torch.utils.data.DataLoader(torch.randn(32, 2), batch_size=4)\n"
        "model, opt, data = pace.prepare(model, torch.optim.SGD(model.parameters(), lr=.1), data)\n"
        "for x in data:\n    model(x).mean().backward(); opt.step(); opt.zero_grad()\n"
    )
    (tmp_path / "run.toml").write_text(
        'script = "quick.py"\nprotocol = "ssp"\nworkers = 2\nseed = 5\nset.staleness = 7\n'
    )
    done = run_command("train", "run.toml", "--seed", "6", "--json", cwd=tmp_path, timeout_s=90)
    assert done.returncode == 0, done.stderr
    result = msgspec.json.decode(done.stdout)
    told = {key: result[key] for key in ("protocol", "workers", "seed", "settings")}
    assert told == {"protocol": "ssp", "workers": 2, "seed": 6, "settings": {"staleness": 7}}


def test_a_value_of_the_wrong_kind_is_refused_with_the_file_and_the_value(tmp_path: Path) -> None:
    done = run_command("train", written(tmp_path, 'script = "a.py"\nworkers = "two"'), cwd=tmp_path)
    assert done.returncode == 2
    assert "run.toml says 'two'" in done.stderr
    done = run_command(
        "train", written(tmp_path, 'script = "a.py"\nworkers = 2'), "--workers", "two", cwd=tmp_path
    )
    assert "says" not in done.stderr, "it was typed"
