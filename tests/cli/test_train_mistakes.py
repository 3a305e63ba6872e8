"""What cannot work is refused before anything is started: exit status 2 and one line that says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs import SCRIPTS
from support.shell import Shell

SCRIPT = SCRIPTS / "train.py"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--protocol spp", "unknown protocol 'spp'. Did you mean 'ssp'?"),
        ("--protocol ssp --set stalenes=3", "'stalenes'. Did you mean 'staleness'?"),
        ("--protocol ssp --set staleness=-1", "staleness must be >= 0, got -1"),
        (
            "--protocol ssp --set staleness=many",
            "staleness of protocol 'ssp' takes a whole number, got 'many'",
        ),
        ("--protocol dssp --set lower=9 --set upper=3", "lower=9, upper=3"),
        ("--protocol dssp --set preset=eager", "preset"),
        ("--protocol asp --set staleness=3", "protocol 'asp' has no settings"),
        ("--protocol ssp --set staleness", "--set takes name=value, got 'staleness'"),
        ("--workers 0", "workers must be at least 1, got 0"),
        ("--workers 99999999999999999999", "at most 10000, got 99999999999999999999. Use fewer"),
        ("--seed 99999999999999999999", "less than 62 bits, got 99999999999999999999"),
        ("--workers 4 --slow 4:2", "slow rank 4 does not exist: the ranks are 0 to 3"),
        ("--slow 1:0", "slow factor of rank 1 must be > 0, got 0"),
        ("--slow one:2", "--slow takes rank:factor, got 'one:2'"),
        ("--slow 1", "--slow takes rank:factor, got '1'"),
        ("--device-time 0", "device time must be > 0 seconds, got 0"),
        ("--jitter 1", "jitter must be in [0, 1), got 1"),
        ("--weighting heavy", "--weighting takes mean, sum or a number, got 'heavy'"),
        ("--weighting 0", "weighting must be"),
        ("--clip-norm 0", "clip norm must be > 0, got 0"),
        ("--schedule steps", "'steps'"),
        ("--shards unequal", "'unequal'"),
        ("--bad-gradient ignore", "'ignore'"),
        ("--on-failure wait", "'wait'"),
        ("--fabric glo", "unknown --fabric 'glo'. Did you mean 'gloo'?"),
        ("--protocol allreduce --fabric gloo --workers 1", "connects workers, but there is only 1"),
        ("--protocol ssp --fabric gloo", "protocol 'ssp' is of the paced family"),
        ("--checkpoint-every often", "such as 500, or a time such as 60s, 10m or 1h, got 'often'"),
        ("--checkpoint-every 0", "got '0'"),
        ("--checkpoint-every -3s", "got '-3s'"),
        ("--checkpoint-every nans", "got 'nans'"),
        ("-p hpsgd --checkpoint-every 5", "'hpsgd' as it is set has vectors under way"),
        ("-p ad_psgd --checkpoint-every 5", "lets workers make unequal numbers of iterations"),
        ("-p allreduce --fabric gloo --checkpoint-every 5", "Leave --checkpoint-every or --fabric out"),
        ("-p allreduce --compress fp16 --checkpoint-every 5", "Leave --checkpoint-every or --compress out"),
        ("--engine rai", "unknown --engine 'rai'. Did you mean 'ray'?"),
        ("--store-hosts 0 --listen 127.0.0.1:0", "--store-hosts must be at least 1, got 0"),
        ("--store-hosts 2", "on 2 hosts, but the run does not listen for any. Name an address with --listen"),
        ("-p local_sgd --store-hosts 2 --listen 127.0.0.1:0", "which has no store to lie on several hosts"),
        ("--address 10.0.0.1:6379", "--address 10.0.0.1:6379 is where Ray is reached. Add --engine ray"),
        ("--engine ray --here 1 --listen 127.0.0.1:0", "--engine ray places all of them"),
        (
            "-p local_sgd --fabric gloo --here 1 --listen 127.0.0.1:0",
            "'gloo' does not authenticate connections",
        ),
        ("--tls", "this run does not listen. Add --listen HOST:PORT"),
        (
            "--listen 127.0.0.1:0 --tls --tls-cert a.pem",
            "needs both --tls-cert and --tls-key, and one is missing",
        ),
        ("--listen 127.0.0.1:0 --tls --tls-cert a.pem --tls-key a.key", "cannot use the certificate"),
        (
            "--protocol allreduce --fabric gloo --listen 127.0.0.1:0 --tls",
            "torch.distributed, which does not",
        ),
        ("--resume nowhere", "no checkpoint in"),
        ("-p bps", "Did you mean 'bsp'?"),
    ],
)
def test_an_impossible_request_is_refused(shell: Shell, flags: str, words: str) -> None:
    done = shell("train", SCRIPT, *flags.split())
    assert done.code == 2
    assert words in done.error
    assert done.out == ""
    assert "Traceback" not in done.err
    assert not (shell.runs).exists(), "nothing was started, and yet there is a run"


@pytest.mark.parametrize("script", ["missing.py", "."])
def test_a_script_that_is_not_there_is_refused(shell: Shell, script: str) -> None:
    done = shell("train", script)
    assert done.code == 2
    assert done.error == f"no script at {script}. Give the path of a Python file."


def test_a_folder_that_cannot_hold_runs_is_refused(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = shell("train", SCRIPT, "--runs", tmp_path / "file" / "runs")
    assert done.code == 2
    assert done.error.startswith(f"cannot write runs to {tmp_path}/file/runs: Not a directory.")
    assert "--runs" in done.error


def test_an_unknown_flag_is_refused(shell: Shell) -> None:
    done = shell("train", SCRIPT, "--protocl", "ssp")
    assert done.code == 2
    assert "--protocl" in done.err


@pytest.mark.parametrize("asked", [("compare", SCRIPT, "--protocols"), ("simulate", "--protocol")])
def test_a_list_without_a_protocol_is_refused(shell: Shell, asked: tuple[object, ...]) -> None:
    command, *flags = map(str, asked)
    done = shell(command, *flags, ",")
    assert done.code == 2
    assert "names no protocol, got ','" in done.error


def test_an_option_that_may_be_the_scripts_is_refused_with_where_it_belongs(shell: Shell) -> None:
    done = shell("train", SCRIPT, "--epochs", 3)
    assert done.code == 2
    assert "No such option: --epochs. What is meant for the script comes after --" in done.err
