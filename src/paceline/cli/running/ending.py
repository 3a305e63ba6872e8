"""How a run that did not end well is told: what happened, where to read on, and how to go on."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

from paceline.config import RunConfig
from paceline.engines.control import Ended
from paceline.errors import ConfigError, RunError, RunStopped, TraceError
from paceline.store.disk import folders
from paceline.store.ledger import run_not_begun
from paceline.trace import Result, Tally, read_trace, tally
from paceline.trace.files import LineTail
from paceline.trace.life import owner_of, write_ending, write_result
from paceline.trace.tally import Failure

GONE_S, SAVED_S = 5.0, 60.0
"""How long the processes of a run may take to go when they were killed, and when a store of which whoever
started it is gone still has to save the run."""
CRASH_BYTES = 1 << 16
"""What a crash writes to the log at most, in a script of not too many threads."""
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
"""How a process ends by its own doing, and not because somebody killed it."""


def finish(config: RunConfig, ended: Ended) -> Result:
    """The result of a run whose processes are gone; raises what went wrong."""
    total = _added_up(config)
    if total is None or total.end is None:
        error = _lost_store(config, ended)
        _write_down(config, str(error))
        raise error
    result = write_result(config.path)
    places = _places(config, ended)
    if result.status == "finished":
        for place in places:
            print(f"warning: {place}", file=sys.stderr)
        _check_crashed(config, ended)
        _check_late(config, ended, result)
        return result
    if total.end.user_mistake:
        raise ConfigError(total.end.detail + go_on(config))
    if result.status == "stopped":
        raise RunStopped(f"{total.end.detail}.{go_on(config)}")
    signals = {rank: -code for rank, code in ended.statuses.items() if code < 0}
    killed = "".join(f" {_by_signal(config, rank, number)}" for rank, number in signals.items())
    why = _why(total.failures, total.end.detail)
    read = " ".join(places) or f"Read {config.path}/logs/."
    engine = f" {ended.detail}." if ended.detail else ""
    raise RunError(f"{total.end.detail.rstrip('.')}{why}.{killed}{engine} {read}{go_on(config)}")


def _check_crashed(config: RunConfig, ended: Ended) -> None:
    """A worker that crashed is a failure, though to the others it was one more that is gone."""
    crashed = {rank: -code for rank, code in sorted(ended.statuses.items()) if -code in CRASHES}
    if crashed:
        told = " ".join(_by_signal(config, rank, number) for rank, number in crashed.items())
        logs = " and ".join(f"{config.path}/logs/rank{rank}.log" for rank in crashed)
        raise RunError(f"{told} The others finished without it. Read {logs}.{go_on(config)}")


def _check_late(config: RunConfig, ended: Ended, result: Result) -> None:
    """A script may raise after it has left the run, which then cannot know of it."""
    known = {failure.worker for failure in result.failures}
    late = sorted(rank for rank, status in ended.statuses.items() if status > 0 and rank not in known)
    if late:
        who = ", ".join(f"rank {rank}" for rank in late)
        logs = " and ".join(f"{config.path}/logs/rank{rank}.log" for rank in late)
        raise RunError(
            f"the run finished, and its weights are saved; but the script of {who} failed after it had left. "
            f"Read {logs}."
        )


def cut_short(config: RunConfig, why: str, patience_s: float) -> None:
    """Whoever started the run's processes is gone, or ends them at once: write the end that nobody else will.

    Unless the run has written one itself by then.
    """
    owner, until = owner_of(config.path), time.monotonic() + patience_s
    while owner is not None and owner.alive and time.monotonic() < until:
        time.sleep(0.02)
    if owner is not None and owner.alive:
        return
    total = _added_up(config)
    if total is None or total.end is None:
        _write_down(config, why, "stopped")
    else:
        write_result(config.path)


def check_ranks(config: RunConfig, result: Result) -> None:
    """A run that finished although the script raised in some rank is not a success."""
    failed = [each for each in result.failures if each.reason == "failed"]
    if not failed:
        return
    told = "; ".join(f"rank {each.worker} failed: {each.detail.rstrip('.')}" for each in failed)
    logs = " and ".join(f"{config.path}/logs/rank{each.worker}.log" for each in failed)
    raise RunError(f"{told}. The others finished without it. Read {logs}.{go_on(config)}")


def go_on(config: RunConfig) -> str:
    """How to, if there is a checkpoint to go on from, and the run has done more than it began with."""
    total = _added_up(config)
    return folders.go_on(config) if total is not None and total.pushes else ""


def _write_down(config: RunConfig, detail: str, status: str = "failed") -> None:
    write_ending(config.path, status, detail, lambda: run_not_begun(config, config.cluster is not None))
    write_result(config.path)


def _added_up(config: RunConfig) -> Tally | None:
    try:
        return tally(read_trace(config.path))
    except TraceError:
        return None


def _lost_store(config: RunConfig, ended: Ended) -> RunError:
    name, status = "store", ended.store_status
    if status == 0 and ended.statuses:  # a lone worker has no store
        rank, status = max(ended.statuses.items(), key=lambda each: (each[1] != 0, -each[0]))
        name = f"rank{rank}"
    log = config.path / "logs" / f"{name}.log"
    who = "the store" if name == "store" else f"rank {name.removeprefix('rank')}"
    how = f"by {_signal_name(-status)}" if status < 0 else f"with status {status}"
    lines = [line.decode(errors="replace") for line in LineTail(log).new_lines()]
    last = "".join(f": {line.rstrip('.')}" for line in lines[-1:]) if name == "store" else ""
    return RunError(f"{who} ended {how}{last}. Read {log}.{go_on(config)}")


def _places(config: RunConfig, ended: Ended) -> list[str]:
    """Where workers that failed were, if not all were here, and what to read."""
    failed = sorted(rank for rank in ended.hosts if ended.statuses.get(rank, 0) != 0)
    logs = config.path / "logs"
    return [f"Rank {rank} was on host {ended.hosts[rank]}; read {logs}/rank{rank}.log." for rank in failed]


def _why(failures: list[Failure], said: str) -> str:
    details = dict.fromkeys(failure.detail for failure in failures)
    return "".join(f"; {text}" for text in details if text and text not in said)


def _by_signal(config: RunConfig, rank: int, number: int) -> str:
    return f"Rank {rank} ended by {_signal_name(number)}{_crash_site(config, rank)}."


def _crash_site(config: RunConfig, rank: int) -> str:
    """Where in the script a worker crashed, which its log tells."""
    log = config.path / "logs" / f"rank{rank}.log"
    name = Path(config.script or "").name
    last = log.read_bytes()[-CRASH_BYTES:].decode(errors="replace") if log.exists() else ""
    _, fatal, told = last.rpartition("Fatal Python error: ")
    found = re.search(rf'File "[^"]*/{re.escape(name)}", line (\d+)', told)
    return f" in {name}, line {found[1]}" if fatal and found is not None else ""


def _signal_name(number: int) -> str:
    return signal.Signals(number).name
