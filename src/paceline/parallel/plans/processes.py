"""Starts one process per rank, connected by gloo, and collects what each of them returns.

A task is named `module:function` and takes (rank, size, request); request and answer are plain JSON, in
files of a private folder that is removed at the end. Nothing listens beyond the loopback interface. If
one rank fails, the others are ended and its own words are the error."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.decoding import decode_json
from paceline.errors import ConfigError, RunError
from paceline.fabric.presence import Allowance
from paceline.parallel.plans.forked import ForkedRank, RankProcesses
from paceline.parallel.torn import is_torn

LOOK_S = 0.05
GRACE_S = 3.0
"""How long the others have to fail by themselves when one rank has."""
MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""What is freed goes back at once, so that the memory of a process is that of its tensors."""

Ranks = Sequence[subprocess.Popen[bytes] | ForkedRank]
Start = Callable[[str, int, Path, Path, dict[str, str]], contextlib.AbstractContextManager[Ranks]]


def run_ranks(
    task: str,
    count: int,
    request: Any,
    *,
    timeout_s: float | None = None,
    logs: Path | None = None,
    look: Callable[[], None] = lambda: None,
    paths: tuple[str, ...] = (),
    forked: bool = False,
) -> list[Any]:
    """What every rank returned. `logs`: where the ranks' own output is kept, `look` is called while
    waiting. `forked`: torch is imported once for all, which is faster, but their memory is not their own."""
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as made:
        folder = Path(made)
        logs = logs or folder
        (folder / "request.json").write_bytes(msgspec.json.encode(request))
        logs.mkdir(parents=True, exist_ok=True)
        start: Start = _forked if forked else _started
        with start(task, count, folder, logs, _environment(paths)) as started:
            failed = _wait(started, timeout_s, look)
            if failed:
                raise _failure(started, failed, folder, logs)
        return [decode_json((folder / f"{rank}.json").read_bytes()) for rank in range(count)]


def _environment(paths: tuple[str, ...]) -> dict[str, str]:
    found = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return MEMORY | os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": found}


@contextlib.contextmanager
def _forked(
    task: str, count: int, folder: Path, logs: Path, environment: dict[str, str]
) -> Iterator[list[ForkedRank]]:
    processes = RankProcesses([task, str(count), str(folder)], count, logs, environment)
    started = [ForkedRank(processes, rank) for rank in range(count)]
    try:
        yield started
    finally:
        for rank in started:
            rank.kill()
        processes.close()


@contextlib.contextmanager
def _started(
    task: str, count: int, folder: Path, logs: Path, environment: dict[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "paceline.parallel.plans.rank",
        task,
        str(count),
        str(folder),
        str(os.getpid()),
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            with (logs / f"rank{rank}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [*command, str(rank)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment,
                    )
                )
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def _wait(started: Ranks, timeout_s: float | None, look: Callable[[], None]) -> dict[int, int]:
    """Until all have ended; those that outlive a failed one, or the time there is, are ended. Which ranks
    failed by themselves, and at which look that was seen."""
    patience = None if timeout_s is None else Allowance(timeout_s)
    grace = None
    failed: dict[int, int] = {}
    for number in itertools.count():
        statuses = [process.poll() for process in started]
        if grace is None and any(statuses):
            grace = Allowance(GRACE_S)
        failed = {rank: number for rank, status in enumerate(statuses) if status} | failed
        look()
        if None not in statuses:
            break
        if any(limit is not None and limit.over for limit in (patience, grace)):
            for process in started:
                process.kill()
                process.wait()
            if not failed:
                assert timeout_s is not None
                raise RunError(
                    f"the {len(started)} ranks did not end within {timeout_s:g} s, and were ended."
                )
            break
        time.sleep(LOOK_S)
    return failed


def _failure(started: Ranks, failed: dict[int, int], folder: Path, logs: Path) -> RunError | ConfigError:
    """Of the rank that failed first; one whose exchange broke off lost another rank, and is not the cause."""
    files = {rank: folder / f"{rank}.error" for rank in failed}
    told = {
        rank: file.read_text(errors="replace").partition("\n")
        for rank, file in files.items()
        if file.exists()
    }
    torn = {rank for rank, (_, _, text) in told.items() if is_torn(text)}
    rank = min(failed, key=lambda each: (each in torn, failed[each], each not in told, each))
    if rank in torn:
        why = re.sub(r"\[[^\]]*gloo[^\]]*\] *", "", told[rank][2])
        return RunError(f"rank {rank} cannot exchange tensors with the others any more ({why}).")
    if rank in told:
        kind, _, text = told[rank]
        return ConfigError(text) if kind == "config" else RunError(f"rank {rank}: {text}")
    status = started[rank].returncode or 0
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    lines = (logs / f"rank{rank}.log").read_text(errors="replace").strip().splitlines()
    return RunError(f"rank {rank} {how}{': ' + lines[-1] if lines else ', without a message'}.")
