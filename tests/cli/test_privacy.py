"""What others may read: no secret, no plain word beyond this machine, and of a run what the umask says."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.running.secret import given_secret
from paceline.cli.train import make_config
from paceline.errors import ConfigError
from paceline.fabric.choice import is_loopback
from paceline.store.disk.tensor_files import umask
from support.runs import SCRIPTS
from support.shell import Shell


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_secret_that_is_made_is_its_owners_only_and_a_second_call_keeps_it(
    shell: Shell, tmp_path: Path
) -> None:
    file = tmp_path / "run.secret"
    assert shell("secret", "--out", file).code == 0
    made = file.read_text()
    assert (mode(file), len(made.strip())) == (0o600, 64)
    file.chmod(0o644)
    again = shell("secret", "--out", file)
    assert (again.code, file.read_text(), mode(file)) == (0, made, 0o600)
    assert "kept" in again.err
    file.write_text("short")
    assert "at least 16" in shell("secret", "--out", file).error


@pytest.mark.parametrize(
    ("permissions", "warned"), [(0o600, False), (0o400, False), (0o640, True), (0o644, True)]
)
def test_a_secret_that_others_can_read_draws_a_warning_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], permissions: int, warned: bool
) -> None:
    file = tmp_path / "run.secret"
    file.write_text("0123456789abcdef0123456789abcdef")
    file.chmod(permissions)
    assert given_secret(file) is not None
    told = capsys.readouterr().err
    assert (f"chmod 600 {file}" in told) == warned
    assert bool(told) == warned


def test_all_files_of_a_run_have_the_permissions_of_the_umask_and_its_secret_has_none(
    shell: Shell, tmp_path: Path
) -> None:
    flags = ("--workers", 2, "--here", 2, "--listen", "127.0.0.1:0", "--bad-gradient", "stop")
    words = ("--", "momentum", "--samples", 16, "--batch", 4, "--epochs", 1)
    assert shell("train", SCRIPTS / "train.py", *flags, *words).code == 0
    run = (shell.runs / "latest").resolve()
    files = {path.name: mode(path) for path in run.rglob("*") if path.is_file()}
    assert files.pop("secret") == 0o600
    assert {"weights.safetensors", "trace.jsonl", "result.json", "rank0.log"} <= set(files)
    assert set(files.values()) == {0o666 & ~umask()}
    assert {mode(path) for path in (run, run / "logs")} == {0o777 & ~umask()}


def asked(tmp_path: Path, **more: Any) -> Any:
    return make_config({"script": "train.py", "workers": 2, "here": 1} | more, tmp_path)


@pytest.mark.parametrize(
    ("listen", "more", "encrypted"),
    [
        ("127.0.0.1:0", {}, False),
        ("localhost:0", {}, False),
        ("[::1]:0", {}, False),
        ("127.0.0.1:0", {"tls": True}, True),
        ("0.0.0.0:0", {}, True),
        ("10.1.2.3:29600", {}, True),
        ("[2001:db8::1]:29600", {}, True),
        ("10.1.2.3:29600", {"plain": True}, False),
        ("no-such-host.invalid:29600", {}, True),
    ],
)
def test_beyond_loopback_a_run_is_encrypted_unless_somebody_says_plain(
    tmp_path: Path, listen: str, more: dict[str, Any], encrypted: bool
) -> None:
    assert asked(tmp_path, listen=listen, **more).tls == encrypted


def test_tls_and_plain_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Give only one of them"):
        asked(tmp_path, listen="127.0.0.1:0", tls=True, plain=True)


def test_a_name_is_loopback_only_if_all_its_addresses_are() -> None:
    assert is_loopback("127.8.9.1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("no-such-host.invalid")
