"""Testbed files: what is read, and one clear sentence for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.testbed import HostSpec, Spec, load_spec
from paceline.testbed.bed import take_down
from paceline.testbed.cpu import Controller, find_controller, limit


def written(folder: Path, text: str) -> Path:
    path = folder / "lab.toml"
    path.write_text(text)
    return path


def test_a_file_becomes_hosts_in_their_order(tmp_path: Path) -> None:
    path = written(tmp_path, "[host.b]\nlink_mbit = 100\n[host.a]\ncpu = 0.5\nlatency_ms = 2\n")
    spec = load_spec(path)
    assert spec == Spec({"b": HostSpec(link_mbit=100), "a": HostSpec(cpu=0.5, latency_ms=2)}, "lab")
    assert list(spec.hosts) == ["b", "a"]


def test_the_name_in_the_file_wins_over_the_files_own(tmp_path: Path) -> None:
    assert load_spec(written(tmp_path, '[testbed]\nname = "two"\n[host.a]\n')).name == "two"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "1 to 250 hosts, got 0"),
        ("[host.a]\nlink_mbits = 3", r"unknown key in \[host.a\]: 'link_mbits'. Did you mean 'link_mbit'"),
        ("[hosts.a]\n", "unknown key in the file: 'hosts'. Did you mean 'host'"),
        ("[testbed]\nnme = 'x'\n[host.a]", r"unknown key in \[testbed\]: 'nme'. Did you mean 'name'"),
        ("[testbed]\nname = 3\n[host.a]", r"name in \[testbed\] must be a text, got 3"),
        ("host = 3", r"\[host\] must be a table of keys and values, got 3"),
        ("[host]\na = 3", r"\[host.a\] must be a table of keys and values, got 3"),
        ("[host.a]\ncpu = 0", r"\[host.a\]: cpu must be from 0.05 to 1024, got 0"),
        ("[host.a]\ncpu = true", "cpu must be a number, got True"),
        ("[host.a]\nlink_mbit = '1G'", "link_mbit must be a number, got '1G'"),
        ("[host.a]\nlink_mbit = nan", "link_mbit must be a number, got nan"),
        ("[host.A]\n", "a host is named with up to 12 lower-case letters.* got 'A'"),
        ("[host.abcdefghijklm]\n", "up to 12 lower-case letters"),
        ("[testbed]\nname = '../x'\n[host.a]", "a testbed is named with"),
        ("[host.a\n", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_value(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as error:
        load_spec(written(tmp_path, text))
    assert "lab.toml" in str(error.value)


@pytest.mark.parametrize("name", ["", ".", "..", "../netns", "/run", "a.b", "a/b"])
def test_nothing_is_removed_by_a_name_that_no_testbed_can_have(name: str) -> None:
    with pytest.raises(ConfigError, match="a testbed is named with"):
        take_down(name)


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the testbed file .*No such file"):
        load_spec(tmp_path / "none.toml")


def mounted(folder: Path, kind: str, options: str) -> Controller | None:
    (folder / "cgroup.controllers").write_text("cpuset cpu io\n")
    mounts = folder / "mounts"
    mounts.write_text(f"tmpfs /tmp tmpfs rw 0 0\n{kind} {folder} {kind} {options} 0 0\n")
    return find_controller(mounts)


def test_either_version_of_control_groups_is_found_by_its_mount(tmp_path: Path) -> None:
    assert mounted(tmp_path, "cgroup", "rw,cpu,cpuacct") == Controller(tmp_path, 1)
    assert mounted(tmp_path, "cgroup2", "rw") == Controller(tmp_path, 2)
    assert mounted(tmp_path, "cgroup", "rw,cpuset") is None


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (1, {"lab/a/cpu.cfs_period_us": "20000", "lab/a/cpu.cfs_quota_us": "10000"}),
        (2, {"lab/a/cpu.max": "10000 20000", "lab/cgroup.subtree_control": "+cpu"}),
    ],
)
def test_half_a_core_is_half_of_every_period(tmp_path: Path, version: int, files: dict[str, str]) -> None:
    procs = limit("lab", "a", 0.5, Controller(tmp_path, version))
    assert procs == tmp_path / "paceline.lab/a/cgroup.procs"
    for path, text in files.items():
        assert (tmp_path / f"paceline.{path}").read_text() == text


def test_control_groups_that_cannot_be_written_are_refused_with_a_remedy(tmp_path: Path) -> None:
    file = tmp_path / "no_folder"
    file.write_text("")
    with pytest.raises(
        ConfigError, match=r"host 'a' asks for cpu = 0\.5, .* cannot be written.* Leave cpu out"
    ):
        limit("lab", "a", 0.5, Controller(file, 1))
