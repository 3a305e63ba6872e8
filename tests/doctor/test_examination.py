"""What the doctor says of this machine, and of hosts without a counterpart."""

from __future__ import annotations

import re
import socket
import ssl
import tomllib
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.doctor.findings import Finding, worst
from paceline.doctor.installed import (
    NEEDS,
    PYTHON,
    TORCH,
    Need,
    check_package,
    check_python,
    check_torch,
    installed_version,
)
from paceline.doctor.machine import check_machine
from paceline.doctor.reach import check_host
from paceline.doctor.tls import check_certificate, check_tls
from support.certificates import Authority

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_needed_is_what_the_project_says_it_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    told = {f"{need.package}>={need.least}" for need in (*NEEDS, TORCH) if not need.purpose}
    assert told == {need.partition(",")[0] for need in project["dependencies"]}
    assert project["requires-python"] == f">={PYTHON[0]}.{PYTHON[1]}"


def test_a_package_that_is_missing_or_old_says_how_to_install_it() -> None:
    missing, optional = Need("no-such-package", "1.0"), Need("no-such-package", "1.0", "flying")
    assert check_package(missing).state == "problem"
    assert "pip install 'no-such-package>=1.0'" in check_package(missing).advice
    assert check_package(optional).state == "ok"
    assert "Only for flying" in check_package(optional).advice
    old, dated = Need("msgspec", "999.1"), Need("msgspec", "999.1", "flying")
    assert (check_package(old).state, check_package(dated).state) == ("problem", "warning")
    assert check_package(old).seen == installed_version("msgspec")


def test_versions_are_compared_as_numbers() -> None:
    newer = re.sub(r"^\d+", lambda found: f"0.{found[0]}", installed_version("msgspec") or "1")
    assert check_package(Need("msgspec", newer)).state == "ok"
    assert check_package(Need("msgspec", "0.9")).state == "ok"  # 0.19 is newer, though not as a text


def test_this_machine_is_fit_for_these_tests() -> None:
    findings = [check_python(), check_torch(), *check_machine()]
    assert [finding for finding in findings if finding.state == "problem"] == []
    assert all(finding.advice for finding in findings if finding.state != "ok")
    assert len({finding.check for finding in findings}) == len(findings)


def test_a_refused_connection_shows_that_a_host_is_there() -> None:
    finding = check_host("127.0.0.1")
    assert finding.state == "ok"
    assert "answers within" in finding.seen


def test_a_port_that_was_asked_for_has_to_be_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert check_host(f"127.0.0.1:{port}").state == "ok"
    closed = check_host(f"127.0.0.1:{port}")
    assert (closed.state, closed.seen) == ("problem", f"127.0.0.1 refuses port {port}")


def test_a_name_that_does_not_resolve_is_a_problem() -> None:
    finding = check_host("no-such-host.invalid")
    assert finding.state == "problem"
    assert "does not resolve" in finding.seen
    assert "/etc/hosts" in finding.advice


def test_tls_is_tried_with_a_certificate_made_as_a_run_would(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_tls().seen == f"{ssl.OPENSSL_VERSION}, TLSv1.3"
    assert not check_tls().advice
    monkeypatch.setenv("PATH", "")
    without = check_tls()
    assert without.state == "ok"
    assert "need --plain" in without.advice
    assert "Install it" in without.advice


def test_a_certificate_is_looked_at_before_a_run_needs_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    good, soon = authority.sign("good", "IP:127.0.0.1", 30), authority.sign("soon", "IP:127.0.0.1", 2)
    late = authority.sign("late", "IP:127.0.0.1", -1)
    states = [check_certificate(*map(Path, each)).state for each in (good, soon, late)]
    assert states == ["ok", "warning", "problem"]
    assert "for 127.0.0.1, until" in check_certificate(*map(Path, good)).seen
    assert "expired" in check_certificate(*map(Path, late)).seen
    for wrong in ((good[0], soon[1]), (str(tmp_path / "none.pem"), good[1])):
        finding = check_certificate(*map(Path, wrong))
        assert finding.state == "problem"
        assert wrong[0] in finding.advice
    done = CliRunner().invoke(app, ["doctor", "--tls-cert", late[0], "--tls-key", late[1], "--json"])
    assert done.exit_code == 1
    assert f"certificate {late[0]}" in {
        item["check"] for item in msgspec.json.decode(done.stdout)["findings"]
    }


def test_one_problem_outweighs_all_else() -> None:
    fine, meh, bad = (Finding("x", state, "", "do") for state in ("ok", "warning", "problem"))
    assert [worst(each) for each in ([], [fine], [fine, meh], [meh, bad, fine])] == [
        "ok",
        "ok",
        "warning",
        "problem",
    ]


def test_the_command_ends_with_1_when_something_is_a_problem() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    answer = msgspec.json.decode(done.stdout)
    assert done.exit_code == (1 if answer["state"] == "problem" else 0)
    assert {"torch", "shared memory", "clock", "loopback", "tls"} <= {
        item["check"] for item in answer["findings"]
    }
    broken = CliRunner().invoke(app, ["doctor", "--host", "no-such-host.invalid"])
    assert broken.exit_code == 1
    assert "no-such-host" in broken.stdout


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["10.0.0.5"], "what of 10.0.0.5? Write --to, --host or --serve before it."),
        (["--once"], "--once says when --serve ends"),
        (["--serve", "--to", "a"], "different errands"),
        (["--to", "a", "--tls-cert", "x", "--tls-key", "y"], "different errands"),
        (["--tls-cert", "x"], "takes --tls-cert and --tls-key, and one is missing"),
        (["--to", "a:b", "--secret-file", "secret"], "an address is HOST or HOST:PORT, got 'a:b'"),
        (["--to", "a", "--secret-file", "none"], "cannot read the secret in none"),
        (["--to", "a"], "none was given. Make one with"),
        (["--to", "a", "--secret-file", "short"], "secret has 5 characters"),
        (["--serve", "203.0.113.7", "--secret-file", "secret"], "cannot listen at 203.0.113.7:29471"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_2(
    args: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_SECRET", raising=False)
    Path("secret").write_text("0123456789abcdef")
    Path("short").write_text("12345")
    done = CliRunner().invoke(app, ["doctor", *args])
    assert done.exit_code == 2
    assert complaint in done.stderr
