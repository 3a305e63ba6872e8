"""`paceline testbed`, as a command of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.testbed import Testbed, load_spec, why_not
from paceline.testbed.bed import take_down
from support.command import COMMAND, error_lines, run_command
from support.testbed import traces_of

pytestmark = pytest.mark.timeout(90)
privileged = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class Lab:
    """A testbed made by the command line, and the command line on it."""

    def __init__(self, folder: Path) -> None:
        self.name = f"y{token_hex(3)}"
        self.folder = folder
        self.file = folder / "bed.toml"
        self.file.write_text(
            f'[testbed]\nname = "{self.name}"\n[host.a]\nlink_mbit = 100\n[host.b]\ncpu = 0.5\n'
        )

    def run(self, *args: object) -> subprocess.CompletedProcess[str]:
        return run_command("testbed", *args, cwd=self.folder, timeout_s=30)

    def json(self, *args: object) -> Any:
        done = self.run(*args, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    if why_not() is None:
        take_down(lab.name)


@privileged
def test_a_testbed_stays_from_up_to_down_and_no_longer(lab: Lab) -> None:
    made = lab.json("up", lab.file)
    assert (made["testbed"], made["state"], made["owner"]) == (lab.name, "kept", None)
    assert [(host["host"], host["address"]) for host in made["hosts"]] == [
        ("a", "10.77.0.1"),
        ("b", "10.77.0.2"),
    ]
    assert [(host["link_mbit"], host["cpu"]) for host in made["hosts"]] == [(100, None), (None, 0.5)]
    assert lab.json("status", lab.name) == [made]
    assert lab.json("down", lab.name) == {"removed": [lab.name]}
    assert traces_of(lab.name) == []


@privileged
def test_exec_ends_as_its_command_does(lab: Lab) -> None:
    lab.run("up", lab.file)
    who = "import socket, sys; print(socket.gethostname(), *sys.argv[1:]); sys.exit(7)"
    done = lab.run("exec", "--name", lab.name, "b", "--", sys.executable, "-c", who, "--", "-x")
    assert (done.returncode, done.stdout) == (7, "b -- -x\n")
    asked = lab.run("exec", "--json", "--name", lab.name, "a", "sh", "-c", "echo out; echo err >&2; exit 3")
    answer = json.loads(asked.stdout)
    assert (asked.returncode, answer["exit"], answer["out"], answer["err"]) == (3, 3, "out\n", "err\n")
    assert lab.run("exec", "--name", lab.name, "a", "--", "no-such-command").returncode == 127


@privileged
def test_cut_heal_and_kill_are_told_by_status(lab: Lab) -> None:
    lab.run("up", lab.file)
    bed = Testbed.find(lab.name)
    assert lab.json("cut", "a", "--name", lab.name) == {"host": "a", "cut": True}
    assert [host["cut"] for host in lab.json("status", lab.name)[0]["hosts"]] == [True, False]
    assert lab.json("heal", "a", "--name", lab.name) == {"host": "a", "cut": False}
    sleeper = bed["b"].popen(["sleep", "60"])
    killed = lab.json("kill", "b", "--name", lab.name)["killed"]
    sleeper.wait(20)
    assert killed in ([sleeper.pid], [])  # none, if it had not come so far as to be on the host
    status = lab.json("status", lab.name)[0]["hosts"]
    assert [(host["cut"], host["processes"]) for host in status] == [(False, []), (False, [])]


@privileged
def test_the_table_for_people_shows_every_host(lab: Lab) -> None:
    done = lab.run("up", lab.file)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines() if " 10.77." in line] == ["a", "b"]
    assert "100 Mbit/s" in done.stdout


@privileged
@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("up", "none.toml"), "cannot read the testbed file none.toml"),
        (("up", "bed.toml"), "is up already. Take it down first"),
        (("cut", "c", "--name", "NAME"), "unknown host 'c'. Available: a, b."),
        (("exec", "--name", "no-such", "a", "true"), "unknown testbed 'no-such'."),
        (("down", "no-such"), "unknown testbed 'no-such'."),
        (("down", "--all", "--stale"), "NAME, --all and --stale each say what to take down"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], complaint: str
) -> None:
    monkeypatch.chdir(lab.folder)
    Testbed.up(load_spec(lab.file), keep=True)
    done = CliRunner().invoke(app, ["testbed", *(arg.replace("NAME", lab.name) for arg in args)])
    assert done.exit_code == 2
    (line,) = error_lines(done.stderr)
    assert complaint in line


@privileged
@pytest.mark.parametrize("args", [["up", "bed.toml"], ["down", "--all"]])
@pytest.mark.parametrize(
    ("bare", "complaint"),
    [
        (["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"], "lacks CAP_NET_ADMIN"),
        (["unshare", "--user"], "only root may"),  # who has no name here is nobody
    ],
)
def test_without_privileges_one_sentence_says_so(
    lab: Lab, bare: list[str], complaint: str, args: list[str]
) -> None:
    line = [*bare, str(COMMAND), "testbed", *args]
    done = subprocess.run(line, cwd=lab.folder, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    (error,) = error_lines(done.stderr)
    assert complaint in error
    assert traces_of(lab.name) == []


@pytest.mark.parametrize("command", ["up", "exec", "cut", "heal", "kill", "status", "down"])
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, ["testbed", command, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.stdout
