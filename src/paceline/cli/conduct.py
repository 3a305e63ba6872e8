"""Starts a run on an engine, shows it while it goes on, and adds it up."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import msgspec

from paceline.cli.common import heed_termination
from paceline.config import RunConfig
from paceline.engines.control import Ended
from paceline.engines.engine import Engine
from paceline.errors import ConfigError, RunError, RunStopped, TraceError
from paceline.store.disk.folders import saved_in
from paceline.store.reserve import Reserve, free_bytes
from paceline.trace import Result, Tally, TraceTail, read_trace, tally
from paceline.trace.events import Planned
from paceline.trace.files import LineTail, write_whole
from paceline.trace.tally import Failure
from paceline.view.terminal.progress import RunProgress, live

LOOK_S = 0.1
RESULT_BYTES = 1 << 18
"""Kept free for result.json."""
LITTLE_BYTES = 1 << 16
"""With less than this, what is to be written cannot be."""


def conduct(engine: Engine, config: RunConfig, secret: str = "") -> Result:
    """Run to the end. Ctrl-C or SIGTERM asks the run to save itself; a second one ends it at once."""
    heed_termination()
    folder = config.path
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    progress, reserve, room = RunProgress(), Reserve(folder), Room(folder)
    reserve.take(RESULT_BYTES)
    trace, output = TraceTail(folder / "trace.jsonl"), LineTail(folder / "logs" / "rank0.log")
    with live(progress):
        engine.launch(config, secret)
        ended, door, stopping = None, LineTail(folder / "address"), False
        while ended is None:
            try:
                ended = engine.wait(LOOK_S)
                _show(progress, trace, output)
                for text in room.look():
                    progress.print(text, "yellow")
                for address in _new_text(door) if config.near < config.workers else ():
                    progress.print(_invitation(config, address))
            except KeyboardInterrupt:
                if stopping:
                    raise
                stopping = True
                progress.print("stopping: saving the run (Ctrl-C again to end at once)", "yellow")
                engine.stop()
    reserve.release()
    return _finish(config, ended)


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


def write_result(folder: Path) -> Result:
    """Add the trace up and keep the result beside it."""
    result = tally(read_trace(folder)).result()
    write_whole(folder / "result.json", msgspec.json.format(msgspec.json.encode(result)))
    return result


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


def _show(progress: RunProgress, trace: TraceTail, output: LineTail) -> None:
    for line in _new_text(output):
        progress.print(line)
    for event in trace.new_events():
        progress.add(event)
        if isinstance(event, Planned) and progress.tally.model is not None:
            epoch = progress.tally.model.samples_per_epoch
            progress.total_samples = None if epoch is None else epoch * event.epochs


def _new_text(tail: LineTail) -> list[str]:
    return [line.decode(errors="replace") for line in tail.new_lines()]


def _finish(config: RunConfig, ended: Ended) -> Result:
    total = _added_up(config, ended)
    result = write_result(config.path)
    if total.end is None:
        raise _lost_store(config, ended)
    places = _places(config, ended)
    if result.status == "finished":
        for place in places:
            print(f"warning: {place}", file=sys.stderr)
        return result
    signals = {rank: -code for rank, code in ended.statuses.items() if code < 0}
    if total.end.user_mistake:
        raise ConfigError(total.end.detail)
    if result.status == "stopped":
        raise RunStopped(f"{total.end.detail}.{_go_on(config)}")
    killed = "".join(f" Rank {rank} ended by {_signal_name(number)}." for rank, number in signals.items())
    why = _why(total.failures, total.end.detail)
    read = " ".join(places) or f"Read {config.path}/logs/."
    go_on = "" if config.checkpoint_every is None else _go_on(config)
    engine = f" {ended.detail}." if ended.detail else ""
    raise RunError(f"{total.end.detail.rstrip('.')}{why}.{killed}{engine} {read}{go_on}")


def _go_on(config: RunConfig) -> str:
    """How to, if there is a checkpoint to go on from."""
    if saved_in(config.path) is None:
        return ""
    return f" Go on with: paceline train {config.script} --resume {config.path}"


def _added_up(config: RunConfig, ended: Ended) -> Tally:
    try:
        return tally(read_trace(config.path))
    except TraceError:
        if ended.store_status == 0:
            raise
        raise _lost_store(config, ended) from None


def _lost_store(config: RunConfig, ended: Ended) -> RunError:
    log, status = config.path / "logs" / "store.log", ended.store_status
    how = f"by {_signal_name(-status)}" if status < 0 else f"with status {status}"
    last = "".join(f": {line.rstrip('.')}" for line in _new_text(LineTail(log))[-1:])
    return RunError(f"the store ended {how}{last}. Read {log}.{_go_on(config)}")


def _places(config: RunConfig, ended: Ended) -> list[str]:
    """Where workers that failed were, if not all were here, and what to read."""
    failed = sorted(rank for rank in ended.hosts if ended.statuses.get(rank, 0) != 0)
    logs = config.path / "logs"
    return [f"Rank {rank} was on host {ended.hosts[rank]}; read {logs}/rank{rank}.log." for rank in failed]


def _why(failures: list[Failure], said: str) -> str:
    details = dict.fromkeys(failure.detail for failure in failures)
    return "".join(f"; {text}" for text in details if text and text not in said)


def _signal_name(number: int) -> str:
    name = signal.Signals(number).name
    hint = " (a write to the shared weights? see --private-weights)" if number == signal.SIGSEGV else ""
    return name + hint
