"""A protocol of one's own in real runs: named or given to join, replayed, resumed, on another host."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from paceline.engines.local import LocalEngine
from paceline.errors import ConfigError
from paceline.protocols import own
from paceline.trace import read_trace
from paceline.trace.events import Note, RunStarted
from support import own_rules
from support.hosts import Apart
from support.runs import SCRIPTS, Lab
from support.shell import Shell

SCRIPT = SCRIPTS / "train.py"
ARGS = ("--", "momentum", "--samples", 48, "--epochs", 2)
GIVEN = """
import sys

sys.path.insert(0, {scripts!r})
import paceline
from rules import {cls}

join, paceline.join = paceline.join, lambda: join({cls}({settings}))
exec(open({script!r}).read())
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    return Path(shutil.copy(own_rules.__file__, tmp_path / "rules.py"))


def given(rules: Path, cls: str, settings: str) -> Path:
    """The script, which names an object in join()."""
    text = GIVEN.format(scripts=str(SCRIPTS), script=str(SCRIPT), cls=cls, settings=settings)
    script = rules.with_name("given.py")
    script.write_text(text)
    return script


def started(run: str) -> RunStarted:
    start = next(read_trace(Path(run)))
    assert isinstance(start, RunStarted)
    return start


def warnings(folder: Path) -> list[str]:
    return [
        event.text for event in read_trace(folder) if isinstance(event, Note) and event.level == "warning"
    ]


@pytest.mark.parametrize(("cls", "setting"), [("HalfWay", "near=3"), ("Belt", "every=5")])
def test_it_trains_and_replays_to_the_same_bits_and_a_changed_file_is_told_of(
    shell: Shell, rules: Path, cls: str, setting: str
) -> None:
    unequal = ("-n", 3, "--slow", "2:2", "--device-time", 0.004)
    done = shell("train", SCRIPT, "-p", f"{rules}:{cls}", "--set", setting, *unequal, *ARGS)
    assert done.code == 0, done.err
    start = started(done.out.strip())
    name, _, value = setting.partition("=")
    assert (start.protocol, start.settings) == (f"{rules}:{cls}", {name: int(value)})
    assert start.family == ("peer" if cls == "Belt" else "paced")
    again = shell("replay", done.out.strip(), "--json")
    assert again.code == 0, again.err
    assert again.json["identical"] is True
    assert not warnings(shell.runs / "latest")
    rules.write_text(rules.read_text() + "\n# another file\n")
    changed = shell("replay", done.out.strip(), "--json")
    assert changed.json["identical"] is True, "only a comment was added"
    assert "has changed: the record was made with another" in changed.err
    assert any("has changed" in text for text in warnings(shell.runs / "latest"))


@pytest.mark.parametrize(
    ("cls", "settings", "name"), [("HalfWay", "near=4", "near"), ("Belt", "every=4", "every")]
)
def test_an_object_given_to_join_decides_and_the_commands_settings_win(
    shell: Shell, rules: Path, cls: str, settings: str, name: str
) -> None:
    script = given(rules, cls, settings)
    done = shell("train", script, "-n", 2, *ARGS)
    assert done.code == 0, done.err
    assert started(done.out.strip()).protocol == f"{rules}:{cls}"
    assert started(done.out.strip()).settings == {name: 4}
    won = shell("train", script, "-n", 2, "--set", f"{name}=9", *ARGS)
    assert started(won.out.strip()).settings == {name: 9}


def test_a_class_in_the_script_itself_needs_a_script_that_can_be_loaded(shell: Shell, tmp_path: Path) -> None:
    rule = Path(own_rules.__file__).read_text()
    body = f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nimport train\n"
    patched = "import paceline\njoin, paceline.join = paceline.join, lambda: join(HalfWay(near=1))\n"
    script = tmp_path / "all_in_one.py"
    script.write_text(f"{rule}\n{patched}{body}")
    refused = shell("train", script, "-n", 2, *ARGS)
    assert refused.code == 2
    assert "all_in_one.py raised SystemExit when it was loaded" in refused.error
    assert "belongs under `if __name__ == '__main__'`" in refused.error
    guarded = "".join(f"    {line}\n" for line in (patched + body).splitlines())
    script.write_text(f"{rule}\nif __name__ == '__main__':\n{guarded}")
    done = shell("train", script, "-n", 2, *ARGS)
    assert done.code == 0, done.err
    assert started(done.out.strip()).protocol == f"{script}:HalfWay"


