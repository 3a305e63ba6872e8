"""Starts one process per rank, connected by gloo, and collects what each of them returns.

A task is named `module:function` and takes (rank, size, request); request and answer are plain JSON, in
files of a private folder that is removed at the end. Nothing listens beyond the loopback interface. If
one rank fails, the others are ended and its own words are the error."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import ConfigError, RunError
from paceline.parallel.plans.forked import ForkedRank, RankProcesses

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
            _wait(started, timeout_s, look)
            failed = [rank for rank, process in enumerate(started) if process.returncode]
            if failed:
                raise _failure(started, failed, folder, logs)
        return [msgspec.json.decode((folder / f"{rank}.json").read_bytes()) for rank in range(count)]


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
    command = [sys.executable, "-P", "-m", "paceline.parallel.plans.rank", task, str(count), str(folder)]
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


def _wait(started: Ranks, timeout_s: float | None, look: Callable[[], None]) -> None:
    """Until all have ended; those that outlive a failed one, or the time there is, are ended."""
    end = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    grace = None
    while None in [process.poll() for process in started]:
        look()
        if grace is None and any(process.returncode for process in started):
            grace = time.monotonic() + GRACE_S
            end = min(end, grace)
        if time.monotonic() > end:
            for process in started:
                process.kill()
                process.wait()
        time.sleep(LOOK_S)
    look()


def _failure(started: Ranks, failed: list[int], folder: Path, logs: Path) -> RunError | ConfigError:
    told = {
        rank: (folder / f"{rank}.error").read_text() for rank in failed if (folder / f"{rank}.error").exists()
    }
    for rank, words in sorted(
        told.items(), key=lambda item: ("gloo" in item[1], item[0])
    ):  # the cause comes first
        kind, _, text = words.partition("\n")
        return ConfigError(text) if kind == "config" else RunError(f"rank {rank}: {text}")
    rank = failed[0]
    status = started[rank].returncode or 0
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    lines = (logs / f"rank{rank}.log").read_text(errors="replace").strip().splitlines()
    return RunError(f"rank {rank} {how}{': ' + lines[-1] if lines else ', without a word'}.")
