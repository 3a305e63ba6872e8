"""Starts a run on an engine, shows it while it goes on, and adds it up."""

from __future__ import annotations

import errno
import socket
from collections import deque
from pathlib import Path

import msgspec

from paceline.cli.running.common import heed_termination, mute_if_hung_up
from paceline.cli.running.ending import GONE_S, SAVED_S, cut_short, finish
from paceline.config import RunConfig
from paceline.engines.control import Ended
from paceline.engines.engine import Engine
from paceline.errors import EngineLost
from paceline.store.disk.folders import go_on
from paceline.store.disk.reserve import Reserve, free_bytes
from paceline.trace import Result, TraceTail
from paceline.trace.events import LeadPassed, leads_now
from paceline.trace.files import LineTail
from paceline.trace.life import write_result
from paceline.trace.waits import NOTICES
from paceline.view.terminal.progress import RunProgress, live

__all__ = ["conduct", "write_result"]
LOOK_S = 0.1
RESULT_BYTES = 1 << 18
"""Kept free for result.json."""
LITTLE_BYTES = 1 << 16
"""With less than this, what is to be written cannot be."""


def conduct(engine: Engine, config: RunConfig, secret: str = "") -> Result:
    """Run to the end. Ctrl-C, SIGTERM, SIGHUP or SIGQUIT asks the run to save itself; a second one ends it at
    once."""
    heed_termination()
    folder = config.path
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    reserve = Reserve(folder)
    reserve.take(RESULT_BYTES)
    try:
        ended = _see_through(engine, config, secret)
    except KeyboardInterrupt as error:
        engine.close()
        reserve.release()
        cut_short(config, f"ended at once by {str(error) or 'Ctrl-C'}", GONE_S)
        raise
    except EngineLost as error:
        reserve.release()
        cut_short(config, str(error), SAVED_S)
        engine.close()
        raise EngineLost(f"{error}{go_on(config)}") from None
    reserve.release()
    return finish(config, ended)


def _see_through(engine: Engine, config: RunConfig, secret: str) -> Ended:
    """Show the run until all of its processes are gone."""
    progress, folder = RunProgress(), config.path
    room = Room(folder)
    trace, output = TraceTail(folder / "trace.jsonl"), LeadOutput(folder / "logs")
    with live(progress):
        engine.launch(config, secret)
        ended, door, stopping = None, LineTail(folder / "address"), False
        notices, to_say = LineTail(folder / NOTICES), deque[str]()
        while ended is None:
            try:
                ended = engine.wait(LOOK_S)
                _show(progress, trace, output)
                to_say += [f"warning: {notice}" for notice in _new_text(notices)] + room.look()
                while to_say:
                    progress.print(to_say.popleft(), "yellow")
                for address in _new_text(door) if config.near < config.workers else ():
                    progress.print(_invitation(config, address))
            except KeyboardInterrupt:
                if stopping:
                    raise
                stopping = True
                engine.stop()
                to_say.append("stopping: saving the run (Ctrl-C again to end at once)")
            except OSError as error:  # the terminal was closed: no reason to end a run
                if error.errno != errno.EIO:
                    raise
                mute_if_hung_up()
    return ended


class Room:
    """Looks whether the disk of a run fills up, which the run itself cannot write down any more."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._told = folder, False

    def look(self) -> list[str]:
        """A warning, once."""
        if self._told or free_bytes(self._folder) >= LITTLE_BYTES:
            return []
        self._told = True
        return [
            f"warning: no room is left at {self._folder}. Training goes on; the trace has a gap until there "
            "is some, and room for the end was kept. Make room, or bound the trace with --trace-limit."
        ]


def _invitation(config: RunConfig, address: str) -> str:
    missing = config.workers - config.near
    host, _, port = address.rpartition(":")
    address = f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]") else address
    made = config.path / "secret"
    secret = f"the secret in {made}" if made.exists() else "the run's secret"
    tls = " --plain" if config.plain else " --tls" if config.tls_cert else ""
    others = "1 worker" if missing == 1 else f"{missing} workers"
    return (
        f"listening at {address} for {others} of other hosts. There, with {secret}: "
        f"paceline host {address} --workers {missing} --secret-file FILE{tls}"
    )


class LeadOutput:
    """What the lead prints, whoever that is by now."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._tails = [LineTail(logs / "rank0.log")]
        self._awaited = ""
        """The line after which the last of them is the lead's; empty: it was found."""

    def follow(self, rank: int) -> None:
        """The lead has passed to this rank."""
        self._tails.append(LineTail(self._logs / f"rank{rank}.log"))
        self._awaited = leads_now(rank)

    def new_text(self) -> list[str]:
        """Lines that were completed since the last call."""
        *before, last = (_new_text(tail) for tail in self._tails)
        if self._awaited:
            found = self._awaited in last
            last = last[last.index(self._awaited) + 1 :] if found else []
            self._awaited = "" if found else self._awaited
        return [line for lines in (*before, last) for line in lines]


def _show(progress: RunProgress, trace: TraceTail, output: LeadOutput) -> None:
    for line in output.new_text():
        progress.print(line)
    for event in trace.new_events():
        progress.add(event)
        if isinstance(event, LeadPassed):
            output.follow(event.worker)
            for line in output.new_text():
                progress.print(line)


def _new_text(tail: LineTail) -> list[str]:
    return [line.decode(errors="replace") for line in tail.new_lines()]
