"""Why a run stalls (`paceline why`): who waits for whom, since when, and in which call each worker is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline.config import config_of
from paceline.decoding import decode_json
from paceline.errors import Undecodable
from paceline.store.disk.folders import resume_command
from paceline.trace import Tally
from paceline.trace.life import Process, owner_of, read_tally
from paceline.trace.tally import Failure
from paceline.trace.waits import ANSWER, REQUEST, RunNow, WorkerNow, names, waiting_words
from paceline.view import figures
from paceline.view.stacks import Thread, ask_for_stacks, own_frames, process_state

ANSWER_S = 4.0
"""How long the store may take to answer: it looks once a second, unless it is busy."""
FRAMES_SHOWN = 12
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a device", "": "gone"}


class WorkerWhereabouts(msgspec.Struct, frozen=True):
    """One worker, and where it is."""

    rank: int
    pid: int
    here: bool
    state: str
    call: str
    since_s: float
    iteration: int
    waits_for: tuple[int, ...]
    waited_for_by: tuple[int, ...]
    process: str
    """Its state, as in `ps`; empty if it is gone or on another host."""
    threads: tuple[Thread, ...]
    """The main one first, their innermost calls first; empty if it could not be asked."""
    note: str = ""
    """Why not."""


class Why(msgspec.Struct, frozen=True):
    """What is to be said about a run."""

    run: str
    folder: str
    status: str
    detail: str
    seconds: float
    protocol: str | None
    resume: str | None
    """The command to go on with, if there is a checkpoint."""
    failures: list[Failure]
    store: str
    """What is wrong with the store; empty: nothing, or the run is over."""
    workers: tuple[WorkerWhereabouts, ...]


def why(folder: Path) -> Why:
    """Look at a run, whatever its state."""
    total = _tally(folder)
    owner, config = owner_of(folder), config_of(folder)
    result = total.result() if total is not None and total.start is not None else None
    status = result.status if result is not None else "preparing"
    if status == "preparing" and owner is not None and not owner.alive:
        status = "interrupted"
    running = status in ("running", "preparing")
    lone = config.workers == 1 and config.listen is None
    now, trouble = _ask(folder, owner) if running and not lone else (None, "")
    workers = (now.workers if now is not None else _from_trace(total)) if running else ()
    if (
        running and lone and owner is not None and total is not None
    ):  # nobody waits for it; it is its own owner
        silent_s = max(0.0, time.time() - (folder / "trace.jsonl").stat().st_mtime)
        workers = (WorkerNow(0, owner.pid, True, "computing", "", silent_s, total.clock.get(0, 0)),)
    return Why(
        run=result.run if result is not None else folder.name,
        folder=str(folder),
        status=status,
        detail=total.end.detail if total is not None and total.end is not None else "",
        seconds=now.seconds if now is not None else result.seconds if result is not None else 0.0,
        protocol=result.protocol if result is not None else None,
        resume=None if running else resume_command(config),
        failures=result.failures if result is not None else [],
        store=trouble,
        workers=_standing(folder, workers, owner_of(folder)),
    )


def _tally(folder: Path) -> Tally | None:
    """None: the trace has not begun."""
    path = folder / "trace.jsonl"
    return read_tally(folder) if path.exists() and path.stat().st_size else None


def _ask(folder: Path, owner: Process | None) -> tuple[RunNow | None, str]:
    """What the store says, or what keeps it from answering."""
    answer = folder / ANSWER
    try:
        answer.unlink(missing_ok=True)
        (folder / REQUEST).touch()
    except OSError as error:
        return None, f"it cannot be asked: {error}"
    until = time.monotonic() + ANSWER_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError, Undecodable):
            return decode_json(answer.read_bytes(), kind=RunNow), ""
        time.sleep(0.02)
    (folder / REQUEST).unlink(missing_ok=True)
    state = process_state(owner.pid) if owner is not None and owner.here else ""
    how = f"; its process {owner.pid} is {STATES.get(state, 'there')}" if owner is not None and state else ""
    return None, f"it has not answered for {ANSWER_S:g} s{how}. What follows is from the trace"


def _from_trace(total: Tally | None) -> tuple[WorkerNow, ...]:
    """What the last events tell: less than the store knows."""
    if total is None:
        return ()
    workers = []
    for rank, pid in sorted(total.pids.items()):
        waiting = rank in total.waiting_since
        since = total.now - total.waiting_since[rank] if waiting else 0.0
        state, call = ("waiting", "optimizer.step") if waiting else ("computing", "")
        workers.append(WorkerNow(rank, pid, True, state, call, since, total.clock.get(rank, 0)))
    return tuple(workers)


def _standing(
    folder: Path, workers: tuple[WorkerNow, ...], owner: Process | None
) -> tuple[WorkerWhereabouts, ...]:
    near = owner is not None and owner.here
    asked = {each.pid: f"rank{each.rank}" for each in workers if each.here and near}
    told = ask_for_stacks(folder, asked)
    return tuple(_one(each, workers, each.pid in asked, told.get(each.pid, ())) for each in workers)


def _one(
    each: WorkerNow, all_: tuple[WorkerNow, ...], here: bool, threads: tuple[Thread, ...]
) -> WorkerWhereabouts:
    state = process_state(each.pid) if here else ""
    by = tuple(other.rank for other in all_ if each.rank in other.waits_for)
    note = "" if threads else _no_stack(each.pid, here, state)
    plain = each.state, each.call, each.since_s, each.iteration, each.waits_for
    return WorkerWhereabouts(each.rank, each.pid, here, *plain, by, state, threads, note)


def _no_stack(pid: int, here: bool, state: str) -> str:
    if not here:
        return "it is on another host: ask there, or read its log"
    if state == "T":
        return f"a stopped process cannot report where it is; `kill -CONT {pid}` lets it continue"
    return "its process is gone" if not state else "it did not report where it is"


def lines(told: Why) -> Iterator[str]:
    """The same for people."""
    protocol = f" · {told.protocol}" if told.protocol else ""
    yield f"{told.run}{protocol} · {told.status} · {figures.stopwatch(told.seconds)}"
    if told.detail:
        yield told.detail
    if told.status == "interrupted":
        yield "Its processes are gone, and none of them recorded how it ended."
    if told.status not in ("running", "preparing", "finished"):
        yield f"Go on with: {told.resume}" if told.resume else "It left no checkpoint."
    for failure in told.failures:
        yield f"rank {failure.worker} {failure.reason} at {figures.stopwatch(failure.t)}: {failure.detail}"
    if told.store:
        yield f"the store: {told.store}."
    for each in sorted(told.workers, key=_awaited_first):
        yield from _worker_lines(each)


def _awaited_first(each: WorkerWhereabouts) -> tuple[bool, bool, int]:
    return not each.waited_for_by, each.state == "waiting", each.rank


def _worker_lines(each: WorkerWhereabouts) -> Iterator[str]:
    since = figures.stopwatch(each.since_s)
    yield ""
    if each.state == "waiting":
        awaited = f"on {names(each.waits_for)} " if each.waits_for else ""
        yield f"rank {each.rank} waits {awaited}for {since}, in {each.call} (iteration {each.iteration:,})"
    else:
        after = f", last heard in {each.call}" if each.call else ""
        yield f"rank {each.rank} is {each.state} for {since}{after} (iteration {each.iteration:,})"
        yield f"  {waiting_words(each.waited_for_by)}"
    if each.process in STATES and each.here:
        yield f"  its process {each.pid} is {STATES[each.process]}"
    if each.note:
        yield f"  no stack: {each.note}"
    for thread in each.threads if each.state != "waiting" else each.threads[:1]:
        yield from _thread_lines(thread, inner=each.state != "waiting")


def _thread_lines(thread: Thread, inner: bool) -> Iterator[str]:
    """`inner`: with the calls of Paceline's own that lead to where it waits."""
    if not thread.main:
        yield f"  another thread ({thread.id}):"
    frames = own_frames(thread, inner)
    for frame in frames[:FRAMES_SHOWN]:
        yield f"    {frame}"
    if len(frames) > FRAMES_SHOWN:
        yield f"    ... {len(frames) - FRAMES_SHOWN} more, see --json"