def test_several_are_compared_and_simulated_with_settings_after_colons(shell: Shell, rules: Path) -> None:
    asked = f"bsp,{rules}:HalfWay:near=3,{rules}:Belt"
    compared = shell("compare", SCRIPT, "--protocols", asked, "-n", 2, "--json", *ARGS)
    assert compared.code == 0, compared.err
    simulated = shell("simulate", "-p", asked, "-n", 4, "--iterations", 5, "--json")
    exact = shell("simulate", SCRIPT, "-p", asked, "-n", 2, "--json", *ARGS)
    for answer in (compared, simulated, exact):
        assert [each["protocol"] for each in answer.json] == ["bsp", f"{rules}:HalfWay", f"{rules}:Belt"]
        assert [each["settings"] for each in answer.json[1:]] == [{"near": 3}, {"every": 100}]
    assert all("rules.py" not in folder.name for folder in shell.runs.iterdir())


@pytest.mark.parametrize("command", [("train", SCRIPT), ("compare", SCRIPT), ("simulate",), ("protocols",)])
def test_a_mistake_ends_every_command_with_one_line(
    shell: Shell, rules: Path, command: tuple[object, ...]
) -> None:
    name, *args = map(str, command)
    flag = {"protocols": (), "compare": ("--protocols",)}.get(name, ("-p",))
    for what, words in (
        ("Nope", "no class 'Nope'"),
        ("Unfrozen", "not frozen"),
        ("Nothing", "not a protocol"),
    ):
        refused = shell(name, *args, *flag, f"{rules}:{what}")
        assert refused.code == 2
        assert words in refused.error
        assert refused.out == ""
    rules.write_text("def broken(:\n")
    refused = shell(name, *args, *flag, f"{rules}:HalfWay")
    assert refused.code == 2
    assert "rules.py, line 1: invalid syntax" in refused.error


@pytest.mark.parametrize("cls", ["HalfWay", "Belt"])
def test_a_stopped_run_goes_on_with_it_and_tells_of_a_changed_file(lab: Lab, rules: Path, cls: str) -> None:
    pause = ("--pause", lab.root / "go on", "--before", 6)
    sizes = ("momentum", "--samples", 96, "--epochs", 2)
    dials = {"workers": 2, "protocol": f"{rules}:{cls}"}
    running = lab.start("train.py", *sizes, *pause, **dials)
    lab.until_paused(2)
    running.stop()
    (lab.root / "go on").touch()
    first = lab.finish(running)
    assert first.result.status == "stopped", first.end
    checkpoint = str(first.folder / "checkpoint")
    second = lab.trained("train.py", *sizes, resume=checkpoint, **dials)
    assert not warnings(second.folder)
    rules.write_text(rules.read_text() + "\n# another file\n")
    third = lab.trained("train.py", *sizes, resume=checkpoint, **dials)
    assert any("has changed: the checkpoint was made with another" in text for text in warnings(third.folder))


# -- other hosts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def elsewhere(warm_lab: Lab) -> Iterator[LocalEngine]:
    engine = LocalEngine()
    warm_lab.further.add(engine._process.pid)
    yield engine
    warm_lab.further.discard(engine._process.pid)
    engine.close()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_workers_of_another_host_use_the_file_there(lab: Lab, elsewhere: LocalEngine, rules: Path) -> None:
    sizes = ("momentum", "--samples", 48, "--epochs", 2)
    name = f"{rules}:Belt"
    apart = Apart(lab, elsewhere, "train.py", *sizes, here=1, workers=2, protocol=name)
    apart.host(1)
    run = apart.finish()
    assert run.result.status == "finished", run.end.detail


def test_a_file_that_is_not_the_one_the_run_was_started_with_is_refused(lab: Lab, rules: Path) -> None:
    dials = {"workers": 2, "protocol": f"{rules}:Belt", "protocol_sha256": "0" * 64}
    run = lab.run("train.py", "momentum", **dials)
    assert "is not the same everywhere" in run.end.detail
    assert run.end.user_mistake


def test_a_file_that_only_another_host_names_is_never_loaded(tmp_path: Path) -> None:
    from paceline.config import RunConfig
    from paceline.runtime.messages.workers import Hello
    from paceline.runtime.run.member import Member
    from paceline.runtime.run.start import RunStart

    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    gathering = RunStart(RunConfig(run="r", folder=str(tmp_path), workers=2))
    gathering.hello(Member(1, Elsewhere(), 1), Hello(1, f"{trap}:Trap", {}, 1))
    with pytest.raises(ConfigError, match="code is never loaded because another host says so"):
        _ = gathering.protocol
    assert own.known(f"{trap}:Trap") is None
    assert not (tmp_path / "sprung").exists()


class Elsewhere:
    """The way to a worker on another host."""

    def send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
